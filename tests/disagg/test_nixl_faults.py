"""The nixl backend when a process is killed, stopped, restarted or leaves, and when transfers are given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.nixl import NixlKVManager
from disagg.sender import Sender
from tests.disagg.nixl_process import PAGE_BYTES, PAGES, ROW
from tests.disagg.support import (
    BOUND,
    OPTIONS,
    ROOT,
    Memory,
    abort_and_give_pages_away,
    impatient,
    pair_of,
    wait_for,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(360, method="thread")  # may hang in a library, deaf to signals
EVERY_PAGE = np.arange(PAGES)


class Process:
    """See nixl_process.py."""

    def __init__(self, role: str, port: int, path: str) -> None:
        command = [sys.executable, "-m", "tests.disagg.nixl_process", role, str(port), path]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.first_line = self.read()

    def read(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def tell(self, line: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()


@contextmanager
def process(role: str, port: int, path: str) -> Iterator[Process]:
    made = Process(role, port, path)
    try:
        yield made
    finally:
        made.popen.kill()
        made.popen.communicate()


@pytest.fixture(params=["same-host", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def decode_end(path: str, **changes: float) -> Iterator[tuple[NixlKVManager, Memory]]:
    memory = Memory(pages=PAGES, page_bytes=PAGE_BYTES)
    options = replace(OPTIONS, same_host_path=path == "same-host", frame_bytes=1 << 20, **changes)  # type: ignore[arg-type]
    manager = NixlKVManager(memory.args(), "decode", options)
    try:
        yield manager, memory
    finally:
        manager.close()


@cache
def source_memory() -> Memory:
    """What every prefill process has in its pages."""
    return Memory(pages=PAGES, page_bytes=PAGE_BYTES, fill=1)


def fetch(manager: NixlKVManager, memory: Memory, prefill: Process, port: int, room: int) -> None:
    """A whole transfer, with its bytes compared."""
    expected = source_memory()
    receiver = manager.create_receiver(room, f"127.0.0.1:{port}")
    receiver.init()
    wait_for(receiver, KVPoll.WaitingForInput)
    order = np.random.default_rng(room).permutation(PAGES)
    receiver.send_metadata(order, 1)
    prefill.tell(room)
    assert prefill.read() == f"sending {room}"
    wait_for(receiver, KVPoll.Success)
    for have, want in zip(memory.kv, expected.kv, strict=True):
        np.testing.assert_array_equal(have[order], want)
        have[:] = 0
    np.testing.assert_array_equal(memory.aux[1][1], expected.aux[1][ROW])
    receiver.clear()
    assert prefill.read() == f"done {room}"


def test_prefill_killed_mid_transfer_then_restarted_on_the_same_address(path: str) -> None:
    with decode_end(path, release_grace=0.3) as (manager, memory):
        with process("prefill", 0, path) as prefill:
            port = int(prefill.first_line)
            fetch(manager, memory, prefill, port, 1)
            receiver = manager.create_receiver(2, f"127.0.0.1:{port}")
            receiver.init()
            wait_for(receiver, KVPoll.WaitingForInput)
            receiver.send_metadata(EVERY_PAGE, 0)
            prefill.tell(2)
            assert prefill.read() == "sending 2"
            prefill.popen.kill()
            started = time.monotonic()
            # The last bytes may have been written just before.
            wait_for_end(receiver)
            if receiver.poll() is KVPoll.Failed:
                assert f"127.0.0.1:{port}" in str(receiver.failure())
            receiver.clear()
            wait_until(receiver.release_safe)
            assert time.monotonic() - started < BOUND
            assert_untouched(memory, lambda: None)
            wait_until(lambda: not manager._end._groups)  # not yet known by now where all had come
        with process("prefill", port, path) as prefill:
            assert int(prefill.first_line) == port
            fetch(manager, memory, prefill, port, 3)
            assert manager.num_rooms() == 0


def assert_untouched(memory: Memory, action: Callable[[], object]) -> None:
    """Give the pages to somebody else, do something, and see that they are as they were left."""
    for region in memory.kv:
        region[:] = 0x5A
    action()
    time.sleep(0.2)  # nothing is to happen, so there is nothing to wait for
    for region in memory.kv:
        assert (region == 0x5A).all()


def test_stopped_prefill_writes_nothing_into_released_pages_when_it_resumes(path: str) -> None:
    with decode_end(path, release_timeout=1.0) as (manager, memory), process("prefill", 0, path) as prefill:
        port = int(prefill.first_line)
        fetch(manager, memory, prefill, port, 1)
        receiver = manager.create_receiver(2, f"127.0.0.1:{port}")
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(EVERY_PAGE, 0)
        prefill.tell(2)
        wait_until(lambda: receiver.poll() is not KVPoll.WaitingForInput)
        os.kill(prefill.popen.pid, signal.SIGSTOP)
        started = time.monotonic()
        with impatient(manager):
            wait_for_end(receiver)
        assert time.monotonic() - started < BOUND
        failed = receiver.poll() is KVPoll.Failed
        receiver.clear()
        if failed and path == "same-host":
            # Nothing can keep the process from writing on when it resumes, so the pages wait for it.
            time.sleep(1.5)  # longer than release_timeout
            assert not receiver.release_safe()
            os.kill(prefill.popen.pid, signal.SIGCONT)
        wait_until(receiver.release_safe)
        # Without shared memory, taking away the agent has ended all writes.
        assert_untouched(memory, lambda: os.kill(prefill.popen.pid, signal.SIGCONT))


@pytest.mark.parametrize("path", ["same-host", pytest.param("tcp", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_gone_mid_transfer_fails_its_room_and_the_next_decode_is_served(path: str, sent: signal.Signals) -> None:
    source = source_memory()
    options = replace(OPTIONS, same_host_path=path == "same-host", frame_bytes=1 << 20)
    server = BootstrapServer("127.0.0.1", 0)
    manager = NixlKVManager(source.args(), "prefill", options, server.address)
    try:
        with process("decode", server.port, path) as decode:
            sender = half_sent(manager, decode)
            decode.popen.send_signal(sent)
            started = time.monotonic()
            sender.send(EVERY_PAGE[200:], last=True)
            with impatient(manager):
                wait_for(sender, KVPoll.Failed)
            assert time.monotonic() - started < BOUND
            sender.clear()
            assert manager.num_rooms() == 0
            with process("decode", server.port, path) as successor:
                sender = half_sent(manager, successor)
                sender.send(EVERY_PAGE[200:], last=True)
                wait_for(sender, KVPoll.Success)
                assert successor.read() == "done 1"
                sender.clear()
    finally:
        manager.close()
        server.close()


def half_sent(manager: NixlKVManager, decode: Process) -> Sender:
    decode.tell(1)
    sender = manager.create_sender(1)
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(PAGES, ROW)
    sender.send(EVERY_PAGE[:200])
    assert decode.read() == "receiving 1"
    return sender


def test_abort_mid_transfer_with_the_pages_used_again_once_they_are_safe(path: str) -> None:
    options = replace(OPTIONS, frame_bytes=1 << 18, same_host_path=path == "same-host")
    with pair_of("nixl", options, pages=256, page_bytes=8192) as pair:
        assert abort_and_give_pages_away(pair, turns=25) > 0


@pytest.mark.parametrize("path", ["same-host", pytest.param("tcp", marks=pytest.mark.sweep)])
def test_processes_that_leave_without_closing_keep_their_exit_status(path: str) -> None:
    with process("prefill", 0, path) as prefill, process("decode", int(prefill.first_line), path) as decode:
        for end in (prefill, decode):
            end.tell(1)
        assert [prefill.read(), prefill.read()] == ["sending 1", "done 1"]
        assert [decode.read(), decode.read()] == ["receiving 1", "done 1"]
        for end, code in ((decode, 3), (prefill, 4)):
            end.tell(f"exit {code}")
            out, err = end.popen.communicate(timeout=60)
            assert end.popen.returncode == code, err
            assert out == ""
