"""KV manager over the Mooncake transfer engine: the prefill rank writes into registered memory of the decode rank.

Needs the extra `mooncake` (host memory) or `mooncake-cuda`, and the system library libibverbs.so.1.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from disagg.base import KVArgs, Role, TransferOptions
from disagg.manager import TransferManager
from disagg.mooncake_engine import Engine, Write, load_library
from disagg.mover import DecodeEvents, Job, OneSidedDecode, PeerMemory, Pieces, batches, data_regions, job_pieces

_PIECE_BYTES = 1 << 20
_BATCH_PIECES = 256
_BATCHES_UNDER_WAY = 2


class MooncakeKVManager(TransferManager):
    """One rank's end, see TransferManager. ValueError if the library is missing or does not suit `kv_args.device`."""

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
    ) -> None:
        options = options or TransferOptions()
        if ":" in options.host:
            raise ValueError(f"the mooncake backend needs an IPv4 address or a name to listen on, got {options.host!r}")
        library = load_library(kv_args.device, options.ib_device)
        super().__init__(
            kv_args,
            role,
            options,
            bootstrap_addr,
            incarnation,
            backend="mooncake",
            prefill_mover=lambda kv_args, options: _PrefillMover(library, kv_args, options),
            decode_mover=lambda kv_args, options, events: _decode_mover(library, kv_args, options, events),
        )


def _decode_mover(library: Any, kv_args: KVArgs, options: TransferOptions, events: DecodeEvents) -> OneSidedDecode:
    """An engine for each prefill rank, so that one of them can be cut off by destroying its engine."""
    engines: dict[int, Engine] = {}
    lock = threading.Lock()

    def endpoint(peer_id: int) -> bytes:
        engine = Engine(library, options.host, options.ib_device)
        engine.register(*data_regions(kv_args))
        with lock:
            engines[peer_id] = engine
        return engine.name.encode()

    def fence(peer_id: int) -> None:
        with lock:
            engine = engines.pop(peer_id, None)
        if engine is not None:
            engine.close()

    def close() -> None:
        for peer_id in list(engines):
            fence(peer_id)

    return OneSidedDecode(endpoint, close, fence=fence)


class _PrefillMover:
    def __init__(self, library: Any, kv_args: KVArgs, options: TransferOptions) -> None:
        self._library = library
        self._args = kv_args
        self._options = options

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> _Session:
        engine = Engine(self._library, self._options.host, self._options.ib_device)
        if self._options.ib_device:
            # Over TCP the library sends from any memory, and what is not registered no stranger can write to.
            engine.register(*data_regions(self._args))
        try:
            engine.probe(peer.endpoint.decode())
        except OSError:
            engine.close()
            raise
        return _Session(engine, self._args, peer, self._options.frame_bytes, on_lost)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Posting:
    """A job in work: the batches that are left, and how many are under way."""

    job: Job
    batches: Iterator[Pieces]
    under_way: int = 0
    exhausted: bool = False
    cut_short: bool = False


class _Session:
    """Writes jobs one after the other, from a thread of its own, with a few batches under way at any time."""

    def __init__(
        self, engine: Engine, kv_args: KVArgs, peer: PeerMemory, batch_bytes: int, on_lost: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._args = kv_args
        self._peer = peer
        self._endpoint = peer.endpoint.decode()
        self._batch_bytes = batch_bytes
        self._on_lost = on_lost
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unfinished: dict[_Posting, None] = {}
        self._current: _Posting | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name=f"kv-write {peer.name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._lock:
            ended = self._ended
            if not ended:
                self._jobs.put(job)
        if ended:
            job.finish(ended)

    def close(self) -> None:
        self._stop.set()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason = f"the connection to {self._peer.name} was closed"
        try:
            self._write_jobs()
        except Exception as error:
            # Whatever it is, no room may wait for this thread for ever.
            reason = f"writing to {self._peer.name} failed: {error}"
            self._on_lost(reason)
        # What was posted may be under way as long as the engine lives, and what has left it until the decode rank sees
        # the end of the connection: no job may be called over before.
        self._engine.close()
        self._stop.wait()
        with self._lock:
            self._ended = reason
        for posting in self._unfinished:
            posting.job.finish(reason)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.finish(reason)

    def _write_jobs(self) -> None:
        """Until close(); raises OSError when a write has failed."""
        writes: deque[tuple[_Posting, Write]] = deque()
        while True:
            while len(writes) < _BATCHES_UNDER_WAY and (found := self._next_batch(wait=not writes)) is not None:
                posting, batch = found
                writes.append((posting, self._engine.post(self._endpoint, batch)))
            if self._stop.is_set():
                return
            posting, write = writes.popleft()
            if not write.wait(self._stop):
                return
            posting.under_way -= 1
            self._finish_if_over(posting)

    def _next_batch(self, wait: bool) -> tuple[_Posting, Pieces] | None:
        """The next batch to post; None if there is none now and `wait` is false, or the session is closed."""
        while True:
            if self._current is None:
                if not wait and self._jobs.empty():
                    return None
                job = self._jobs.get()
                if job is None:
                    return None
                self._current = _Posting(job, self._batches(job))
                self._unfinished[self._current] = None
            posting = self._current
            posting.cut_short = posting.job.cancelled
            batch = None if posting.cut_short else next(posting.batches, None)
            if batch is not None:
                posting.under_way += 1
                return posting, batch
            posting.exhausted = True
            self._current = None
            self._finish_if_over(posting)

    def _batches(self, job: Job) -> Iterator[Pieces]:
        """Bounded in pieces, because the library's queue is, and in bytes, so that a cancelled job ends soon."""
        yield from batches(job_pieces(self._args, self._peer, job), _PIECE_BYTES, self._batch_bytes, _BATCH_PIECES)

    def _finish_if_over(self, posting: _Posting) -> None:
        if posting.exhausted and not posting.under_way:
            del self._unfinished[posting]
            posting.job.finish("cancelled" if posting.cut_short else None)
