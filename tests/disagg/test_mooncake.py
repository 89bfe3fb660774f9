"""What is particular to the mooncake backend: its library, its sessions, and how a peer is cut off."""

from __future__ import annotations

import importlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from disagg.base import TransferOptions
from disagg.mooncake import MooncakeKVManager, _PrefillMover
from disagg.mooncake_engine import Engine, _sockets_at, load_library
from disagg.mover import KV_PAGES, Job, PeerMemory
from disagg.pages import Slices
from tests.disagg.support import ROOT, Memory, ints, wait_until

pytestmark = pytest.mark.timeout(360, method="thread")  # may hang in a library, deaf to signals


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'lockstep\[mooncake\]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "packages are libibverbs1"),
    ],
)
def test_missing_library_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, hint: str
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match=hint) as raised:
        MooncakeKVManager(Memory().args(), "decode")
    assert "--disaggregation-transfer-backend mooncake" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_memory_and_devices_that_the_library_cannot_use_are_refused() -> None:
    with pytest.raises(ValueError, match="moves host memory only, kv_args.device is 'cuda:0'"):
        MooncakeKVManager(Memory().args(device="cuda:0"), "decode")
    with pytest.raises(ValueError, match="IPv4 address or a name to listen on, got '::1'"):
        MooncakeKVManager(Memory().args(), "decode", TransferOptions(host="::1"))
    with pytest.raises(OSError, match="no RDMA device 'mlx5_77' .flag --disaggregation-ib-device"):
        Engine(load_library("cpu", "mlx5_77"), "127.0.0.1", "mlx5_77")


