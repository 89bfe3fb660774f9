"""The engine benchmark on a tiny model that needs no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine

pytestmark = pytest.mark.timeout(240)

FLAGS = ["--model-path", "tiny-llama", "--device", "cpu", "--max-total-tokens", "2048"]


def test_counts_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    flags = ["--num-requests", "5", "--input-len", "8:20", "--output-len", "2:6", "--concurrency", "2"]
    assert engine.main([*FLAGS, *flags, "--warmup", "0", "--repeat", "2", "--output", str(path)]) == 0
    results = json.loads(path.read_text())
    expected = engine.make_workload(5, engine.LengthRange(8, 20), engine.LengthRange(2, 6), 511, seed=0)
    assert len(results["runs"]) == 2
    for run in results["runs"]:
        assert (run["completed"], run["failed"]) == (5, 0)
        assert run["input_tokens"] == sum(len(item.prompt_ids) for item in expected)
        assert run["output_tokens"] == sum(item.output_len for item in expected)
        assert run["output_tokens_per_s"] == pytest.approx(run["output_tokens"] / run["duration_s"], rel=0.05)
    assert results["config"]["max_total_tokens"] == 2048
    assert results["start_seconds"]["engine"] > 0
    assert "median of 2 runs" in capsys.readouterr().out


def test_prefill_only_has_no_decode_rate() -> None:
    args, config = engine.parse_args([*FLAGS, "--num-requests", "3", "--input-len", "30", "--output-len", "1"])
    run = engine.run(args, config)["runs"][0]
    assert (run["input_tokens"], run["output_tokens"], run["decode_tokens_per_s"]) == (90, 3, None)


def test_wrong_flags_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main([*FLAGS, "--num-request", "3"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("engine.py: unknown flag --num-request")
    assert message.count("\n") == 1
