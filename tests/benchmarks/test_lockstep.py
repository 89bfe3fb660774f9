"""The benchmark of lockstep prints its three figures."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks import lockstep
from tests.server_process import ROOT


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_every_part_prints_its_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.lockstep", "--ranks", "2", "--steps", "50", "--models=tiny-qwen3-moe"]
    command += ["--batch-sizes", "1", "--blocks", "2", "--block-steps", "8", "--idle-seconds=1", "--settle-seconds=0"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True).stdout
    assert re.search(r"^ +2 +\d+ +\d+ +\d+$", printed, re.MULTILINE)
    share = r"tiny-qwen3-moe +1 +[\d.]+ ms +[\d.]+ ms +[-+][\d.]+% +\([-+][\d.]+% to [-+][\d.]+%\) +\d+ us +[\d.]+%$"
    assert re.search(share, printed, re.MULTILINE)
    assert re.search(r"^Idle group of 2 .* over \d s: [\d.]+%, [\d.]+% of a core per rank$", printed, re.MULTILINE)


def test_too_few_steps_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        lockstep.main(["--block-steps", "5"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("--blocks has to be at least 2 and --block-steps more than 5")
