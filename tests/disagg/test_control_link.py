"""Control connections and their listener, where something goes wrong that nobody has thought of."""

from __future__ import annotations

import errno
import queue
import socket
from typing import Any

import msgspec
import pytest

from disagg.base import KVPoll
from disagg.bootstrap_client import BootstrapClient, Route
from disagg.control import Claim, ControlLink, Message, TransferInfo, pause_unless_closed
from disagg.registry import KV_MANAGERS
from tests.disagg.support import OPTIONS, Memory, ints, pair_of, wait_for

pytestmark = pytest.mark.timeout(240)


def test_a_message_that_cannot_be_handled_ends_the_connection() -> None:
    """The peer must not write to a thread that has gone."""
    listener = socket.create_server(("127.0.0.1", 0))
    closed: queue.SimpleQueue[tuple[str, str, bool]] = queue.SimpleQueue()

    def fail(link: ControlLink, message: Message) -> None:
        raise KeyError("lost")

    def link(sock: socket.socket, name: str) -> ControlLink:
        return ControlLink(sock, name, fail, lambda link, *end: closed.put((link.name, *end)), 60, 3)

    ours = link(socket.create_connection(listener.getsockname()), "ours")
    theirs = link(listener.accept()[0], "theirs")
    listener.close()
    try:
        ours.start()
        theirs.start()
        ours.send(Claim(1, 2))
        ends = sorted(closed.get(timeout=60) for _ in range(2))
        assert ends[0] == ("ours", "connection closed by ours", True)
        assert ends[1] == ("theirs", "a message of theirs could not be handled: 'lost'", False)
    finally:
        ours.close("end")
        ours.join(5)
        theirs.join(5)


class FailsOnce:
    """A listener whose next accept() finds no descriptor left."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self.failed = False

    def accept(self) -> Any:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_connection_that_cannot_be_accepted_is_not_the_last() -> None:
    with pair_of("tcp") as pair:
        # Threads that wait already take one more connection from the real listener.
        control = pair.prefill._end._listener = FailsOnce(pair.prefill._end._listener)  # type: ignore[attr-defined]
        bulk = pair.decode._end.mover._listener = FailsOnce(pair.decode._end.mover._listener)  # type: ignore[attr-defined]
        second = KV_MANAGERS["tcp"](Memory().args(), "decode", OPTIONS)
        try:
            for room, decode in ((1, pair.decode), (2, second)):
                receiver = decode.create_receiver(room, pair.server.address)
                receiver.init()
                wait_for(receiver, KVPoll.WaitingForInput)
                receiver.clear()
        finally:
            second.close()
        assert control.failed and bulk.failed
    assert pause_unless_closed(OSError(errno.EINVAL, "shut down"))


def test_index_lists_that_do_not_fit_fail_their_room_alone() -> None:
    with pair_of("mooncake") as pair:
        sender, receiver = pair.ends(1)
        wait_for(receiver, KVPoll.WaitingForInput)
        group = next(iter(pair.decode._end._groups.values()))  # type: ignore[attr-defined]
        transfer = next(iter(pair.decode._end._incoming))  # type: ignore[attr-defined]
        group.ranks[0].link.send(TransferInfo(1, transfer, 2, [0, 0], 0, [bytes(16), b"", b"odd"]))
        for end in (sender, receiver):
            wait_for(end, KVPoll.Failed)
            assert "index lists are not [2, 0, 0] items of each kind" in str(end.failure())
        sender, receiver = pair.ends(2)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.abort()


@pytest.mark.parametrize("fault", ["tp_size", "dp_size", "endpoint"])
def test_a_prefill_server_that_cannot_be_connected_to_fails_its_rooms_at_once(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no server has, and a backend that fails in a way of its own."""
    with pair_of("tcp") as pair:
        ask = BootstrapClient.route

        def wrong_size(client: BootstrapClient, dp_rank: int, tp_rank: int) -> Route:
            return msgspec.structs.replace(ask(client, dp_rank, tp_rank), **{fault: 0})

        def fail(peer_id: int) -> bytes:
            raise ValueError("no memory can be registered")

        with monkeypatch.context() as patch:
            if fault == "endpoint":
                patch.setattr(pair.decode._end.mover, "endpoint", fail)  # type: ignore[attr-defined]
            else:
                patch.setattr(BootstrapClient, "route", wrong_size)
            receiver = pair.decode.create_receiver(1, pair.server.address)
            receiver.init(-1 if fault == "dp_size" else 0)
            wait_for(receiver, KVPoll.Failed)
        texts = {
            "tp_size": "has 0 tensor-parallel ranks",
            "dp_size": "has 0 data-parallel ranks",
            "endpoint": "no memory can be registered",
        }
        assert texts[fault] in str(receiver.failure())
        _, receiver = pair.ends(2)
        wait_for(receiver, KVPoll.WaitingForInput)
