"""Numpy memory with KVArgs for it, and short ways through one transfer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from disagg.base import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, StateComponent, TransferOptions
from disagg.bootstrap import BootstrapServer
from disagg.control import ControlLink
from disagg.decode_end import DecodeEnd
from disagg.prefill_end import PrefillEnd
from disagg.registry import KV_MANAGERS
from disagg.wake import Alarm

ROOT = Path(__file__).parents[2]
# Nobody is taken for dead or late, however loaded the machine.
OPTIONS = TransferOptions(heartbeat_interval=0.25, heartbeat_failures=400, bootstrap_timeout=100, waiting_timeout=100)
SILENCE = 1.0
LOST = f"silent for {SILENCE:g} s"
BOUND = SILENCE + 30  # a loss is known by then on a loaded machine, and by nothing that OPTIONS bound
ROWS = 8


class Memory:
    """Regions of [items, item bytes] for KV, two state kinds and two metadata arrays."""

    def __init__(self, pages: int = 64, regions: int = 4, page_bytes: int = 512, fill: int | None = None) -> None:
        rng = np.random.default_rng(fill)

        def make(items: int, width: int) -> np.ndarray:
            if fill is None:
                return np.zeros((items, width), dtype=np.uint8)
            return rng.integers(0, 256, (items, width), dtype=np.uint8)

        self.kv = [make(pages, page_bytes + 64 * (i % 2)) for i in range(regions)]
        self.window = [make(32, 96), make(32, 160)]
        self.row_state = [make(ROWS, 40)]
        self.aux = [make(ROWS, 64), make(ROWS, 128)]

    def args(self, **changes: object) -> KVArgs:
        def described(arrays: list[np.ndarray]) -> tuple[list[int], list[int], list[int]]:
            return [a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [a.shape[1] for a in arrays]

        kv, aux = described(self.kv), described(self.aux)
        args = KVArgs(
            model="tiny",
            page_size=16,
            kv_dtype="bfloat16",
            kv_layout="layer-page",
            kv_head_num=2,
            total_kv_head_num=2,
            kv_data_ptrs=kv[0],
            kv_data_lens=kv[1],
            kv_item_lens=kv[2],
            kv_layer_ids=list(range(len(self.kv))),
            aux_data_ptrs=aux[0],
            aux_data_lens=aux[1],
            aux_item_lens=aux[2],
            state=[
                StateComponent("swa", *described(self.window)),
                StateComponent("request_row", *described(self.row_state)),
            ],
        )
        return replace(args, **changes)  # type: ignore[arg-type]


def wait_for(end: KVSender | KVReceiver, wanted: KVPoll, timeout: float = 60.0) -> None:
    """Poll until `wanted`; a room that fails instead raises its reason."""
    limit = time.monotonic() + timeout
    while (status := end.poll()) is not wanted:
        if status is KVPoll.Failed:
            raise end.failure()
        assert time.monotonic() < limit, f"still {status.name} after {timeout} s, wanted {wanted.name}"
        time.sleep(0.001)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"condition not met in {timeout} s"
        time.sleep(0.001)


def wait_for_end(end: KVSender | KVReceiver) -> None:
    """Until the transfer has ended, either way."""
    wait_until(lambda: end.poll() in (KVPoll.Failed, KVPoll.Success))


@contextmanager
def impatient(manager: KVManager) -> Iterator[None]:
    """Inside the block its peers of now are lost when they say nothing for SILENCE seconds.

    To be entered when a peer has been stopped: the others of a test, and its own beginning, keep all the time there is.
    """
    end = manager._end  # type: ignore[attr-defined]
    links = [*end._ranks] if isinstance(end, PrefillEnd) else _links(end)
    limits = [link._silence_limit for link in links]
    for link in links:
        link._silence_limit = SILENCE
    yield
    for link, limit in zip(links, limits, strict=True):
        link._silence_limit = limit


def _links(end: DecodeEnd) -> list[ControlLink]:
    return [rank.link for group in [*end._groups.values()] for rank in group.ranks if rank.link is not None]


class HandAlarms:
    """Time limits of a manager that are reached when the test says so. Replaces those it has, before its first room."""

    def __init__(self, manager: KVManager) -> None:
        self._alarms: list[tuple[float, Alarm]] = []
        self._lock = threading.Lock()
        end = manager._end  # type: ignore[attr-defined]
        end._alarms.close()
        end._alarms = self

    def after(self, seconds: float, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        with self._lock:
            self._alarms.append((seconds, alarm))
        return alarm

    def number(self, seconds: float) -> int:
        """Of the limits of so many seconds that still stand."""
        with self._lock:
            return sum(limit == seconds and alarm.call is not None for limit, alarm in self._alarms)

    def ring(self, seconds: float) -> None:
        """So many seconds have passed for all limits of that length."""
        with self._lock:
            due = [alarm for limit, alarm in self._alarms if limit == seconds]
            self._alarms = [entry for entry in self._alarms if entry[0] != seconds]
        for alarm in due:
            call = alarm.call
            if call is not None:
                call()

    def close(self) -> None:
        """Nothing runs that would have to be ended."""


class Pair:
    """A prefill and a decode manager of one backend in this process, with their memory."""

    def __init__(self, backend: str, options: TransferOptions = OPTIONS, **sizes: int) -> None:
        self.source = Memory(fill=1, **sizes)
        self.target = Memory(**sizes)
        self.server = BootstrapServer("127.0.0.1", 0)
        cls = KV_MANAGERS[backend]
        self.prefill: KVManager = cls(self.source.args(), "prefill", options, self.server.address)
        self.decode: KVManager = cls(self.target.args(), "decode", options)

    def ends(self, room: int) -> tuple[KVSender, KVReceiver]:
        sender = self.prefill.create_sender(room)
        receiver = self.decode.create_receiver(room, self.server.address)
        receiver.init()
        return sender, receiver

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.server.close()


@contextmanager
def pair_of(backend: str, options: TransferOptions = OPTIONS, **sizes: int) -> Iterator[Pair]:
    pair = Pair(backend, options, **sizes)
    try:
        yield pair
    finally:
        pair.close()


def abort_and_give_pages_away(pair: Pair, turns: int) -> int:
    """Abort transfers under way, and give their pages to others as soon as `release_safe()` says so.

    The next transfer takes some of the pages and the rest are marked: no byte of the aborted one may show in either.
    The pair has 256 pages. Returns how often the pages were not safe at once.
    """
    first, second = np.arange(128), np.arange(128, 256)
    target = np.arange(0, 256, 2)
    used, marked = target[:16], target[16:]
    unsafe = 0
    for turn in range(turns):
        sender, receiver = pair.ends(2 * turn + 1)
        wait_for(receiver, KVPoll.WaitingForInput)
        receiver.send_metadata(target, 0)
        wait_for(sender, KVPoll.WaitingForInput)
        sender.init(128, 0)
        sender.send(first[:64])
        sender.send(first[64:], last=turn % 2 == 0)
        if turn % 3:
            wait_until(lambda: receiver.poll() is not KVPoll.WaitingForInput)  # noqa: B023
        receiver.abort("client gone")
        unsafe += not receiver.release_safe()
        wait_until(receiver.release_safe)
        receiver.clear()
        for region in pair.target.kv:
            region[target] = turn
        next_sender, next_receiver = pair.ends(2 * turn + 2)
        wait_for(next_receiver, KVPoll.WaitingForInput)
        next_receiver.send_metadata(used, 1)
        wait_for(next_sender, KVPoll.WaitingForInput)
        next_sender.init(16, 1)
        next_sender.send(second[:16], last=True)
        wait_for(next_receiver, KVPoll.Success)
        wait_for_end(sender)
        for have, want in zip(pair.target.kv, pair.source.kv, strict=True):
            np.testing.assert_array_equal(have[used], want[second[:16]])
            assert (have[marked] == turn).all()
        for end in (sender, next_sender, next_receiver):
            end.clear()
    assert pair.prefill.num_rooms() == pair.decode.num_rooms() == 0
    return unsafe


@contextmanager
def python_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The interpreter with these arguments, its standard input and output as pipes, killed at the end."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: object) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def hear(process: subprocess.Popen[str]) -> str:
    """The next line without its end; empty once the process has closed its output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ticks() -> dict[str, int]:
    """Processor time of each thread of this process, in 10 ms."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
        found[task] = int(fields[11]) + int(fields[12])
    return found


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)
