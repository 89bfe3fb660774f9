"""Two processes, and what happens when one of them or the bytes between them go bad."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.registry import KV_MANAGERS
from disagg.tcp import TcpKVManager
from tests.disagg.support import (
    BOUND,
    LOST,
    OPTIONS,
    Memory,
    hear,
    impatient,
    ints,
    pair_of,
    python_process,
    tell,
    ticks,
    wait_for,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(360)
PAGES, PAGE_BYTES = 256, 65536


@contextmanager
def prefill_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with python_process("-m", "tests.disagg.prefill_process", str(port), str(PAGES), str(PAGE_BYTES)) as process:
        yield process, int(hear(process))


def ask(process: subprocess.Popen[str], room: int, num_pages: int, chunk: int) -> None:
    tell(process, f"{room} {num_pages} {chunk}")


@pytest.fixture
def decode() -> Iterator[tuple[TcpKVManager, Memory]]:
    memory = Memory(pages=PAGES, page_bytes=PAGE_BYTES)
    manager = TcpKVManager(memory.args(), "decode", OPTIONS)
    yield manager, memory
    manager.close()


def test_other_process_killed_mid_transfer_then_restarted_on_the_same_address(
    decode: tuple[TcpKVManager, Memory],
) -> None:
    """Statement 15 of the hand-over rules."""
    manager, memory = decode
    expected = Memory(pages=PAGES, page_bytes=PAGE_BYTES, fill=1)
    order = np.random.default_rng(0).permutation(PAGES)

    def fetch(process: subprocess.Popen[str], port: int, room: int) -> None:
        receiver = manager.create_receiver(room, f"127.0.0.1:{port}")
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(order, 3)
        ask(process, room, PAGES, 50)
        wait_for(receiver, KVPoll.Success)
        for have, want in zip(memory.kv, expected.kv, strict=True):
            np.testing.assert_array_equal(have[order], want)
            have[:] = 0
        np.testing.assert_array_equal(memory.aux[1][3], expected.aux[1][room % 8])
        receiver.clear()

    with prefill_process() as (process, port):
        fetch(process, port, 1)
        before = manager.create_receiver(2, f"127.0.0.1:{port}")
        before.init()
        during = manager.create_receiver(3, f"127.0.0.1:{port}")
        during.init()
        wait_for(before, KVPoll.WaitingForInput)
        wait_for(during, KVPoll.WaitingForInput)
        during.send_metadata(order, 0)
        ask(process, 3, PAGES, 1)
        wait_until(lambda: during.poll() is not KVPoll.WaitingForInput)
        process.kill()
        started = time.monotonic()
        wait_for(before, KVPoll.Failed)
        assert time.monotonic() - started < BOUND
        assert f"127.0.0.1:{port}" in str(before.failure())
        # The last bytes may have arrived just before the kill.
        wait_for_end(during)
        during.clear()
        assert manager.num_rooms() == 0
    with prefill_process(port) as (process, again):
        assert again == port
        fetch(process, port, 4)
        fetch(process, port, 2)


def test_stopped_process_is_given_up_within_the_bound_and_works_after_it_resumes(
    decode: tuple[TcpKVManager, Memory],
) -> None:
    manager, _ = decode
    with prefill_process() as (process, port):
        receiver = manager.create_receiver(1, f"127.0.0.1:{port}")
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with impatient(manager):
            wait_for(receiver, KVPoll.Failed)
        assert time.monotonic() - started < BOUND
        assert LOST in str(receiver.failure())
        os.kill(process.pid, signal.SIGCONT)
        receiver = manager.create_receiver(2, f"127.0.0.1:{port}")
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        ask(process, 2, 1, 1)
        wait_for(receiver, KVPoll.Success)


@contextmanager
def decode_process(address: str) -> Iterator[subprocess.Popen[str]]:
    with python_process("-m", "tests.disagg.decode_process", address, str(PAGES), str(PAGE_BYTES)) as process:
        assert hear(process) == "ready"
        yield process


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_killed_or_stopped_mid_transfer_fails_its_room_and_the_next_is_served(
    blow: signal.Signals, same_host: bool
) -> None:
    """Both paths: while the decode side reads this process's memory, and while the sender is stuck in a full socket."""
    source = Memory(pages=PAGES, page_bytes=PAGE_BYTES, fill=1)
    server = BootstrapServer("127.0.0.1", 0)
    prefill = TcpKVManager(
        source.args(), "prefill", replace(OPTIONS, same_host_path=same_host, frame_bytes=1 << 20), server.address
    )
    everything = np.arange(PAGES)
    try:
        with decode_process(server.address) as process:
            tell(process, 1)
            assert hear(process) == "told 1"
            sender = prefill.create_sender(1)
            wait_for(sender, KVPoll.WaitingForInput)
            sender.init(PAGES, 1)
            sender.send(everything[:64])
            os.kill(process.pid, blow)
            sender.send(everything[64:], last=True)
            started = time.monotonic()
            with impatient(prefill):
                wait_for(sender, KVPoll.Failed)
            assert time.monotonic() - started < BOUND
            assert "decode rank" in str(sender.failure())
            assert prefill.num_rooms() == 0
            if blow is signal.SIGSTOP:
                os.kill(process.pid, signal.SIGCONT)
                assert hear(process).startswith(f"lost 1 prefill server {server.address}")
                serve(prefill, process, 2)
        with decode_process(server.address) as process:
            serve(prefill, process, 3)
    finally:
        prefill.close()
        server.close()


