"""Prefill and decode servers with data-parallel ranks, in groups and as replicas, say what one process says."""

from __future__ import annotations

import pytest

from tests.topology.cluster import cluster_of
from tests.topology.test_prefill_decode_tp import assert_same, expected, generate, model_args

pytestmark = pytest.mark.timeout(480)
MODEL = "tiny-qwen3-moe"
GROUPS = ("--tp-size=2", "--dp-size=2", "--enable-dp-attention")
REPLICAS = ("--dp-size=2",)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(GROUPS, GROUPS), pytest.param(REPLICAS, ("--tp-size=2",), marks=pytest.mark.sweep)],
    ids=str,
)
def test_every_rank_takes_part(prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    wanted, _ = expected(MODEL)
    with cluster_of(
        prefill_args=(*prefill, "--chunked-prefill-size=64"), decode_args=decode, model_args=model_args(MODEL)
    ) as cluster:
        for _ in range(4):
            assert_same(generate(cluster.url, penalized=False), wanted)
        cluster.wait_drained()
        for name in ("prefill", "decode"):
            transfers = [state["transfers_total"] for state in cluster.states(name)]
            assert min(transfers) > 0
            assert sum(transfers) == 4 * len(wanted)
