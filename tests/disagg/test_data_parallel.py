"""Prefill servers with several data-parallel ranks: a room says which of them has the request."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.tcp import TcpKVManager
from tests.disagg.support import OPTIONS, Memory, ints, wait_for, wait_until


@pytest.mark.timeout(240)
def test_rooms_find_their_rank_and_follow_a_restart_with_another_size() -> None:
    """Statement 16: rank room mod dp_size, computed by both sides with no query."""
    target, sources = Memory(), [Memory(fill=rank + 1) for rank in range(3)]
    server = BootstrapServer("127.0.0.1", 0)

    def start(size: int, incarnation: str) -> list[TcpKVManager]:
        return [
            TcpKVManager(
                sources[rank].args(dp_rank=rank, dp_size=size), "prefill", OPTIONS, server.address, incarnation
            )
            for rank in range(size)
        ]

    decode = TcpKVManager(target.args(), "decode", OPTIONS)
    prefill = start(3, "first")

    def hand_over(room: int, rank: int) -> None:
        receiver = decode.create_receiver(room, server.address)
        receiver.init(-1)
        sender = prefill[rank].create_sender(room)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(5, 9), 1, [ints(2), ints(1)])
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(2, 3)
        sender.send(ints(7, 4), [ints(2), ints(1)], last=True)
        wait_for(receiver, KVPoll.Success)
        assert np.array_equal(target.kv[0][[5, 9]], sources[rank].kv[0][[7, 4]])
        sender.clear()
        receiver.clear()

    try:
        for room, rank in ((3, 0), (4, 1), (5, 2), (2**62 + 2, (2**62 + 2) % 3), (7, 1)):
            hand_over(room, rank)
        for manager in prefill:
            manager.close()
        wait_until(lambda: not decode._end._groups)  # it has noticed
        prefill = start(2, "second")
        # Its sizes are asked anew, because the connections to its predecessor are lost.
        for room, rank in ((9, 1), (10, 0)):
            hand_over(room, rank)
    finally:
        decode.close()
        for manager in prefill:
            manager.close()
        server.close()


@pytest.mark.timeout(240)
def test_rooms_wait_for_a_prefill_server_that_is_not_there_yet() -> None:
    source, target = Memory(fill=1), Memory()
    server = BootstrapServer("127.0.0.1", 0)
    decode = TcpKVManager(target.args(), "decode", OPTIONS)
    receiver, ended = (decode.create_receiver(room, server.address) for room in (6, 8))
    receiver.init(-1)
    ended.init(-1)
    ended.abort("the client is gone")
    ended.clear()
    prefill = TcpKVManager(source.args(), "prefill", OPTIONS, server.address)
    try:
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.clear()
        assert decode.num_rooms() == 0
    finally:
        decode.close()
        prefill.close()
        server.close()