def serve(prefill: TcpKVManager, process: subprocess.Popen[str], room: int) -> None:
    tell(process, room)
    assert hear(process) == f"told {room}"
    sender = prefill.create_sender(room)
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(PAGES, 1)
    sender.send(np.arange(PAGES), last=True)
    assert hear(process) == f"have {room}"
    wait_for(sender, KVPoll.Success)
    sender.clear()


def test_a_hundred_rooms_at_once_with_aborts_at_every_stage_leave_nothing_behind() -> None:
    """Both sides may give up at the same moment; rooms that nobody gave up hold their own bytes."""
    rooms, width = 100, 2
    rng = np.random.default_rng(7)
    with pair_of("tcp", pages=rooms * width, page_bytes=8192) as pair:
        ends = {room: pair.ends(room) for room in range(1, rooms + 1)}
        plan = {room: str(rng.choice(["none", "none", "prefill", "decode", "both"])) for room in ends}
        stage = {room: int(rng.integers(0, 4)) for room in ends}
        sent: set[int] = set()
        told: set[int] = set()
        order = rng.permutation(rooms * width)

        def pages(room: int) -> np.ndarray:
            return order[(room - 1) * width : room * width]

        def give_up(room: int, now: int) -> bool:
            if stage[room] == now:
                for end, side in zip(ends[room], ("prefill", "decode"), strict=True):
                    if plan[room] in (side, "both"):
                        end.abort(f"{side} gave up")
            return plan[room] != "none" and stage[room] <= now

        limit = time.monotonic() + 120
        while any(end.poll() not in (KVPoll.Failed, KVPoll.Success) for pair_ in ends.values() for end in pair_):
            assert time.monotonic() < limit
            for room, (sender, receiver) in ends.items():
                if not give_up(room, 0) and receiver.poll() is KVPoll.WaitingForInput and room not in told:
                    told.add(room)
                    receiver.send_metadata(pages(room), room % 8)
                    give_up(room, 1)
                if sender.poll() is KVPoll.WaitingForInput and room not in sent:
                    sent.add(room)
                    sender.init(width, 0)
                    sender.send(pages(room)[:1])
                    if not give_up(room, 2):
                        sender.send(pages(room)[1:], last=True)
                        give_up(room, 3)
        for room, (sender, receiver) in ends.items():
            if plan[room] == "none":
                assert sender.poll() is receiver.poll() is KVPoll.Success
            if receiver.poll() is KVPoll.Success:
                for have, want in zip(pair.target.kv, pair.source.kv, strict=True):
                    np.testing.assert_array_equal(have[pages(room)], want[pages(room)])
            for end in (sender, receiver):
                end.clear()
            assert receiver.release_safe()
        assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0
        sender, receiver = pair.ends(1)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(1, 0)
        sender.send(ints(1), last=True)
        wait_for(receiver, KVPoll.Success)


