"""Ranks with requests of their own that share the experts: every request gets the tokens of the one-process engine.

Prompts of very different lengths and outputs, so that ranks extend, decode and idle in one step, and run dry one after
the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.support import make_checkpoint, random_ids
from tests.topology.engine_rank import Result, Scenario, run_on_ranks, run_scenario

# (prompt tokens, new tokens): dealt out in turn to two or four ranks, the last of which gets least.
REQUESTS = ((90, 20), (5, 3), (1, 12), (40, 1), (64, 2), (17, 16))
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "two groups": (("qwen3_moe", "deepseek_v3", "llama"), {"tp_size": 2, "dp_size": 2}),
    "two groups of two": (("deepseek_v3", "llama"), {"tp_size": 4, "dp_size": 2}),
    "four groups, experts split in columns": (("qwen3_moe",), {"tp_size": 4, "dp_size": 4, "ep_size": 2}),
}


def scenarios(folder: Path, seed: int) -> dict[str, Scenario]:
    def config(**settings: Any) -> EngineConfig:
        values: dict[str, Any] = {"max_total_tokens": 1024, **settings}
        return EngineConfig(model_path=str(folder), dtype="float32", device="cpu", num_threads=1, **values)

    prompts = [random_ids(length, seed=100 * seed + length) for length, _ in REQUESTS]
    params = [SamplingParams(count, 0, temperature=0.0, ignore_eos=True) for _, count in REQUESTS]
    return {
        # The second round: one rank alone has work.
        "whole prompts": Scenario(config(), [prompts, prompts[:1]], params),
        "chunks of 13, overlapping steps, penalties": Scenario(
            config(chunked_prefill_size=13, disable_overlap_schedule=False),
            [prompts],
            [
                msgspec.structs.replace(one, frequency_penalty=0.3 * (i % 3), repetition_penalty=1.2)
                for i, one in enumerate(params)
            ],
        ),
    }


def merged(ranks: list[Result], scenario: Scenario, dp_size: int) -> list[list[int]]:
    """Tokens of all requests in their order, from one rank of each group."""
    tokens: list[list[int]] = []
    left = [[generation.token_ids for generation in result.generations] for result in ranks]
    for prompts in scenario.rounds:
        tokens += [left[number % dp_size].pop(0) for number in range(len(prompts))]
    assert not any(left)
    return tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        "two groups",
        pytest.param("two groups of two", marks=pytest.mark.sweep),
        "four groups, experts split in columns",
    ],
)
def test_tokens_equal_those_of_one_process(layout: str, tmp_path: Path) -> None:
    families, sizes = LAYOUTS[layout]
    named: dict[str, Scenario] = {}
    for seed, family in enumerate(families):
        folder = tmp_path / family
        make_checkpoint(family, folder)
        named |= {f"{family}: {name}": scenario for name, scenario in scenarios(folder, seed).items()}
    results = run_on_ranks(list(named.values()), enable_dp_attention=True, **sizes)
    stride = sizes["tp_size"] // sizes["dp_size"]
    for index, (name, scenario) in enumerate(named.items()):
        expected = run_scenario(scenario).generations
        by_rank = [ranks[index] for ranks in results]
        for first in range(stride):
            got = merged(by_rank[first::stride], scenario, sizes["dp_size"])
            assert got == [generation.token_ids for generation in expected], name
