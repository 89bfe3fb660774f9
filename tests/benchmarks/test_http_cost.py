"""The benchmark of what HTTP costs ends with one figure."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import ROOT


@pytest.mark.sweep
@pytest.mark.timeout(200)
def test_runs_alone_and_over_http_give_a_figure(tmp_path: Path) -> None:
    results = tmp_path / "cost.json"
    command = [sys.executable, "benchmarks/http_cost.py", "--streams=8", "--input-len=20", "--output-len=200"]
    command += ["--max-token-id=200", "--repeat=2", f"--output={results}"]
    command += ["--model-path=tiny-llama", "--max-total-tokens=20000", "--num-threads=1"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True).stdout
    fours = json.loads(results.read_text())
    assert [[len(four["alone"]), len(four["over_http"])] for four in fours] == [[2, 2], [2, 2]]
    cost = statistics.median(four["cost"] for four in fours)
    assert f"cost {cost:.1%} in the median of 2 (quartiles " in printed
