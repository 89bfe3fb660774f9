"""Ranks on GPUs of one host, over NCCL: the tokens of one GPU, eagerly and with decode graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.support import make_checkpoint, random_ids
from tests.topology.engine_rank import Scenario, run_on_ranks, run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_size": 1},
        {"dp_size": 2, "enable_dp_attention": True, "disable_cuda_graph": True},
        {"dp_size": 2, "enable_dp_attention": True},
        {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "deepep"},
        {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "megamoe"},
    ],
    ids=str,
)
def test_tokens_equal_those_of_one_gpu(tmp_path: Path, sizes: dict[str, Any]) -> None:
    dp_size = sizes["dp_size"]
    prompts = [random_ids(length, seed=length) for length in (1, 7, 64, 65, 90)]
    params = [SamplingParams(12, 0, temperature=0.0, ignore_eos=True)] * len(prompts)
    scenarios = []
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        make_checkpoint(family, tmp_path / family)
        config = EngineConfig(
            model_path=str(tmp_path / family),
            dtype="float32",
            device="cuda",
            max_total_tokens=2048,
            cuda_graph_max_bs=8,
        )
        scenarios.append(Scenario(config, [prompts], params))
    expected = [[g.token_ids for g in run_scenario(scenario).generations] for scenario in scenarios]
    by_rank = run_on_ranks(scenarios, tp_size=2, **sizes)
    replays = dp_size > 1 and not sizes.get("disable_cuda_graph")
    for rank, results in enumerate(by_rank):
        got = [[g.token_ids for g in result.generations] for result in results]
        assert got == [tokens[rank::dp_size] if dp_size > 1 else tokens for tokens in expected]
        assert [any(result.graph_sizes) for result in results] == [replays] * len(scenarios)
