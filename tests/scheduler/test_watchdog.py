"""A step that hangs, and a process that is asked where it is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from scheduler.messages import STATUS_HUNG
from tests.server_process import ROOT

pytestmark = pytest.mark.timeout(120)
# Ends when its input does, so that nothing here depends on how long it takes.
PROGRAM = """
import sys
from scheduler.watchdog import Watchdog

def waiting():
    print("there", flush=True)
    sys.stdin.read()

watchdog = Watchdog({timeout}, 3, lambda: "the agreement on a plan")
for _ in range(2):
    with watchdog:
        pass
{step}
"""


def start(step: str, timeout: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(step=step, timeout=timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_a_step_that_hangs_ends_the_process() -> None:
    with start("with watchdog: waiting()", timeout=0.2) as process:
        assert process.stderr is not None
        report = process.stderr.read()
        assert process.wait() == STATUS_HUNG
    first, *stacks = report.splitlines()
    what = "has taken more than --watchdog-timeout 0.2 s and is at the agreement on a plan"
    assert first == f"error: rank 3: step 3 {what}"
    assert all(line.startswith("rank 3: ") for line in stacks)
    assert any(line.endswith("in waiting") for line in stacks)


@pytest.mark.parametrize(
    ("step", "where"),
    [
        ("with watchdog: waiting()", "step 3 is at the agreement on a plan"),
        ("waiting()", "step 2 has ended"),
    ],
    ids=["in a step", "between steps"],
)
def test_a_process_says_where_it_is_and_goes_on(step: str, where: str) -> None:
    with start(step, timeout=50) as process:
        assert process.stdin is not None and process.stderr is not None
        for _ in range(2):
            os.kill(process.pid, signal.SIGUSR1)
            assert process.stderr.readline() == f"rank 3: {where}\n"
            while not re.fullmatch(r"rank 3: +File .* in <module>\n", process.stderr.readline()):
                pass
        process.stdin.close()
        process.stdin = None
        assert process.wait() == 0
