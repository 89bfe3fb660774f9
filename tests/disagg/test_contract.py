"""What every KV manager does, and what those that move bytes do."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from disagg.base import KVPoll, KVTransferError
from disagg.registry import KV_MANAGERS, kv_manager_class
from tests.disagg.support import (
    OPTIONS,
    HandAlarms,
    Memory,
    Pair,
    abort_and_give_pages_away,
    ints,
    pair_of,
    wait_for,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(240)
REAL = [name for name in KV_MANAGERS if name != "fake"]


@pytest.fixture(params=KV_MANAGERS, scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.param) as made:
        yield made


@pytest.fixture(params=[f"{name}-{path}" for name in REAL for path in ("same-host", "tcp")], scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, path = request.param.split("-", 1)
    with pair_of(name, replace(OPTIONS, same_host_path=path == "same-host", checksum=path == "tcp")) as made:
        yield made


def test_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"fake, tcp.*, got 'carrier-pigeon'"):
        kv_manager_class("carrier-pigeon")


def test_manager_keeps_its_arguments(pair: Pair) -> None:
    assert pair.decode.kv_args.state_types == ["swa", "request_row"]
    assert pair.prefill.kv_args.kv_data_ptrs == [region.ctypes.data for region in pair.source.kv]


def test_states_of_a_good_transfer(pair: Pair) -> None:
    sender, receiver = pair.ends(11)
    assert receiver.poll() in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(3, 4), 1, [ints(), ints(2)])
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(2, 0)
    sender.send(ints(7))
    assert sender.poll() is KVPoll.Transferring
    sender.send(ints(9), [ints(), ints(5)], last=True)
    wait_for(sender, KVPoll.Success)
    wait_for(receiver, KVPoll.Success)
    sender.clear()
    receiver.clear()
    assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0


def test_abort_gives_the_first_reason_and_leaves_no_room(pair: Pair) -> None:
    sender, receiver = pair.ends(12)
    for end in (sender, receiver):
        end.abort("client gone")
        end.abort("later")
        assert end.poll() is KVPoll.Failed
        error = end.failure()
        assert isinstance(error, KVTransferError)
        assert error.room == 12
    assert receiver.release_safe()
    assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_wake_fd_tells_of_every_change_and_of_nothing_else(pair: Pair) -> None:
    for manager in (pair.prefill, pair.decode):
        if readable(manager.wake_fd):
            os.eventfd_read(manager.wake_fd)
    sender, receiver = pair.ends(13)
    assert readable(pair.prefill.wake_fd)
    limit = time.monotonic() + 60
    while receiver.poll() is not KVPoll.WaitingForInput:
        select.select([pair.decode.wake_fd], [], [], limit - time.monotonic())
        os.eventfd_read(pair.decode.wake_fd)
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(pair.decode.wake_fd)
    assert receiver.poll() is KVPoll.WaitingForInput
    assert not readable(pair.decode.wake_fd)
    receiver.send_metadata(ints(1), 0)
    while sender.poll() is not KVPoll.WaitingForInput:
        select.select([pair.prefill.wake_fd], [], [], limit - time.monotonic())
        os.eventfd_read(pair.prefill.wake_fd)
    sender.init(1, 0)
    sender.send(ints(1), last=True)
    for end, manager in ((sender, pair.prefill), (receiver, pair.decode)):
        while end.poll() is not KVPoll.Success:
            assert select.select([manager.wake_fd], [], [], limit - time.monotonic())[0]
            os.eventfd_read(manager.wake_fd)
    sender.clear()
    receiver.clear()


def test_skipped_pages_and_note_reach_the_other_side(real: Pair) -> None:
    """A decode rank that has 3 pages gets the others; a note of any length travels with the row."""
    for room, note in ((14, b""), (15, b"logprobs" * 100_000)):
        sender, receiver = real.ends(room)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(8, 9), 0, skip_pages=3)
        wait_for(sender, KVPoll.WaitingForInput)
        assert sender.skip_pages() == 3
        sender.init(2, 0)
        sender.send(ints(1, 2), last=True, note=note)
        wait_for(receiver, KVPoll.Success)
        assert receiver.note() == note
        np.testing.assert_array_equal(real.target.kv[0][[8, 9]], real.source.kv[0][[1, 2]])
        sender.clear()
        receiver.clear()


def test_scattered_pages_state_and_row_over_several_chunks(real: Pair) -> None:
    source, target = real.source, real.target
    rng = np.random.default_rng(5)
    src, dst = rng.permutation(64)[:30], rng.permutation(64)[:30]
    before = [region.copy() for region in target.kv]
    sender, receiver = real.ends(21)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(dst, 6, [ints(4, 9, 10), ints(3)])
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(30, 2)
    sender.send(src[:7])
    sender.send(src[7:20])
    sender.send(src[20:], [ints(30, 1, 2), ints(7)], last=True)
    wait_for(receiver, KVPoll.Success)
    wait_for(sender, KVPoll.Success)
    untouched = np.setdiff1d(np.arange(64), dst)
    for have, want, old in zip(target.kv, source.kv, before, strict=True):
        np.testing.assert_array_equal(have[dst], want[src])
        np.testing.assert_array_equal(have[untouched], old[untouched])
    for have, want in zip(target.window, source.window, strict=True):
        np.testing.assert_array_equal(have[[4, 9, 10]], want[[30, 1, 2]])
    np.testing.assert_array_equal(target.row_state[0][3], source.row_state[0][7])
    for have, want in zip(target.aux, source.aux, strict=True):
        np.testing.assert_array_equal(have[6], want[2])
    sender.clear()
    receiver.clear()


def test_row_comes_last_and_a_last_send_may_carry_no_page(real: Pair) -> None:
    """Statements 6 and 8 of the hand-over rules; 32: the decode side has every page of the prompt already."""
    for room, pages in ((31, 2), (32, 0)):
        real.target.aux[0][5] = 0
        sender, receiver = real.ends(room)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(np.arange(pages), 5, skip_pages=2 - pages)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(pages, 1)
        if pages:
            sender.send(np.arange(pages))
            wait_until(lambda: bool((real.target.kv[-1][1] == real.source.kv[-1][1]).all()))
            wait_for(receiver, KVPoll.Transferring)
        assert not real.target.aux[0][5].any()
        sender.send(ints(), last=True)
        wait_for(receiver, KVPoll.Success)
        np.testing.assert_array_equal(real.target.aux[0][5], real.source.aux[0][1])
        sender.clear()
        receiver.clear()


def test_indices_may_come_before_the_request_and_rooms_are_used_again(real: Pair) -> None:
    for _ in range(3):
        receiver = real.decode.create_receiver(41, real.server.address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        wait_until(lambda: real.prefill.num_rooms() == 1)
        sender = real.prefill.create_sender(41)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(1, 0)
        sender.send(ints(1), last=True)
        wait_for(receiver, KVPoll.Success)
        wait_for(sender, KVPoll.Success)
        sender.clear()
        receiver.clear()
        assert real.prefill.num_rooms() == 0


@pytest.mark.parametrize("room", [0, -1, 2**63, 10**30, True])
def test_impossible_rooms_are_refused(real: Pair, room: int) -> None:
    with pytest.raises(ValueError, match=str(room)):
        real.prefill.create_sender(room)
    with pytest.raises(ValueError, match="bootstrap_room must be an integer from 1"):
        real.decode.create_receiver(room, real.server.address)


def test_largest_room_works_and_a_duplicate_is_refused(real: Pair) -> None:
    sender, receiver = real.ends(2**63 - 1)
    with pytest.raises(ValueError, match="in use"):
        real.prefill.create_sender(2**63 - 1)
    with pytest.raises(ValueError, match="in use"):
        real.decode.create_receiver(2**63 - 1, real.server.address)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(0), 0)
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(1, 0)
    sender.send(ints(0), last=True)
    wait_for(receiver, KVPoll.Success)
    sender.clear()
    receiver.clear()


def test_disagreeing_page_and_state_counts_fail_both_sides_with_the_numbers(real: Pair) -> None:
    """Statements 7 and 18: the sum of sent pages and every state list must be what the decode side expects."""
    for room, have, state, text in (
        (51, 3, [], "has 3 pages, the decode side expects 2"),
        (52, 2, [ints(1)], "state swa: the prefill side has 1 items, the decode side expects 0"),
    ):
        sender, receiver = real.ends(room)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(0, 1), 0)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(have, 0)
        sender.send(np.arange(have), state, last=True)
        for end in (sender, receiver):
            wait_for(end, KVPoll.Failed)
            assert text in str(end.failure())


def test_pages_outside_the_memory_are_refused(real: Pair) -> None:
    sender, receiver = real.ends(61)
    wait_for(receiver, KVPoll.WaitingForInput)
    with pytest.raises(ValueError, match=r"page indices must lie in 0\.\.63, got 64"):
        receiver.send_metadata(ints(64), 0)
    with pytest.raises(ValueError, match=r"aux row indices must lie in 0\.\.7, got 8"):
        receiver.send_metadata(ints(3), 8)
    receiver.abort()
    wait_for(sender, KVPoll.Failed)
    assert "the decode side gave up: aborted" in str(sender.failure())
    receiver.clear()


def test_decode_gone_before_the_request_arrives_fails_the_late_sender(real: Pair) -> None:
    receiver = real.decode.create_receiver(71, real.server.address)
    receiver.init()
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(1), 0)
    wait_until(lambda: real.prefill.num_rooms() == 1)
    receiver.abort("client gone")
    receiver.clear()
    wait_until(lambda: real.prefill.num_rooms() == 0)
    sender = real.prefill.create_sender(71)
    assert sender.poll() is KVPoll.Failed
    assert "client gone" in str(sender.failure())


def test_prefill_that_ended_answers_late_indices(real: Pair) -> None:
    sender, receiver = real.ends(72)
    wait_for(receiver, KVPoll.WaitingForInput)
    sender.abort("over the limit")
    sender.clear()
    receiver.send_metadata(ints(1), 0)
    wait_for(receiver, KVPoll.Failed)
    receiver.clear()
    assert real.prefill.num_rooms() == 0


@pytest.mark.parametrize("same_host", [True, False])
def test_abort_mid_transfer_with_the_pages_given_away_at_once(same_host: bool) -> None:
    options = replace(OPTIONS, frame_bytes=1 << 20, same_host_path=same_host)
    with pair_of("tcp", options, pages=256, page_bytes=8192) as pair:
        assert abort_and_give_pages_away(pair, turns=25) == 0


def test_prefill_abort_never_becomes_a_success_with_overwritten_pages() -> None:
    with pair_of("tcp", pages=64, page_bytes=65536) as pair:
        pages = np.arange(64)
        for turn in range(10):
            sender, receiver = pair.ends(turn + 1)
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(pages, 0)
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(64, 0)
            sender.send(pages, last=True)
            sender.abort("preempted")
            saved = [region.copy() for region in pair.source.kv]
            for region in pair.source.kv:
                region[:] = 0xEE
            wait_for_end(receiver)
            if receiver.poll() is KVPoll.Success:
                for have, want in zip(pair.target.kv, saved, strict=True):
                    np.testing.assert_array_equal(have, want)
            for region, old in zip(pair.source.kv, saved, strict=True):
                region[:] = old
            sender.clear()
            receiver.clear()


@pytest.mark.parametrize(
    ("field", "value", "own"),
    [
        ("model", "other", "tiny"),
        ("page_size", 32, "16"),
        ("kv_dtype", "float8", "bfloat16"),
        ("kv_layout", "page-layer", "layer-page"),
        ("kv_head_num", 1, "2"),
    ],
)
def test_a_peer_that_differs_is_refused_with_both_values(real: Pair, field: str, value: object, own: str) -> None:
    memory = Memory()
    other = KV_MANAGERS["tcp"](memory.args(**{field: value}), "decode", OPTIONS)
    try:
        receiver = other.create_receiver(5, real.server.address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        failure = receiver.failure()
        reason = str(failure)
        assert f"{field} differs" in reason and str(value) in reason and own in reason
        assert failure.unfit
    finally:
        other.close()


def test_timeouts_name_their_flag() -> None:
    options = replace(OPTIONS, bootstrap_timeout=90, waiting_timeout=80)
    with pair_of("tcp", options) as pair:
        prefill, decode = HandAlarms(pair.prefill), HandAlarms(pair.decode)
        sender = pair.prefill.create_sender(1)
        lost = pair.decode.create_receiver(2, "127.0.0.1:9")
        lost.init()
        receiver = pair.decode.create_receiver(3, pair.server.address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        # A decode side that has claimed its room and lives may take longer than bootstrap_timeout.
        slow_sender, slow_receiver = pair.ends(4)
        wait_for(slow_receiver, KVPoll.WaitingForInput)
        wait_until(lambda: pair.prefill.num_rooms() == 3 and decode.number(80) == 1)  # all claims have been taken
        prefill.ring(90)
        decode.ring(90)
        decode.ring(80)
        for end, text in (
            (sender, "no decode rank asked for the room within bootstrap_timeout (90 s)"),
            (lost, "prefill server 127.0.0.1:9 was not ready within bootstrap_timeout (90 s)"),
            (receiver, "did not arrive at the prefill server within waiting_timeout (80 s)"),
        ):
            wait_for(end, KVPoll.Failed)
            failure = end.failure()
            assert text in str(failure) and not failure.unfit
        assert slow_sender.poll() is KVPoll.Bootstrapping
        slow_receiver.send_metadata(ints(1), 0)
        wait_for(slow_sender, KVPoll.WaitingForInput)
