"""Prefill and decode servers with data-parallel ranks, in groups and as replicas, say what one process says."""

from __future__ import annotations

import httpx
import pytest

from tests.server_process import wait_until
from tests.topology.cluster import busy_with, cluster_of
from tests.topology.test_prefill_decode_tp import assert_same, expected, generate, model_args

pytestmark = pytest.mark.timeout(240)
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
        for url in (cluster.urls["prefill"], cluster.urls["decode"]):
            states = httpx.get(f"{url}/server_info", timeout=30).json()["internal_states"]
            assert all(state["transfers_total"] > 0 for state in states)
            assert sum(state["transfers_total"] for state in states) == 4 * len(wanted)
            wait_until(lambda url=url: not any(map(busy_with, loads(url))), 15, f"{url} is drained")  # type: ignore[misc]


def loads(url: str) -> list[dict[str, int]]:
    found: list[dict[str, int]] = httpx.get(f"{url}/get_load", timeout=10).json()
    return found
