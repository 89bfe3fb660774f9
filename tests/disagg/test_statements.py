"""What a room may rely on, whatever becomes of its peers: told once, kept by every backend."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest

from disagg.base import KVManager, KVPoll, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS
from tests.disagg.support import (
    OPTIONS,
    HandAlarms,
    Memory,
    Pair,
    hear,
    ints,
    pair_of,
    python_process,
    tell,
    wait_for,
    wait_until,
)

pytestmark = pytest.mark.timeout(240)
REAL = [name for name in KV_MANAGERS if name != "fake"]


@pytest.fixture(params=REAL)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of("tcp") as made:
        yield made


class Side:
    """A prefill server of one rank with a bootstrap server of its own, and what it sends."""

    def __init__(self, stack: ExitStack, backend: str, fill: int, options: TransferOptions = OPTIONS) -> None:
        self.memory = Memory(fill=fill)
        self.server = BootstrapServer("127.0.0.1", 0)
        stack.callback(self.server.close)
        self.manager = KV_MANAGERS[backend](self.memory.args(), "prefill", options, self.server.address)
        stack.callback(lambda: self.manager.close())
        self._restart = lambda: KV_MANAGERS[backend](self.memory.args(), "prefill", options, self.server.address)

    def restart(self) -> None:
        self.manager.close()
        self.manager = self._restart()


def hand_over(prefill: KVManager, decode: KVManager, address: str, room: int, source: Memory, target: Memory) -> None:
    """Three chunks of a prompt of eight pages; every byte is compared."""
    receiver = decode.create_receiver(room, address)
    receiver.init()
    sender = prefill.create_sender(room)
    wait_for(receiver, KVPoll.WaitingForInput)
    pages = np.arange(8) + 3
    receiver.send_metadata(pages, 1, [ints(2), ints(1)])
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(8, 2)
    own = np.arange(8)[::-1] + 20
    for start, end in ((0, 3), (3, 6), (6, 8)):
        sender.send(own[start:end], [ints(4), ints(3)] if end == 8 else (), last=end == 8)
    wait_for(receiver, KVPoll.Success)
    wait_for(sender, KVPoll.Success)
    for have, want in zip(target.kv, source.kv, strict=True):
        np.testing.assert_array_equal(have[pages], want[own])
    sender.clear()
    receiver.clear()


def test_a_lost_prefill_server_fails_its_own_rooms_alone(backend: str) -> None:
    """Statement 15: requests with other prefill servers go on; it is used again when it is back at its address."""
    with ExitStack() as stack:
        first, second = Side(stack, backend, 1), Side(stack, backend, 2)
        target = Memory()
        decode = stack.enter_context(closing(KV_MANAGERS[backend](target.args(), "decode", OPTIONS)))
        ends = []
        for room, side in enumerate((first, second, first), start=1):
            receiver = decode.create_receiver(room, side.server.address)
            receiver.init()
            ends.append((side.manager.create_sender(room), receiver))
        for _, receiver in ends:
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(ints(1, 2), 1, [ints(), ints()])
        first.manager.close()
        for _, receiver in (ends[0], ends[2]):
            wait_for(receiver, KVPoll.Failed)
            assert f"prefill server {first.server.address}" in str(receiver.failure())
        sender, receiver = ends[1]
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(2, 0)
        sender.send(ints(5, 6), [ints(), ints()], last=True)
        wait_for(receiver, KVPoll.Success)
        receiver.clear()
        first.restart()
        hand_over(first.manager, decode, first.server.address, 9, first.memory, target)
        assert decode.num_rooms() == 0


def test_a_decode_server_that_restarts_is_served_each_time(backend: str) -> None:
    """A rank that comes back is never taken for its predecessor, which has left a room half done."""
    with ExitStack() as stack:
        prefill = Side(stack, backend, 1)
        for turn in range(3):
            target = Memory()
            decode = KV_MANAGERS[backend](target.args(), "decode", OPTIONS)
            try:
                hand_over(prefill.manager, decode, prefill.server.address, 10 + turn, prefill.memory, target)
                left = decode.create_receiver(50 + turn, prefill.server.address)
                left.init()
                sender = prefill.manager.create_sender(50 + turn)
                wait_for(left, KVPoll.WaitingForInput)
                left.send_metadata(ints(1, 2), 1, [ints(), ints()])
                wait_for(sender, KVPoll.WaitingForInput)
            finally:
                decode.close()
            wait_for(sender, KVPoll.Failed)
            sender.failure()
            assert prefill.manager.num_rooms() == 0


def test_only_a_request_that_has_not_come_runs_out_of_time() -> None:
    """From the moment both sides have a request, the length of the prefill side's queue does not count."""
    with pair_of("tcp", replace(OPTIONS, waiting_timeout=80)) as pair:
        alarms = HandAlarms(pair.decode)
        early, late, never = (pair.decode.create_receiver(room, pair.server.address) for room in (1, 2, 3))
        sender = pair.prefill.create_sender(1)
        for receiver in (early, late, never):
            receiver.init()
            wait_for(receiver, KVPoll.WaitingForInput)
        late_sender = pair.prefill.create_sender(2)
        early.send_metadata(ints(1), 0)
        wait_until(lambda: alarms.number(80) == 1)
        alarms.ring(80)
        wait_for(never, KVPoll.Failed)
        assert "did not arrive at the prefill server within waiting_timeout (80 s)" in str(never.failure())
        assert [end.poll() for end in (early, late)] == [KVPoll.WaitingForInput] * 2
        late.send_metadata(ints(2), 1)
        for end, receiver in ((sender, early), (late_sender, late)):
            wait_for(end, KVPoll.WaitingForInput)
            end.init(1, 0)
            end.send(ints(3), [ints(), ints()], last=True)
            wait_for(receiver, KVPoll.Success)


