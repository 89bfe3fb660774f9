"""Data-parallel ranks that replay recorded decode passes: the tokens of one process that runs everything eagerly.

The recorder is one for CPUs; padding, idle ranks, the agreement on a size and the ranks' collectives are as with CUDA
graphs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.topology.engine_rank import Scenario, run_on_ranks, run_scenario

# (prompt tokens, new tokens), dealt out in turn to two groups: one has up to five that decode when the other has one or
# none. The second round is for one group alone until a prompt comes to the other in the midst of its decode steps.
ROUNDS = (
    ((9, 16), (30, 4), (3, 14), (5, 2), (1, 11), (17, 7), (12, 9), (2, 1), (6, 5), (4, 3)),
    ((7, 20), (11, 3)),
)
ARRIVALS = [[0, 0, 0, 2, 1, 6, 3, 9, 4, 10], [0, 8]]
# The largest recorded size is below the largest batch, so that some decode steps run eagerly.
SIZES = [1, 2, 4]


def scenario(prefill_decode: bool = False, **settings: Any) -> Scenario:
    prompts = [[random_ids(length, seed=length) for length, _ in requests] for requests in ROUNDS]
    # One list serves both rounds.
    params = [SamplingParams(new, 0, temperature=0.0, ignore_eos=True) for _, new in ROUNDS[0]]
    config = EngineConfig(
        model_path="tiny-qwen3-moe",
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_total_tokens=1024,
        max_running_requests=8,
        chunked_prefill_size=16,
        cuda_graph_max_bs=SIZES[-1],
        **settings,
    )
    return Scenario(config, prompts, params, arrivals=ARRIVALS, prefill_decode=prefill_decode, records=True)


SCENARIOS = {
    "none": scenario(),
    "none, overlap": scenario(disable_overlap_schedule=False),
    "deepep, auto": scenario(moe_a2a_backend="deepep"),
    "deepep, low latency": scenario(
        moe_a2a_backend="deepep", deepep_mode="low_latency", disable_overlap_schedule=False
    ),
    "megamoe": scenario(moe_a2a_backend="megamoe", enable_dp_lm_head=True),
    "megamoe, experts move": scenario(
        moe_a2a_backend="megamoe", ep_num_redundant_experts=4, enable_eplb=True, eplb_rebalance_num_iterations=5
    ),
}
# On a decode server, where requests come when their keys and values do.
HANDED_OVER = {
    f"{backend}, handed over": scenario(prefill_decode=True, moe_a2a_backend=backend)
    for backend in ("none", "deepep", "megamoe")
}
LAYOUTS = [
    pytest.param(2, SCENARIOS, id="two groups"),
    pytest.param(2, HANDED_OVER, id="two groups, two roles", marks=pytest.mark.sweep),
    pytest.param(4, SCENARIOS | HANDED_OVER, id="two groups of two", marks=pytest.mark.sweep),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tp_size", "named"), LAYOUTS)
def test_tokens_equal_those_of_eager_steps(tp_size: int, named: dict[str, Scenario]) -> None:
    alone = run_scenario(msgspec.structs.replace(SCENARIOS["none"], records=False))
    expected = [generation.token_ids for generation in alone.generations]
    by_rank = run_on_ranks(list(named.values()), tp_size=tp_size, dp_size=2, enable_dp_attention=True)
    for rank, results in enumerate(by_rank):
        group = rank // (tp_size // 2)
        for index, (name, result) in enumerate(zip(named, results, strict=True)):
            first, second = expected[: len(ROUNDS[0])], expected[len(ROUNDS[0]) :]
            tokens = [generation.token_ids for generation in result.generations]
            assert tokens == first[group::2] + second[group::2], f"{name}, rank {rank}"
            # Every rank replays in every step whose plan names a size, and in no other.
            assert result.graph_sizes == by_rank[0][index].graph_sizes
            assert result.replays == sum(size > 0 for size in result.graph_sizes) > 0, f"{name}, rank {rank}"
            if name in SCENARIOS:
                assert set(result.graph_sizes) == {0, *SIZES}, name
