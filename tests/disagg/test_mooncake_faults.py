"""Faults of the mooncake backend, where another process writes into this one's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from disagg.base import KVManager, KVPoll, KVReceiver
from disagg.registry import KV_MANAGERS
from tests.disagg.support import (
    BOUND,
    LOST,
    OPTIONS,
    Memory,
    Pair,
    abort_and_give_pages_away,
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

pytestmark = pytest.mark.timeout(360, method="thread")  # may hang in a library, deaf to signals
PAGES, PAGE_BYTES = 128, 65536
EVERYTHING = np.random.default_rng(0).permutation(PAGES)


@contextmanager
def prefill_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    sizes = (str(PAGES), str(PAGE_BYTES))
    with python_process("-m", "tests.disagg.prefill_process", str(port), *sizes, "mooncake") as process:
        yield process, f"127.0.0.1:{int(hear(process))}"


class Decode:
    def __init__(self) -> None:
        self.memory = Memory(pages=PAGES, page_bytes=PAGE_BYTES)
        self.expected = Memory(pages=PAGES, page_bytes=PAGE_BYTES, fill=1)
        self.manager: KVManager = KV_MANAGERS["mooncake"](self.memory.args(), "decode", OPTIONS)

    def receiver(self, room: int, address: str) -> KVReceiver:
        receiver = self.manager.create_receiver(room, address)
        receiver.init()
        wait_for(receiver, KVPoll.WaitingForInput)
        return receiver

    def begin(self, process: subprocess.Popen[str], room: int, address: str) -> KVReceiver:
        """A transfer of all pages whose first bytes have arrived."""
        for region in self.memory.kv:
            region[:] = 0
        receiver = self.receiver(room, address)
        receiver.send_metadata(EVERYTHING, 3)
        tell(process, f"{room} {PAGES} {PAGES}")
        wait_until(lambda: bool(self.memory.kv[0].any()))
        return receiver

    def fetch(self, process: subprocess.Popen[str], room: int, address: str) -> None:
        """A whole transfer, compared byte for byte."""
        receiver = self.begin(process, room, address)
        wait_for(receiver, KVPoll.Success)
        for have, want in zip(self.memory.kv, self.expected.kv, strict=True):
            np.testing.assert_array_equal(have[EVERYTHING], want)
        np.testing.assert_array_equal(self.memory.aux[1][3], self.expected.aux[1][room % 8])
        receiver.clear()

    def fill(self, value: int) -> None:
        for region in self.memory.kv:
            region[:] = value

    def holds(self, value: int) -> bool:
        return all(bool((region == value).all()) for region in self.memory.kv)


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.manager.close()


def test_prefill_killed_mid_transfer_and_restarted_on_the_same_address(decode: Decode) -> None:
    with prefill_process() as (process, address):
        decode.fetch(process, 1, address)
        before = decode.receiver(2, address)
        during = decode.begin(process, 3, address)
        process.kill()
        started = time.monotonic()
        wait_for(before, KVPoll.Failed)
        # The last bytes may have arrived just before the kill.
        wait_for_end(during)
        assert time.monotonic() - started < BOUND
        assert address in str(before.failure())
        wait_until(lambda: before.release_safe() and during.release_safe())
        decode.fill(7)
        during.clear()
        assert decode.manager.num_rooms() == 0
    with prefill_process(int(address.rpartition(":")[2])) as (process, again):
        assert again == address
        assert decode.holds(7)
        decode.fetch(process, 4, address)
        decode.fetch(process, 2, address)


def test_prefill_stopped_mid_transfer_cannot_write_into_pages_given_away(decode: Decode) -> None:
    with prefill_process() as (process, address):
        for room in range(1, 41):
            receiver = decode.begin(process, room, address)
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            with impatient(decode.manager):
                wait_for_end(receiver)
            if receiver.poll() is KVPoll.Failed:
                break
            # All had been written before the signal came.
            os.kill(process.pid, signal.SIGCONT)
            receiver.clear()
        assert LOST in str(receiver.failure())
        wait_until(receiver.release_safe)
        assert time.monotonic() - started < BOUND
        decode.fill(7)
        os.kill(process.pid, signal.SIGCONT)
        # The process only ends once its sender has failed, which comes after all that it still tried to write.
        assert process.wait(60) != 0
        assert decode.holds(7)


DECODE = """
import sys
import numpy as np
from disagg.base import KVPoll
from disagg.registry import KV_MANAGERS
from tests.disagg.support import OPTIONS, Memory, wait_for
address, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = Memory(pages=pages, page_bytes=page_bytes)
manager = KV_MANAGERS["mooncake"](memory.args(), "decode", OPTIONS)
receiver = manager.create_receiver(1, address)
receiver.init()
wait_for(receiver, KVPoll.WaitingForInput)
receiver.send_metadata(np.arange(pages), 0)
while not memory.kv[0].any():
    pass
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_killed_or_stopped_mid_transfer_fails_only_its_own_rooms(blow: signal.Signals) -> None:
    with pair_of("mooncake", OPTIONS, pages=PAGES, page_bytes=PAGE_BYTES) as pair:
        sizes = (str(PAGES), str(PAGE_BYTES))
        with python_process("-c", DECODE, pair.server.address, *sizes) as process:
            doomed = pair.prefill.create_sender(1)
            wait_for(doomed, KVPoll.WaitingForInput)
            doomed.init(PAGES, 0)
            doomed.send(EVERYTHING)
            assert hear(process) == "begun"
            process.send_signal(blow)
            started = time.monotonic()
            with impatient(pair.prefill):  # the other decode rank comes later
                good(pair, 2)
                wait_for(doomed, KVPoll.Failed)
            assert time.monotonic() - started < BOUND
            assert "decode rank" in str(doomed.failure())
            good(pair, 3)
        assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0


def good(pair: Pair, room: int) -> None:
    sender, receiver = pair.ends(room)
    wait_for(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(ints(5, 6), 0)
    wait_for(sender, KVPoll.WaitingForInput)
    sender.init(2, 0)
    sender.send(ints(9, 1), last=True)
    wait_for(receiver, KVPoll.Success)
    wait_for(sender, KVPoll.Success)
    for have, want in zip(pair.target.kv, pair.source.kv, strict=True):
        np.testing.assert_array_equal(have[[5, 6]], want[[9, 1]])
    sender.clear()
    receiver.clear()


def test_abort_mid_transfer_and_pages_used_again_50_times() -> None:
    with pair_of("mooncake", pages=256, page_bytes=65536) as pair:
        assert abort_and_give_pages_away(pair, turns=50) > 0


def test_idle_engines_use_no_processor_time() -> None:
    with pair_of("mooncake", replace(OPTIONS, heartbeat_interval=2.0)) as pair:
        good(pair, 1)
        _, receiver = pair.ends(2)
        wait_for(receiver, KVPoll.WaitingForInput)
        before = ticks()
        threading.Event().wait(1.0)
        spent = {task: count - before[task] for task, count in ticks().items() if task in before}
        # Ticks are 10 ms; a thread that polls in a loop would use about 100 of them.
        assert max(spent.values()) <= 20, spent
