"""Which rank holds what, as a function of the sizes, and what is refused."""

from __future__ import annotations

import pytest

from layers.parallel_layout import LayoutError, ParallelLayout, RankPlace


def test_tensor_parallel_alone() -> None:
    layout = ParallelLayout(tp_size=4)
    assert layout.attention_groups() == layout.dense_groups() == layout.expert_groups() == [[0, 1, 2, 3]]
    assert layout.dp_groups() == layout.expert_tp_groups() == [[0], [1], [2], [3]]
    assert layout.place(2) == RankPlace(dp_rank=0, attention_tp_rank=2, ep_rank=2, expert_tp_rank=0)


def test_groups_of_data_parallel_attention_are_neighbours() -> None:
    layout = ParallelLayout(tp_size=8, dp_size=4, ep_size=2)
    assert layout.attention_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.dp_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [layout.leader(dp_rank) for dp_rank in range(4)] == [0, 2, 4, 6]
    assert layout.expert_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.expert_tp_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.place(5) == RankPlace(dp_rank=2, attention_tp_rank=1, ep_rank=1, expert_tp_rank=1)


def test_dense_mlps_may_be_whole_on_every_rank() -> None:
    assert ParallelLayout(tp_size=4, dp_size=2, dense_tp_size=1).dense_groups() == [[0], [1], [2], [3]]
    assert ParallelLayout(tp_size=4, dp_size=2, dense_tp_size=2).dense_groups() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 6, 8])
def test_every_partition_has_every_rank_once(tp_size: int) -> None:
    sizes = [size for size in range(1, tp_size + 1) if tp_size % size == 0]
    for layout in (ParallelLayout(tp_size, dp, ep) for dp in sizes for ep in sizes):
        partitions = [
            layout.attention_groups(),
            layout.dense_groups(),
            layout.expert_groups(),
            layout.expert_tp_groups(),
            layout.dp_groups(),
        ]
        for partition in partitions:
            assert sorted(rank for ranks in partition for rank in ranks) == list(range(tp_size))
        for rank in range(tp_size):
            place = layout.place(rank)
            assert rank == place.dp_rank * layout.attention_tp_size + place.attention_tp_rank
            assert layout.attention_groups()[place.dp_rank][place.attention_tp_rank] == rank
            assert layout.expert_tp_groups()[place.ep_rank][place.expert_tp_rank] == rank


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp_size": 0}, "--tp-size 0 must be at least 1"),
        ({"tp_size": 6, "dp_size": 4}, "--tp-size 6 is not a multiple of --dp-size 4"),
        ({"tp_size": 2, "dp_size": 4}, "--tp-size 2 is not a multiple of --dp-size 4"),
        ({"tp_size": 4, "ep_size": 3}, "--tp-size 4 is not a multiple of --ep-size 3"),
        (
            {"tp_size": 4, "dense_tp_size": 2},
            "--moe-dense-tp-size 2 is neither 1 nor the size of an attention group, 4",
        ),
    ],
)
def test_refused_with_the_flags_named(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        ParallelLayout(**sizes)