def test_a_room_given_up_before_the_connection_stands_is_told(pair: Pair) -> None:
    """Both orders: the prefill side has the request already, or gets it later."""
    waiting = pair.prefill.create_sender(1)
    for room in (1, 2):
        receiver = pair.decode.create_receiver(room, pair.server.address)
        receiver.init(-1)
        receiver.abort("the client is gone")
        receiver.clear()
    wait_for(waiting, KVPoll.Failed)
    assert "the decode side gave up: the client is gone" in str(waiting.failure())
    late = pair.prefill.create_sender(2)
    wait_for(late, KVPoll.Failed)
    assert "the client is gone" in str(late.failure())
    assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0


def test_a_room_given_up_is_told_to_its_data_parallel_rank() -> None:
    memory, server = Memory(fill=1), BootstrapServer("127.0.0.1", 0)
    prefill = [
        KV_MANAGERS["tcp"](memory.args(dp_rank=rank, dp_size=2), "prefill", OPTIONS, server.address, "start")
        for rank in range(2)
    ]
    decode = KV_MANAGERS["tcp"](Memory().args(), "decode", OPTIONS)
    try:
        senders = [prefill[room % 2].create_sender(room) for room in (4, 5)]
        for room in (4, 5):
            receiver = decode.create_receiver(room, server.address)
            receiver.init(-1)
            receiver.clear()
        for sender in senders:
            wait_for(sender, KVPoll.Failed)
            assert "the decode side gave up" in str(sender.failure())
    finally:
        decode.close()
        for manager in prefill:
            manager.close()
        server.close()


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_layers_is_refused_with_both(pair: Pair, count: int) -> None:
    memory = Memory(regions=count)
    other = KV_MANAGERS["tcp"](memory.args(), "decode", OPTIONS)
    try:
        receiver = other.create_receiver(5, pair.server.address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        reason = str(receiver.failure())
        assert "kv_layer_ids differs" in reason
        assert str(list(range(count))) in reason and str(list(range(4))) in reason
    finally:
        other.close()


def test_other_state_kinds_are_refused_with_both(pair: Pair) -> None:
    memory = Memory()
    other = KV_MANAGERS["tcp"](memory.args(state=memory.args().state[:1]), "decode", OPTIONS)
    try:
        receiver = other.create_receiver(5, pair.server.address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        reason = str(receiver.failure())
        assert "state_types differs" in reason and "['swa']" in reason and "['swa', 'request_row']" in reason
    finally:
        other.close()


def test_state_lists_follow_their_own_lengths(backend: str) -> None:
    """Statement 18: window pages and request rows come to the indices of their own lists, which may be empty."""
    with pair_of(backend) as pair:
        for room, (window, rows) in enumerate([((5, 2, 9), (3,)), ((7,), ()), ((), (1,)), ((), ())], start=1):
            for array in (*pair.target.window, *pair.target.row_state):
                array[:] = 0
            sender, receiver = pair.ends(room)
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(ints(1), 1, [ints(*window), ints(*rows)])
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(1, 0)
            sender.send(ints(4), [ints(*(20 + item for item in window)), ints(*(item - 1 for item in rows))], last=True)
            wait_for(receiver, KVPoll.Success)
            for have, want in zip(pair.target.window, pair.source.window, strict=True):
                np.testing.assert_array_equal(have[list(window)], want[[20 + item for item in window]])
                assert np.count_nonzero(have.any(axis=1)) == len(window)
            for have, want in zip(pair.target.row_state, pair.source.row_state, strict=True):
                np.testing.assert_array_equal(have[list(rows)], want[[item - 1 for item in rows]])
                assert np.count_nonzero(have.any(axis=1)) == len(rows)
            wait_for(sender, KVPoll.Success)
            sender.clear()
            receiver.clear()


def test_a_status_for_a_room_that_is_unknown_or_cleared_creates_none(pair: Pair) -> None:
    """Statement 2, over real connections: what comes late from either side finds nothing to change."""
    hand_over(pair.prefill, pair.decode, pair.server.address, 7, pair.source, pair.target)
    sender, receiver = pair.ends(8)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.abort("given up")
    receiver.clear()
    wait_for(sender, KVPoll.Failed)
    sender.clear()
    wait_until(lambda: pair.prefill.num_rooms() == pair.decode.num_rooms() == 0)
    # The same numbers at once again.
    for room in (7, 8):
        hand_over(pair.prefill, pair.decode, pair.server.address, room, pair.source, pair.target)
    assert (pair.prefill.num_rooms(), pair.decode.num_rooms()) == (0, 0)


TWO_ENDS = """
import socket, sys
from disagg.control import ControlLink

listener = socket.create_server(("127.0.0.1", 0))
ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
closed = []
for end in ends:
    ControlLink(end, "the peer", lambda *_: None, lambda link, reason, _: closed.append(reason), 0.3, 6).start()
for line in sys.stdin:
    print(closed, flush=True)
"""


def test_peers_of_a_host_that_stood_still_do_not_take_each_other_for_dead() -> None:
    """Both ends wake up long after the last sign of life: neither was silent for as long as the other was awake."""
    with python_process("-c", TWO_ENDS) as child:
        for _ in range(2):
            tell(child, "")
            assert hear(child) == "[]"
            child.send_signal(signal.SIGSTOP)
            time.sleep(2.0)  # the silence of 1.8 s ends a connection
            child.send_signal(signal.SIGCONT)
            time.sleep(0.3)
        tell(child, "")
        assert hear(child) == "[]"
