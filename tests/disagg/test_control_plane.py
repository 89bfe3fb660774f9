"""What is common to all backends: when pages are free again, late messages, refusals. The mover is told what to do."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from disagg.base import KVArgs, KVPoll, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.bootstrap_client import BootstrapClient, Registration
from disagg.control import (
    Abort,
    Claim,
    ControlLink,
    Done,
    Failure,
    Hello,
    Message,
    Started,
    Stopped,
    TransferInfo,
    Welcome,
    close_socket,
)
from disagg.decode_end import _END_CHECK_INTERVAL
from disagg.description import KVDescription
from disagg.manager import TransferManager
from disagg.mover import Job, OneSidedDecode, PeerMemory, job_pieces
from disagg.receiver import Receiver
from disagg.sender import Sender
from disagg.tcp import TcpKVManager
from tests.disagg.support import LOST, OPTIONS, HandAlarms, Memory, impatient, ints, wait_for, wait_until

pytestmark = pytest.mark.timeout(240)


class HeldSession:
    """Keeps jobs until the test finishes them. closable: cleared, close() waits as if writes were under way."""

    def __init__(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> None:
        self.peer = peer
        self.on_lost = on_lost
        self.jobs: list[Job] = []
        self.closable = threading.Event()
        self.closable.set()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def close(self) -> None:
        assert self.closable.wait(60)
        while self.jobs:
            self.jobs.pop().finish("closed")


class HeldMover:
    def __init__(self) -> None:
        self.sessions: list[HeldSession] = []

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> HeldSession:
        self.sessions.append(HeldSession(peer, on_lost))
        return self.sessions[-1]

    def close(self) -> None:
        pass


class HeldManager(TransferManager):
    """A one-sided backend that moves nothing by itself. `active`: what the decode mover was told, in order."""

    def __init__(
        self,
        kv_args: KVArgs,
        role: str,
        options: TransferOptions,
        bootstrap_addr: str | None = None,
        fence: Callable[[int], None] | None = None,
    ) -> None:
        self.mover = HeldMover()
        self.active: list[int] = []
        super().__init__(
            kv_args,
            role,  # type: ignore[arg-type]
            options,
            bootstrap_addr,
            None,
            "held",
            prefill_mover=lambda *_: self.mover,
            decode_mover=lambda *_: OneSidedDecode(lambda peer: b"here", lambda: None, self.active.append, fence),
        )

    @property
    def jobs(self) -> list[Job]:
        return self.mover.sessions[-1].jobs


class HeldPair:
    def __init__(self, options: TransferOptions = OPTIONS) -> None:
        self.source, self.target = Memory(fill=1), Memory()
        self.server = BootstrapServer("127.0.0.1", 0)
        self.prefill = HeldManager(self.source.args(), "prefill", options, self.server.address)
        self.decode = HeldManager(self.target.args(), "decode", options)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.server.close()


@pytest.fixture
def held() -> Iterator[HeldPair]:
    pair = HeldPair()
    yield pair
    pair.close()


def begin(pair: HeldPair, room: int, send: bool = True) -> tuple[Sender, Receiver]:
    """A room whose pages are on their way: one job that the test holds."""
    sender = pair.prefill.create_sender(room)
    receiver = pair.decode.create_receiver(room, pair.server.address)
    receiver.init()
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(3, 4, 9), 1, [ints(2), ints()])
    wait_for(sender, KVPoll.WaitingForInput)
    if send:
        sender.init(3, 0)
        sender.send(ints(7, 8, 2), [ints(5), ints()], last=True)
        wait_for(receiver, KVPoll.Transferring)
        assert len(pair.prefill.jobs) == 2
    return sender, receiver


def finish_jobs(pair: HeldPair, error: str | None = None) -> None:
    while pair.prefill.jobs:
        pair.prefill.jobs.pop().finish(error)


def test_one_sided_jobs_name_addresses_on_both_sides(held: HeldPair) -> None:
    sender, receiver = begin(held, 1)
    job = held.prefill.jobs[0]
    peer = held.prefill.mover.sessions[0].peer
    assert peer.endpoint == b"here" and peer.host == OPTIONS.host
    pieces = job_pieces(held.prefill.kv_args, peer, job)
    item = held.source.kv[0].shape[1]
    source, target = held.source.kv[0].ctypes.data, held.target.kv[0].ctypes.data
    assert pieces.sources_M[:2].tolist() == [source + 7 * item, source + 2 * item]
    assert pieces.targets_M[:2].tolist() == [target + 3 * item, target + 9 * item]
    assert pieces.lengths_M[:2].tolist() == [2 * item, item]
    state = job_pieces(held.prefill.kv_args, peer, held.prefill.jobs[1])
    width = held.source.window[0].shape[1]
    assert state.sources_M[0] == held.source.window[0].ctypes.data + 5 * width
    assert state.targets_M[0] == held.target.window[0].ctypes.data + 2 * width
    finish_jobs(held)
    for end in (receiver, sender):
        wait_for(end, KVPoll.Success)
        end.clear()


def test_row_comes_after_the_last_job_and_the_mover_is_told_when_nothing_is_left(held: HeldPair) -> None:
    """Statement 8 of the hand-over rules for one-sided backends."""
    sender, receiver = begin(held, 1)
    held.prefill.jobs.pop().finish()
    assert not select.select([], [], [], 0.05)[0]
    assert receiver.poll() is KVPoll.Transferring and not held.target.aux[0][1].any()
    finish_jobs(held)
    wait_for(receiver, KVPoll.Success)
    np.testing.assert_array_equal(held.target.aux[0][1], held.source.aux[0][0])
    # One prefill rank being greeted, none, one transfer, none.
    assert held.decode.active == [1, 0, 1, 0]
    wait_for(sender, KVPoll.Success)


@pytest.mark.parametrize("who", ["decode", "prefill"])
@pytest.mark.parametrize("clear", [False, True])
def test_pages_are_held_until_no_write_is_in_flight(held: HeldPair, who: str, clear: bool) -> None:
    """Statement 14: an abort on either side frees decode pages only when the prefill side has gone quiet."""
    sender, receiver = begin(held, 1)
    assert not receiver.release_safe()
    (receiver if who == "decode" else sender).abort("client gone")
    wait_for(receiver, KVPoll.Failed)
    wait_until(lambda: held.prefill.jobs[0].cancelled)
    if clear:
        receiver.clear()
        sender.clear()
        # The number is free for another request while the pages are not.
        begin(held, 1, send=False)[1].abort()
    assert not receiver.release_safe()
    held.prefill.jobs.pop().finish()
    assert not select.select([], [], [], 0.05)[0] and not receiver.release_safe()
    os.eventfd_read(held.decode.wake_fd)
    held.prefill.jobs.pop().finish("cancelled")
    assert select.select([held.decode.wake_fd], [], [], 60)[0]
    wait_until(receiver.release_safe)
    wait_until(lambda: held.decode.active[-1] == 0)


def test_pages_nobody_was_told_of_are_free_at_once(held: HeldPair) -> None:
    receiver = held.decode.create_receiver(1, held.server.address)
    receiver.init()
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.abort()
    assert receiver.release_safe()
    # Told, but nothing was sent: free as soon as the prefill side has answered.
    _, receiver = begin(held, 2, send=False)
    receiver.abort()
    wait_until(receiver.release_safe)


def test_job_that_fails_fails_its_room_alone_with_its_reason(held: HeldPair) -> None:
    sender, receiver = begin(held, 1)
    jobs = held.prefill.jobs[:]
    held.prefill.jobs.clear()
    sender2, receiver2 = begin(held, 2)
    jobs[0].finish("link down")
    for end in (sender, receiver):
        wait_for(end, KVPoll.Failed)
        assert "link down" in str(end.failure())
    assert not receiver.release_safe()
    jobs[1].finish()
    wait_until(receiver.release_safe)
    finish_jobs(held)
    wait_for(receiver2, KVPoll.Success)
    wait_for(sender2, KVPoll.Success)


def test_a_lost_connection_is_told_before_its_writes_have_ended() -> None:
    """Its rooms fail and the next ones take a new connection at once; only the pages wait."""
    pair = HeldPair(replace(OPTIONS, release_grace=0.2))
    try:
        sender, receiver = begin(pair, 1)
        session = pair.prefill.mover.sessions[-1]
        session.closable.clear()
        session.on_lost("a write has failed")
        for end in (receiver, sender):
            wait_for(end, KVPoll.Failed)
            assert "a write has failed" in str(end.failure())
        sender, next_receiver = begin(pair, 2)
        finish_jobs(pair)
        wait_for(next_receiver, KVPoll.Success)
        wait_for(sender, KVPoll.Success)
        assert not receiver.release_safe()
        session.closable.set()
        wait_until(receiver.release_safe)
    finally:
        for session in pair.prefill.mover.sessions:
            session.closable.set()
        pair.close()


def test_pages_are_free_a_moment_after_the_prefill_process_has_ended() -> None:
    pair = HeldPair(replace(OPTIONS, release_grace=0.3, release_timeout=60))
    try:
        _, receiver = begin(pair, 1)
        pair.prefill.close()
        wait_for(receiver, KVPoll.Failed)
        assert "prefill server 127.0.0.1" in str(receiver.failure())
        wait_until(receiver.release_safe)
        assert pair.decode.num_rooms() == 0
    finally:
        pair.close()


class ScriptedPrefill:
    """A prefill rank that says only what the test says; its silence is that of a stopped process."""

    def __init__(self, memory: Memory) -> None:
        self.server = BootstrapServer("127.0.0.1", 0)
        self.heard: list[Message] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        description = KVDescription.of(memory.args())
        host, port = self._listener.getsockname()
        registration = Registration("now", 0, 1, 0, 1, host, port, description)
        BootstrapClient(self.server.address, timeout=60).register(registration, patience=60)
        self._links: list[ControlLink] = []

    def accept(self) -> ControlLink:
        sock, _ = self._listener.accept()
        link = ControlLink(sock, "decode", self._on_message, lambda *_: None, 1e6, 1)
        self._links.append(link)
        link.start()
        return link

    def _on_message(self, link: ControlLink, message: Message) -> None:
        self.heard.append(message)
        if isinstance(message, Hello):
            link.send(Welcome())

    def hear(self, kind: type) -> Message:
        wait_until(lambda: any(isinstance(message, kind) for message in self.heard))
        return [message for message in self.heard if isinstance(message, kind)][-1]

    def close(self) -> None:
        for link in self._links:
            link.close("test over")
            link.join(5)
        close_socket(self._listener)
        self.server.close()


@contextmanager
def scripted(
    options: TransferOptions = OPTIONS, fence: Callable[[int], None] | None = None
) -> Iterator[tuple[ScriptedPrefill, HeldManager, Memory]]:
    memory = Memory()
    prefill = ScriptedPrefill(memory)
    decode = HeldManager(memory.args(), "decode", options, fence=fence)
    try:
        yield prefill, decode, memory
    finally:
        decode.close()
        prefill.close()


def published(prefill: ScriptedPrefill, decode: HeldManager, room: int) -> tuple[Receiver, ControlLink, int]:
    """A room of which the prefill rank has been told the pages; with its link and the number of its transfer."""
    receiver = decode.create_receiver(room, prefill.server.address)
    receiver.init()
    link = prefill.accept()
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(3), 2)
    info = prefill.hear(TransferInfo)
    assert isinstance(info, TransferInfo)
    return receiver, link, info.transfer_id


@pytest.mark.parametrize("can_fence", [True, False])
def test_pages_of_a_silent_prefill_rank_are_held_unless_it_can_be_fenced_off(can_fence: bool) -> None:
    fenced: list[int] = []
    options = replace(OPTIONS, release_grace=20)
    with scripted(options, fenced.append if can_fence else None) as (prefill, decode, _):
        alarms = HandAlarms(decode)
        receiver, _, _ = published(prefill, decode, 1)
        with impatient(decode):
            wait_for(receiver, KVPoll.Failed)
        assert LOST in str(receiver.failure())
        if can_fence:
            wait_until(receiver.release_safe)
            assert fenced == [0]
            return

        def has_seen_its_end() -> bool:
            alarms.ring(_END_CHECK_INTERVAL)
            return alarms.number(options.release_grace) == 1

        wait_until(has_seen_its_end)
        assert not receiver.release_safe()
        alarms.ring(options.release_grace)
        assert receiver.release_safe()


def test_late_and_repeated_messages_change_nothing() -> None:
    """Statements 2 and 3, and a completion that arrives after the pages were given away."""
    with scripted(replace(OPTIONS, heartbeat_interval=60)) as (prefill, decode, memory):
        receiver, link, first = published(prefill, decode, 1)
        receiver.abort("client gone")
        assert isinstance(prefill.hear(Abort), Abort)
        receiver.clear()
        again = decode.create_receiver(1, prefill.server.address)
        again.init()
        wait_for(again, KVPoll.WaitingForInput)
        again.send_metadata(ints(3), 2)
        wait_until(lambda: sum(isinstance(message, TransferInfo) for message in prefill.heard) == 2)
        second = prefill.hear(TransferInfo).transfer_id  # type: ignore[union-attr]
        assert second != first
        row = b"\x05" * sum(array.shape[1] for array in memory.aux)
        for message in (
            Started(first),
            Done(first, row, b"old"),
            Failure(first, "old"),
            Stopped(first),
            Stopped(first),
        ):
            link.send(message)
        wait_until(receiver.release_safe)
        assert again.poll() is KVPoll.WaitingForInput and not memory.aux[0].any()
        link.send(Done(second, row, b"new"))
        wait_for(again, KVPoll.Success)
        for message in (Started(second), Failure(second, "too late"), Stopped(second)):
            link.send(message)
        memory.aux[0][:] = 0
        link.send(Done(second, row, b"twice"))
        third = decode.create_receiver(2, prefill.server.address)
        third.init()
        wait_until(lambda: prefill.hear(Claim).room == 2)  # type: ignore[union-attr]
        link.send(Failure(prefill.hear(Claim).transfer_id, "all before this was heard"))  # type: ignore[union-attr]
        wait_for(third, KVPoll.Failed)
        assert again.poll() is KVPoll.Success and again.note() == b"new"
        assert not memory.aux[0].any()


def test_first_failure_reason_is_kept_and_success_after_it_is_a_failure() -> None:
    """Statement 3."""
    with scripted(replace(OPTIONS, heartbeat_interval=60)) as (prefill, decode, memory):
        receiver, link, transfer = published(prefill, decode, 1)
        row = bytes(sum(array.shape[1] for array in memory.aux))
        for message in (Failure(transfer, "first"), Failure(transfer, "second"), Done(transfer, row, b"")):
            link.send(message)
        wait_for(receiver, KVPoll.Failed)
        link.send(Stopped(transfer))
        wait_until(receiver.release_safe)
        assert receiver.poll() is KVPoll.Failed
        assert "first" in str(receiver.failure())


def test_a_restarted_prefill_rank_is_told_from_its_predecessor() -> None:
    memory = Memory()
    server = BootstrapServer("127.0.0.1", 0)
    prefill = TcpKVManager(memory.args(), "prefill", OPTIONS, server.address, "second start")
    decode = TcpKVManager(Memory().args(), "decode", OPTIONS)
    try:
        client = BootstrapClient(server.address, timeout=60)
        current = client.route(0, 0).registration
        client.register(msgspec.structs.replace(current, incarnation="first start"), patience=60)
        receiver = decode.create_receiver(1, server.address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        assert "it is second start, looked for was first start" in str(receiver.failure())
        client.register(current, patience=60)
        receiver = decode.create_receiver(1, server.address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
    finally:
        decode.close()
        prefill.close()
        server.close()


def test_another_backend_is_refused_with_both_names() -> None:
    server = BootstrapServer("127.0.0.1", 0)
    prefill = TcpKVManager(Memory().args(), "prefill", OPTIONS, server.address)
    decode = HeldManager(Memory().args(), "decode", OPTIONS)
    try:
        receiver = decode.create_receiver(1, server.address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        assert "backend differs: the prefill rank has tcp, the decode rank has held" in str(receiver.failure())
        assert prefill.num_rooms() == decode.num_rooms() == 0
    finally:
        decode.close()
        prefill.close()
        server.close()


def test_half_registered_prefill_server_is_waited_for_then_used(caplog: pytest.LogCaptureFixture) -> None:
    """Statement 5: 503 until every rank is there; a room fails only at its own bootstrap_timeout."""
    options = replace(OPTIONS, bootstrap_timeout=90)
    server = BootstrapServer("127.0.0.1", 0)
    args = [Memory(fill=1).args(tp_rank=rank, tp_size=2, kv_head_num=1) for rank in range(2)]
    target = Memory()
    decode = TcpKVManager(target.args(kv_item_lens=[1024, 1152, 1024, 1152]), "decode", options)
    alarms = HandAlarms(decode)
    prefill = [TcpKVManager(args[0], "prefill", OPTIONS, server.address, "start")]

    def waits() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "disagg.prefill_lookup"]

    try:
        early = decode.create_receiver(1, server.address)
        early.init()
        wait_until(lambda: bool(waits()))
        alarms.ring(90)
        wait_for(early, KVPoll.Failed)
        assert f"prefill server {server.address} was not ready within bootstrap_timeout (90 s)" in str(early.failure())
        assert len(waits()) == 1 and f"seconds at most: bootstrap server {server.address} answers 503" in waits()[0]
        prefill.append(TcpKVManager(args[1], "prefill", OPTIONS, server.address, "start"))
        late = decode.create_receiver(2, server.address)
        late.init()
        wait_for(late, KVPoll.WaitingForInput)
    finally:
        decode.close()
        for manager in prefill:
            manager.close()
        server.close()


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", "127.0.0.1:1", "127.0.0.1:99999", "nowhere"])
def test_bootstrap_addresses_that_lead_nowhere_fail_their_room_alone(address: str) -> None:
    decode = TcpKVManager(Memory().args(), "decode", replace(OPTIONS, bootstrap_timeout=0.3))
    try:
        receiver = decode.create_receiver(1, address)
        receiver.init()
        wait_for(receiver, KVPoll.Failed)
        assert address in str(receiver.failure())
        assert receiver.release_safe() and decode.num_rooms() == 0
    finally:
        decode.close()


def test_strangers_on_the_control_port_disturb_nobody(held: HeldPair) -> None:
    port = BootstrapClient(held.server.address, timeout=60).route(0, 0).registration.port
    sender, receiver = begin(held, 1)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x05\x00\x00\x00hello"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            stranger.settimeout(60)
            try:
                while stranger.recv(1000):
                    pass
            except ConnectionResetError:
                pass
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        encoded = msgspec.msgpack.encode(Claim(1, 77))
        stranger.sendall(len(encoded).to_bytes(4, "little") + encoded)
        finish_jobs(held)
        wait_for(receiver, KVPoll.Success)
        wait_for(sender, KVPoll.Success)
        # The stranger's claim of the room changed nothing.
        assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)


def test_note_over_the_limit_fails_the_room_with_the_limit(held: HeldPair) -> None:
    sender, receiver = begin(held, 1, send=False)
    sender.init(3, 0)
    sender.send(ints(1, 2, 3), [ints(5), ints()], last=True, note=bytes(64 << 20))
    wait_for(receiver, KVPoll.Failed)
    assert f"the note has {64 << 20} bytes, the limit is" in str(receiver.failure())
