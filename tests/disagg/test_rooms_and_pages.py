"""State rules of rooms, and page lists against a page-by-page reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.base import KVPoll
from disagg.pages import address_list, check_pages, contiguous_runs
from disagg.rooms import RoomTable

CREATING = (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
STEP = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 2), st.sampled_from(KVPoll)),
    st.tuples(st.just("clear"), st.integers(1, 2), st.none()),
)


@given(st.lists(STEP, max_size=30))
@settings(max_examples=150)
def test_states_follow_the_rules(steps: list[tuple[str, int, int | None]]) -> None:
    table = RoomTable(tombstone_time=1e9)
    model: dict[int, tuple[KVPoll, str]] = {}
    for number, (kind, room, value) in enumerate(steps):
        if kind == "clear":
            table.clear(room)
            model.pop(room, None)
        elif room not in model:
            table.update(room, KVPoll(value), f"reason {number}")
            if value in CREATING:
                model[room] = (KVPoll(value), "")
        else:
            status, reason = model[room]
            table.update(room, KVPoll(value), f"reason {number}")
            if status is not KVPoll.Failed and value == KVPoll.Failed:
                status, reason = KVPoll.Failed, f"reason {number}"
            elif status is not KVPoll.Failed:
                status = max(status, KVPoll(value))
            model[room] = (status, reason)
        for known in (1, 2):
            assert (known in table) == (known in model)
            assert table.status(known) is (model[known][0] if known in model else KVPoll.Failed)
            if known in model:
                assert table.reason(known) == model[known][1]


def test_success_after_a_failure_stays_failed_with_the_first_reason() -> None:
    table = RoomTable(10)
    table.update(5, KVPoll.Bootstrapping)
    table.update(5, KVPoll.Failed, "first")
    table.update(5, KVPoll.Failed, "second")
    assert table.update(5, KVPoll.Success) is KVPoll.Failed
    assert table.reason(5) == "first"


def test_tombstones_tell_late_messages_from_new_use_and_expire() -> None:
    now = [0.0]
    table = RoomTable(10, clock=lambda: now[0])
    for room, transfers in ((5, [70, 80]), (6, [])):
        table.update(room, KVPoll.Bootstrapping)
        table.clear(room, transfers)
    assert table.concluded(5, 70) and table.concluded(5, 80) and not table.concluded(5, 71)
    assert table.concluded(6, 1)
    table.update(5, KVPoll.Bootstrapping)
    assert not table.concluded(5, 70)
    now[0] = 10.0
    assert not table.concluded(6, 1)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 3))
@settings(max_examples=100)
def test_address_list_covers_the_pages_in_order(pages: list[int], regions: int) -> None:
    ptrs, items = [1000, 9000, 50000][:regions], [7, 16, 3][:regions]
    addresses, lengths = address_list(ptrs, items, np.array(pages, dtype=np.int64))
    covered = [byte for a, n in zip(addresses.tolist(), lengths.tolist(), strict=True) for byte in range(a, a + n)]
    expected = [
        ptr + page * item + i for ptr, item in zip(ptrs, items, strict=True) for page in pages for i in range(item)
    ]
    assert covered == expected


def test_runs_break_where_either_side_does() -> None:
    (left, right), lengths = contiguous_runs(np.array([3, 4, 5, 9, 10]), np.array([7, 8, 20, 21, 22]))
    assert left.tolist() == [3, 5, 9]
    assert right.tolist() == [7, 20, 21]
    assert lengths.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        contiguous_runs(np.array([1, 2]), np.array([1]))


def test_pages_outside_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.3, got 4"):
        check_pages("page", np.array([0, 4]), [64], [16])
    with pytest.raises(ValueError, match="got -1"):
        check_pages("page", np.array([0, -1]), [64], [16])
