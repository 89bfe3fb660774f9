"""The benchmark of what HTTP costs ends with one figure."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.server_process import ROOT


@pytest.mark.sweep
@pytest.mark.timeout(200)
def test_streams_that_are_halted_by_turns_give_a_figure() -> None:
    command = [
        sys.executable,
        "benchmarks/http_cost.py",
        "--streams=8",
        "--output-len=1900",
        "--seconds=0.1",
        "--max-token-id=200",
    ]
    command += ["--model-path=tiny-llama", "--max-total-tokens=20000", "--num-threads=1"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True).stdout
    figure = r"^cost -?[\d.]+% in the median of \d+ \(quartiles -?[\d.]+% to -?[\d.]+%\)$"
    assert re.search(figure, printed, re.MULTILINE)
