"""Engines of several processes with their experts spread over them give the tokens of the one-process engine."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine, EngineError
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.topology.engine_rank import Scenario, run_on_ranks, run_scenario

PRESETS = ("tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v3")
# Uneven over two data-parallel groups: the last round is for one of them alone.
LENGTHS = [(3, 40, 70), (5, 1), (30,)]


def scenarios(presets: tuple[str, ...]) -> dict[str, Scenario]:
    rounds = [[random_ids(length, seed=length) for length in lengths] for lengths in LENGTHS]
    params = [SamplingParams(length, 0, temperature=0.0, ignore_eos=True) for length in (9, 4, 6)]

    def scenario(preset: str, **settings: Any) -> Scenario:
        config = EngineConfig(
            model_path=preset,
            dtype="float32",
            device="cpu",
            num_threads=1,
            max_total_tokens=1024,
            chunked_prefill_size=32,
            **settings,
        )
        return Scenario(config, rounds, params)

    named = {
        f"{preset}, {backend}": scenario(preset, moe_a2a_backend=backend)
        for preset in presets
        for backend in ("none", "deepep", "megamoe")
    }
    moving = {"ep_num_redundant_experts": 4, "enable_eplb": True, "eplb_rebalance_num_iterations": 4}
    for backend in ("none", "deepep", "megamoe"):
        named[f"{PRESETS[0]}, {backend}, experts move"] = scenario(PRESETS[0], moe_a2a_backend=backend, **moving)
    return named


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sizes", "presets"),
    [
        ({"dp_size": 2, "enable_dp_attention": True}, PRESETS),
        pytest.param({"dp_size": 1}, PRESETS[:1], marks=pytest.mark.sweep),
    ],
)
def test_tokens_equal_those_of_one_process(sizes: dict[str, Any], presets: tuple[str, ...]) -> None:
    named = scenarios(presets)
    expected = {preset: run_scenario(named[f"{preset}, none"]).generations for preset in presets}
    step = int(sizes["dp_size"])
    for rank, results in enumerate(run_on_ranks(list(named.values()), tp_size=2, **sizes)):
        for name, got in zip(named, results, strict=True):
            wanted, at = [], 0
            for lengths in LENGTHS:
                wanted += expected[name.split(",")[0]][at : at + len(lengths)][rank % step :: step]
                at += len(lengths)
            assert [g.token_ids for g in got.generations] == [g.token_ids for g in wanted], f"{name}, rank {rank}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"moe_a2a_backend": "megamoe", "mega_moe_max_tokens_per_rank": 43},
            "44 rows a rank are more than --mega-moe-max-tokens-per-rank 43",
        ),
        (
            {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency", "deepep_max_tokens_per_rank": 40},
            "44 rows a rank are more than --deepep-max-tokens-per-rank 40",
        ),
    ],
)
def test_rows_that_a_step_can_have_are_compared_with_the_cap_at_start(settings: dict[str, Any], message: str) -> None:
    """Twelve requests that decode and a chunk of 32 prompt tokens can be one step."""

    def start(**changes: Any) -> Engine:
        return Engine(
            EngineConfig(
                model_path=PRESETS[0],
                device="cpu",
                num_threads=1,
                max_total_tokens=256,
                max_running_requests=12,
                chunked_prefill_size=32,
                **(settings | changes),
            )
        )

    with pytest.raises(EngineError, match=message):
        start()
    start(**{name: 44 for name in settings if name.endswith("per_rank")})
    # On a prefill server no request decodes, on a decode server those that were retracted are computed again.
    caps = {name: 31 for name in settings if name.endswith("per_rank")}
    for role, rows in (("prefill", 32), ("decode", 44)):
        with pytest.raises(EngineError, match=f"{rows} rows a rank are more than --"):
            start(disaggregation_mode=role, **caps)