def test_decode_gone_fails_only_its_own_rooms() -> None:
    with pair_of("tcp") as pair:
        other = KV_MANAGERS["tcp"](Memory().args(), "decode", OPTIONS)
        doomed = other.create_receiver(1, pair.server.address)
        doomed.init()
        wait_for(doomed, KVPoll.WaitingForInput)
        doomed.send_metadata(ints(1), 0)
        doomed_sender = pair.prefill.create_sender(1)
        wait_for(doomed_sender, KVPoll.WaitingForInput)
        sender, receiver = pair.ends(2)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        wait_for(sender, KVPoll.WaitingForInput)
        other.close()
        wait_for(doomed_sender, KVPoll.Failed)
        assert "decode rank" in str(doomed_sender.failure())
        sender.init(1, 0)
        sender.send(ints(1), last=True)
        wait_for(receiver, KVPoll.Success)


class FlippingProxy:
    """Passes bulk connections on; flips one bit of the byte at `position` of the next stream data when armed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.armed = False
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                left, _ = self._listener.accept()
            except OSError:
                return
            right = socket.create_connection(self._target)
            self._sockets += [left, right]
            for ends in ((left, right), (right, left)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, left: socket.socket, right: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(left.recv(65536)):
                if self.armed and len(data) > 1000:
                    data[900] ^= 4
                    self.armed = False
                right.sendall(data)
            right.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def test_corrupted_bytes_fail_their_request_alone() -> None:
    options = replace(OPTIONS, same_host_path=False, checksum=True)
    with pair_of("tcp", options) as pair:
        mover = pair.decode._end.mover  # type: ignore[attr-defined]
        proxy = FlippingProxy(mover.bulk_address)
        mover.bulk_address = proxy.address
        try:
            for room, armed in ((1, False), (2, True), (3, False)):
                sender, receiver = pair.ends(room)
                wait_for(receiver, KVPoll.WaitingForInput)
                receiver.send_metadata(np.arange(16), 0)
                wait_for(sender, KVPoll.WaitingForInput)
                proxy.armed = armed
                sender.init(16, 0)
                sender.send(np.arange(16), last=True)
                if armed:
                    wait_for(receiver, KVPoll.Failed)
                    assert "checksum" in str(receiver.failure())
                    wait_for(sender, KVPoll.Failed)
                    assert "checksum" in str(sender.failure())
                else:
                    wait_for(receiver, KVPoll.Success)
                    wait_for(sender, KVPoll.Success)
                    sender.clear()
                    receiver.clear()
            assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0
        finally:
            proxy.close()


def test_strangers_cannot_write_and_disturb_nobody() -> None:
    with pair_of("tcp") as pair:
        sender, receiver = pair.ends(1)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(ints(1), 0)
        bulk = pair.decode._end.mover.bulk_address  # type: ignore[attr-defined]
        with socket.create_connection(bulk) as stranger:
            stranger.sendall(b"x" * 200)
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(1, 0)
        sender.send(ints(1), last=True)
        wait_for(receiver, KVPoll.Success)


def test_idle_managers_use_no_processor_time() -> None:
    with pair_of("tcp", replace(OPTIONS, heartbeat_interval=2.0)) as pair:
        _, receiver = pair.ends(1)
        wait_for(receiver, KVPoll.WaitingForInput)
        before = ticks()
        names = {task: Path(f"/proc/self/task/{task}/comm").read_text() for task in before}
        threading.Event().wait(1.0)
        spent = {task: count - before[task] for task, count in ticks().items() if task in before}
        # Ticks are 10 ms; a thread that polls in a loop would use about 100 of them.
        assert max(spent.values()) <= 20, {names[task]: count for task, count in spent.items() if count}