def test_the_library_prints_nothing() -> None:
    code = (
        "from disagg.mooncake_engine import Engine, load_library\n"
        "engine = Engine(load_library('cpu', ''), '127.0.0.1', '')\n"
        "engine.close()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MC_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Link:
    """A session into the memory of an engine in this process, with jobs whose ends are recorded.

    may_go_on: while it is cleared, the session stands still at the end of a job.
    """

    def __init__(self, **sizes: int) -> None:
        library = load_library("cpu", "")
        self.source, self.target = Memory(fill=1, **sizes), Memory(**sizes)
        args, target_args = self.source.args(), self.target.args()
        self.engine = Engine(library, "127.0.0.1", "")
        self.engine.register(target_args.kv_data_ptrs, target_args.kv_data_lens)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        peer = PeerMemory(
            name="the decode rank",
            host="127.0.0.1",
            endpoint=self.engine.name.encode(),
            kv_data_ptrs=target_args.kv_data_ptrs,
            kv_item_lens=target_args.kv_item_lens,
            state_data_ptrs=[],
            state_item_lens=[],
        )
        self.session = _PrefillMover(library, args, TransferOptions()).open(peer, self.lost.put)
        self._slices = Slices.whole(args.kv_item_lens)

    def submit(self, number: int, source: np.ndarray, target: np.ndarray) -> None:
        def ended(error: str | None) -> None:
            self.ends.put((number, error))
            assert self.may_go_on.wait(60)

        self.session.submit(
            Job(number, KV_PAGES, source, 0, target, self._slices, lambda: number in self.cancelled, ended)
        )

    def end(self) -> tuple[int, str | None]:
        return self.ends.get(timeout=60)


@contextmanager
def linked(**sizes: int) -> Iterator[Link]:
    link = Link(**sizes)
    try:
        yield link
    finally:
        link.session.close()
        if link.engine._engine is not None:
            link.engine.close()


def test_jobs_end_with_their_bytes_in_place() -> None:
    with linked(pages=64, page_bytes=40_000) as link:
        rng = np.random.default_rng(3)
        source, target = rng.permutation(64), rng.permutation(64)
        for number in range(4):
            part = slice(16 * number, 16 * number + 16)
            link.submit(number, source[part], target[part])
        link.submit(4, ints(), ints())
        # The empty one has nothing to wait for.
        assert sorted(link.end() for _ in range(5)) == [(number, None) for number in range(5)]
        for have, want in zip(link.target.kv, link.source.kv, strict=True):
            np.testing.assert_array_equal(have[target], want[source])


def test_more_pieces_than_the_library_queues() -> None:
    with linked(pages=4000, page_bytes=64, regions=2) as link:
        order = np.arange(4000)[::-1].copy()
        link.submit(1, order, np.arange(4000))
        assert link.end() == (1, None)
        np.testing.assert_array_equal(link.target.kv[1], link.source.kv[1][::-1])


def test_a_cancelled_job_ends_and_the_next_is_written() -> None:
    with linked() as link:
        link.cancelled.add(1)
        link.submit(1, ints(1), ints(1))
        link.submit(2, ints(2), ints(2))
        assert link.end() == (1, "cancelled")
        assert link.end() == (2, None)
        assert not link.target.kv[0][1].any()
        np.testing.assert_array_equal(link.target.kv[0][2], link.source.kv[0][2])


def test_a_failed_write_loses_the_session_and_ends_every_job() -> None:
    with linked() as link:
        link.engine.close()
        link.submit(1, ints(1), ints(1))
        link.submit(2, ints(2), ints(2))
        assert "writing to the decode rank failed: mooncake cannot write" in link.lost.get(timeout=60)
        assert link.ends.empty()
        link.session.close()
        ends = [link.end(), link.end()]
        assert [number for number, _ in ends] == [1, 2]
        assert all("mooncake cannot write" in str(error) for _, error in ends)
        link.submit(3, ints(3), ints(3))
        assert link.end()[0] == 3


def test_close_ends_the_jobs_that_are_left() -> None:
    with linked() as link:
        link.may_go_on.clear()
        for number in range(6):
            link.submit(number, np.arange(8), np.arange(8))
        assert link.end() == (0, None)
        closing = threading.Thread(target=link.session.close)
        closing.start()
        wait_until(link.session._stop.is_set)
        link.may_go_on.set()
        closing.join()
        closed = "the connection to the decode rank was closed"
        assert [link.end() for _ in range(5)] == [(number, closed) for number in range(1, 6)]
        assert link.lost.empty()


WRITER = """
import sys, threading
import numpy as np
from disagg.mooncake_engine import Engine, _sockets_at, load_library
from disagg.mover import Pieces, split
peer, address, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = np.full(num_bytes, 0xAB, dtype=np.uint8)
engine = Engine(load_library("cpu", ""), "127.0.0.1", "")
pieces = Pieces(*(np.array([value], dtype=np.uint64) for value in (memory.ctypes.data, address, num_bytes)))
for _ in range(1000):
    write = engine.post(peer, split(pieces, 1 << 20))
    print("posted", flush=True)
    write.wait(threading.Event())
"""


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
def test_memory_is_untouched_once_the_engine_is_closed(blow: signal.Signals) -> None:
    """Whatever becomes of the writing process: it dies with bytes under way, or stops and goes on later."""
    memory = np.zeros(32 << 20, dtype=np.uint8)
    engine = Engine(load_library("cpu", ""), "127.0.0.1", "")
    engine.register([memory.ctypes.data], [memory.nbytes])
    command = [sys.executable, "-c", WRITER, engine.name, str(memory.ctypes.data), str(memory.nbytes)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(lambda: bool(memory.any()))
            process.stdout.readline()
            process.send_signal(blow)
            engine.close()
            memory[:] = 1
            if blow is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
            # A writer that goes on finds nobody to write to and ends with an error.
            process.wait(60)
        finally:
            process.kill()
    assert (memory == 1).all()


def test_strangers_are_gone_before_an_engine_is_destroyed() -> None:
    """The library waits 5 s for a connection to say something, in its destructor too, with the interpreter lock."""
    engine = Engine(load_library("cpu", ""), "127.0.0.1", "")
    port = engine._port
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        wait_until(lambda: bool(_close_all(_sockets_at(port, accepting=False))))
        seen: list[bool] = []

        class Destroyed:
            def __init__(self, real: object) -> None:
                self.real = real

            def __del__(self) -> None:
                seen.append(bool(select.select([stranger], [], [], 20)[0]))

        engine._engine = Destroyed(engine._engine)
        engine.close()
        assert seen == [True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def _close_all(sockets: list[socket.socket]) -> list[socket.socket]:
    for sock in sockets:
        sock.close()
    return sockets


def test_a_closed_engine_leaves_no_thread_and_no_descriptor() -> None:
    library = load_library("cpu", "")

    def held() -> set[tuple[str, str]]:
        return {(kind, name) for kind in ("task", "fd") for name in os.listdir(f"/proc/self/{kind}")}

    before = held()
    engines = [Engine(library, "127.0.0.1", "") for _ in range(3)]
    assert {kind for kind, _ in held() - before} == {"task", "fd"}
    for engine in engines:
        engine.close()
    wait_until(lambda: held() <= before)
