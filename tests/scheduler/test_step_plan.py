"""The plan is a function of the table alone, and says what the ranks have to agree on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layers.forward_batch import ForwardMode, StepRows
from layers.parallel_layout import ParallelLayout
from scheduler.step_plan import Desync, StepRow, make_plan

FOUR = ParallelLayout(tp_size=4, dp_size=4)
PAIRS = ParallelLayout(tp_size=4, dp_size=2)
GRAPHS = (1, 2, 4, 8)


def row(mode: ForwardMode = ForwardMode.IDLE, num_tokens: int = 0, num_requests: int = 0, **others: Any) -> StepRow:
    fields = dict.fromkeys(StepRow._fields, 0) | {"can_replay": int(mode is not ForwardMode.EXTEND)}
    fields |= {"mode": int(mode), "num_tokens": num_tokens, "num_requests": num_requests} | others
    return StepRow(**fields)


def decode(requests: int, **others: Any) -> StepRow:
    return row(ForwardMode.DECODE, requests, requests, live_requests=requests, **others)


def extend(tokens: int, requests: int = 1) -> StepRow:
    return row(ForwardMode.EXTEND, tokens, requests, live_requests=requests)


def test_nobody_has_work_and_nobody_runs() -> None:
    plan = make_plan([row()] * 4, FOUR, GRAPHS)
    assert not plan.runs and not plan.any_live and not plan.any_pending


def test_one_rank_with_work_makes_all_run() -> None:
    plan = make_plan([row(), row(), decode(3), row()], FOUR, ())
    assert plan.runs and plan.any_live
    assert plan.rows() == StepRows((0, 0, 3, 0), "sum", extends=False)


def test_ranks_extend_decode_and_idle_in_one_step_eagerly() -> None:
    plan = make_plan([extend(17), decode(2), row(), decode(1)], FOUR, GRAPHS)
    assert plan.graph_size == 0
    assert plan.rows() == StepRows((17, 2, 0, 1), "sum", extends=True)


# The batches of bug reports about ranks that chose different graphs.
@pytest.mark.parametrize(
    ("batches", "size"), [((8, 1), 8), ((9, 1), 0), ((0, 8), 8), ((9, 9), 0), ((3, 2), 4), ((1, 0), 1)]
)
def test_every_rank_replays_the_graph_of_the_largest_batch(batches: tuple[int, int], size: int) -> None:
    rows = [decode(count) if count else row() for count in batches]
    plan = make_plan(rows, ParallelLayout(tp_size=2, dp_size=2), GRAPHS)
    assert plan.graph_size == size
    assert plan.rows() == StepRows(batches, "max" if size else "sum", size, extends=False)


def test_one_rank_that_cannot_replay_makes_all_run_eagerly() -> None:
    assert make_plan([decode(2), decode(2, can_replay=0)], ParallelLayout(2, 2), GRAPHS).graph_size == 0


def test_a_step_under_way_is_known_to_all() -> None:
    plan = make_plan([row(), row(results_pending=1), row(), row()], FOUR, ())
    assert plan.any_pending and not plan.runs


def test_ranks_of_a_group_count_once() -> None:
    plan = make_plan([decode(3), decode(3), extend(5), extend(5)], PAIRS, ())
    assert plan.num_tokens == (3, 5)


def test_ranks_of_a_group_that_differ_are_named_with_the_field() -> None:
    table = [decode(3), decode(3), decode(2, free_pages=7), decode(2, free_pages=6)]
    with pytest.raises(Desync, match="^step 0: free_pages is 7 on rank 2 and 6 on rank 3$"):
        make_plan(table, PAIRS, ())


def test_ranks_at_different_steps_are_named() -> None:
    with pytest.raises(Desync, match="^rank 0 is at step 5, rank 2 at step 4$"):
        make_plan([decode(1, step=5), decode(1, step=5), decode(1, step=4), decode(1, step=5)], FOUR, ())


def test_ranks_with_other_graphs_are_named_before_one_of_them_replays() -> None:
    table = [decode(1, largest_graph=8), decode(1, largest_graph=8), row(largest_graph=4), decode(1, largest_graph=8)]
    with pytest.raises(Desync, match="^step 0: largest_graph is 8 on rank 0 and 4 on rank 2$"):
        make_plan(table, FOUR, GRAPHS)


@given(st.lists(st.tuples(st.sampled_from(ForwardMode), st.integers(1, 12), st.booleans()), min_size=4, max_size=4))
def test_the_plan_fits_every_rank(batches: list[tuple[ForwardMode, int, bool]]) -> None:
    table = []
    for mode, count, can_replay in batches:
        filled = {
            ForwardMode.IDLE: row(),
            ForwardMode.DECODE: decode(count),
            ForwardMode.EXTEND: extend(3 * count, count),
        }
        own = filled[mode]
        table.append(own._replace(can_replay=int(can_replay and own.can_replay)))
    plan = make_plan(table, FOUR, GRAPHS)
    rows = plan.rows()
    assert rows.global_num_tokens == tuple(own.num_tokens for own in table)
    assert plan.runs == any(own.num_tokens for own in table)
    for own, count in zip(table, rows.counts, strict=True):
        assert count >= own.num_tokens
        if plan.graph_size:
            assert own.can_replay and own.num_requests <= plan.graph_size and own.mode != ForwardMode.EXTEND
    # Another order of ranks gives the same plan in that order.
    turned = make_plan(table[::-1], FOUR, GRAPHS)
    assert (turned.graph_size, turned.extends, turned.num_tokens[::-1]) == (
        plan.graph_size,
        plan.extends,
        plan.num_tokens,
    )
