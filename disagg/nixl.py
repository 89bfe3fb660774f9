"""The KV manager on NIXL: prefill ranks write through UCX into the memory of decode ranks.

NIXL's own progress thread spins on a core, and there is no descriptor to wait on. So each side has a thread of ours
that calls NIXL while writes are under way and sleeps otherwise. Writes through shared memory are done when posted; over
TCP, and while a connection is set up, the decode side has to make calls for the writes to go on.

Without NIXL's locks an agent takes one call at a time: a prefill rank's agent belongs to its thread, an agent of a
decode rank has a lock of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from disagg.base import KVArgs, Role, TransferOptions
from disagg.manager import TransferManager
from disagg.mover import DecodeEvents, Job, OneSidedDecode, PeerMemory, Pieces, batches, job_pieces
from disagg.nixl_agent import SCRATCH_BYTES, Agent, Endpoint, descriptors, error_text, load_library, use_device
from disagg.pages import Addresses

_CONNECT_TIMEOUT = 5.0  # at least
_ATTEMPT_TIMEOUT = 15.0
_CLOSE_TIMEOUT = 5.0
_WRITES_IN_FLIGHT = 2
_PIECES_PER_WRITE = 4096
_SHORTEST_WAIT, _LONGEST_WAIT = 0.0002, 0.002
# Copies between CUDA devices take no processor and 64 MB of them less than a millisecond.
_DEVICE_WRITE_BYTES, _DEVICE_WAIT = 64 << 20, 0.00002


class NixlKVManager(TransferManager):
    """One rank's end, for host memory or that of one CUDA device (kv_args.device "cuda:N").

    Raises ValueError if the package is missing or refuses the memory.
    """

    def __init__(
        self,
        kv_args: KVArgs,
        role: Role,
        options: TransferOptions | None = None,
        bootstrap_addr: str | None = None,
        incarnation: str | None = None,
    ) -> None:
        load_library()
        super().__init__(
            kv_args,
            role,
            options,
            bootstrap_addr,
            incarnation,
            backend="nixl",
            prefill_mover=NixlPrefill,
            decode_mover=NixlDecode,
        )


# Prefill side


@dataclass
class _Work:
    """One job: what is left to post, and how many writes have not ended."""

    job: Job
    batches: Iterator[Pieces]
    exhausted: bool = False
    in_flight: int = 0

    def next_batch(self) -> Pieces | None:
        if self.job.cancelled:
            self.exhausted = True
            return None
        batch = next(self.batches, None)
        self.exhausted = batch is None
        return batch


@dataclass
class _Write:
    handle: Any
    posted: float
    on_end: Callable[[], None]


class NixlPrefill:
    """Prefill mover. Its thread alone calls the agent."""

    def __init__(self, kv_args: KVArgs, options: TransferOptions) -> None:
        self._args = kv_args
        self._options = options
        self._agent = Agent(kv_args, options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sessions: list[NixlSession] = []
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> NixlSession:
        try:
            endpoint = msgspec.msgpack.decode(peer.endpoint, type=Endpoint)
        except msgspec.DecodeError as error:
            raise OSError(f"{peer.name} sent no NIXL endpoint: {error}") from error
        limit = max(_CONNECT_TIMEOUT, self._options.silence_limit)
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0:
            session = NixlSession(self._agent, self._args, self._options, peer, endpoint, on_lost, self._commands.put)
            self._commands.put(partial(self._sessions.append, session))
            self._commands.put(session.connect)
            # About one connection in a thousand stands still while it is set up; a new attempt gets through.
            if session.opened.wait(min(_ATTEMPT_TIMEOUT, left)):
                if session.problem:
                    session.close()
                    raise OSError(session.problem)
                return session
            session.close()
        raise OSError(f"NIXL: no connection within {limit:g} s")

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        use_device(self._args.device)
        wait = shortest_wait = _SHORTEST_WAIT if self._agent.segment == "DRAM" else _DEVICE_WAIT
        while True:
            busy = any(session.busy for session in self._sessions)
            try:
                command = self._commands.get(timeout=wait) if busy else self._commands.get()
                while True:
                    if command is None:
                        self._agent.close()
                        return
                    command()
                    command = self._commands.get_nowait()
            except queue.Empty:
                pass
            moved = [session.advance() for session in self._sessions]
            self._sessions = [session for session in self._sessions if not session.closed]
            wait = 0.0 if any(moved) else shortest_wait


class NixlSession:
    """The way into one decode rank. All but submit() and close() happens in the mover's thread."""

    def __init__(
        self,
        agent: Agent,
        kv_args: KVArgs,
        options: TransferOptions,
        peer: PeerMemory,
        endpoint: Endpoint,
        on_lost: Callable[[str], None],
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._agent = agent
        self._args = kv_args
        self._options = options
        self._write_bytes = options.frame_bytes if agent.segment == "DRAM" else _DEVICE_WRITE_BYTES
        self._peer = peer
        self._on_lost = on_lost
        self._run = run
        self._remote = ""
        self._endpoint = endpoint
        self._works: deque[_Work] = deque()
        self._unfinished: list[_Work] = []
        self._writes: list[_Write] = []
        self.opened = threading.Event()
        self.problem = ""
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self._works or self._writes)

    def submit(self, job: Job) -> None:
        self._run(partial(self._accept, job))

    def close(self) -> None:
        ended = threading.Event()
        self._run(partial(self._end, ended))
        ended.wait(_CLOSE_TIMEOUT)

    def connect(self) -> None:
        """Write to the scratch bytes; that sets up the connection and shows that the decode rank can be reached."""
        address = self._agent.scratch.ctypes.data
        try:
            self._remote = self._agent.nixl.add_remote_agent(self._endpoint.agent)
            self._post(
                descriptors([address], [SCRATCH_BYTES], 0),
                descriptors([self._endpoint.scratch_address], [SCRATCH_BYTES], 0),
                ("DRAM", "DRAM"),
                self.opened.set,
            )
        except Exception as error:  # the library's exceptions have no base class of their own
            self._lose(error_text(error))

    def advance(self) -> bool:
        """One round: writes that have ended, one new write. True if there was any."""
        try:
            return self._settle() | self._post_next()
        except Exception as error:  # the library's exceptions have no base class of their own
            self._lose(error_text(error))
            return True

    def _accept(self, job: Job) -> None:
        if self.closed or self.problem:
            job.finish(self.problem or f"the connection to {self._peer.name} was closed")
            return
        try:
            pieces = job_pieces(self._args, self._peer, job)
        except (ValueError, IndexError) as error:
            job.finish(f"the index lists of the two sides do not fit together: {error}")
            return
        work = _Work(job, batches(pieces, self._write_bytes, self._write_bytes, _PIECES_PER_WRITE))
        self._works.append(work)
        self._unfinished.append(work)

    def _settle(self) -> bool:
        ended = []
        for write in self._writes:
            state = self._agent.nixl.check_xfer_state(write.handle)
            if state == "DONE":
                ended.append(write)
            elif state != "PROC":
                raise ConnectionError(f"state {state}")
            elif time.monotonic() - write.posted > self._options.waiting_timeout:
                raise ConnectionError(f"no progress within waiting_timeout ({self._options.waiting_timeout:g} s)")
        for write in ended:
            self._writes.remove(write)
            write.handle.release()
            write.on_end()
        return bool(ended)

    def _post_next(self) -> bool:
        if not self._works or len(self._writes) >= _WRITES_IN_FLIGHT:
            return False
        work = self._works[0]
        batch = work.next_batch()
        if batch is None:
            self._works.popleft()
            self._finish_if_ended(work)
            return True
        work.in_flight += 1
        self._post(
            descriptors(batch.sources_M, batch.lengths_M, self._agent.device_id),
            descriptors(batch.targets_M, batch.lengths_M, self._endpoint.device_id),
            (self._agent.segment, self._endpoint.segment),
            partial(self._written, work),
        )
        return True

    def _post(
        self, sources_M3: Addresses, targets_M3: Addresses, segments: tuple[str, str], on_end: Callable[[], None]
    ) -> None:
        nixl = self._agent.nixl
        sources = nixl.get_xfer_descs(sources_M3, segments[0])
        targets = nixl.get_xfer_descs(targets_M3, segments[1])
        handle = nixl.initialize_xfer("WRITE", sources, targets, self._remote)
        self._writes.append(_Write(handle, time.monotonic(), on_end))
        if nixl.transfer(handle) == "ERR":
            raise ConnectionError("a write could not be posted")

    def _written(self, work: _Work) -> None:
        work.in_flight -= 1
        self._finish_if_ended(work)

    def _finish_if_ended(self, work: _Work) -> None:
        if work.exhausted and not work.in_flight:
            self._unfinished.remove(work)
            work.job.finish("cancelled" if work.job.cancelled else None)

    def _lose(self, reason: str) -> None:
        """Jobs are finished by close() only, which comes once the control connection has ended.

        What was written last may still lie in a socket of the decode rank, which must not hear meanwhile that nothing
        is under way.
        """
        self.problem = f"NIXL cannot write to {self._peer.name}: {reason}"
        self._cancel()
        if self.opened.is_set():
            self._on_lost(self.problem)
        self.opened.set()

    def _cancel(self) -> None:
        for write in self._writes:
            with suppress(Exception):
                write.handle.release()
        self._writes.clear()
        self._works.clear()

    def _end(self, ended: threading.Event) -> None:
        self._cancel()
        if self._remote:
            with suppress(Exception):
                self._agent.nixl.remove_remote_agent(self._remote)
            self._remote = ""
        self.closed = True
        for work in self._unfinished:
            work.job.finish(self.problem or f"the connection to {self._peer.name} was closed")
        self._unfinished.clear()
        ended.set()


# Decode side


class _PeerAgent:
    """The agent that one prefill rank writes to."""

    def __init__(self, agent: Agent) -> None:
        self._agent: Agent | None = agent
        self._lock = threading.Lock()

    def progress(self) -> None:
        """Let writes go on."""
        with self._lock:
            if self._agent is not None:
                self._agent.nixl.get_new_notifs()

    def close(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.close()
                self._agent = None


class NixlDecode(OneSidedDecode):
    """Decode mover, with an agent for each prefill rank, so that a lost rank's way in can be taken away.

    Its thread makes calls while prefill ranks connect, and from the announcement of a transfer until no write of it is
    left.
    """

    def __init__(self, kv_args: KVArgs, options: TransferOptions, events: DecodeEvents) -> None:
        super().__init__(self._open, self._shut_down, on_active=self._set_active)
        self._args = kv_args
        self._options = options
        self._events = events
        self._changed = threading.Condition()
        self._peers: dict[int, _PeerAgent] = {}
        self._num_active = 0
        self._wait = _SHORTEST_WAIT
        self._closing = False
        # Made early, because making one takes half a second and shows whether the memory can be used.
        self._spare: Agent | None = Agent(kv_args, options)
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def forget(self, peer_id: int) -> bool:
        """Without its agent a prefill rank can still write through what it shares with this process on one host."""
        self.joined(peer_id)
        with self._changed:
            peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.close()
        return not self._options.same_host_path and self._args.device == "cpu"

    def _open(self, peer_id: int) -> bytes:
        with self._changed:
            agent, self._spare = self._spare, None
        if agent is None:
            agent = Agent(self._args, self._options)
        with self._changed:
            self._peers[peer_id] = _PeerAgent(agent)
        return agent.endpoint()

    def _shut_down(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(5)
        with self._changed:  # a connection may be opening
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
        if self._spare is not None:
            self._spare.close()

    def _set_active(self, number: int) -> None:
        with self._changed:
            if number > self._num_active:
                self._wait = _SHORTEST_WAIT
                self._changed.notify()
            self._num_active = number

    def _run(self) -> None:
        use_device(self._args.device)
        while True:
            with self._changed:
                while not self._num_active and not self._closing:
                    self._changed.wait()
                self._changed.wait(self._wait)
                if self._closing:
                    return
                self._wait = min(self._wait * 1.1, _LONGEST_WAIT)
                peers = list(self._peers.items())
            for peer_id, peer in peers:
                try:
                    peer.progress()
                except Exception as error:  # the library's exceptions have no base class of their own
                    self._events.lost(peer_id, f"NIXL: {error_text(error)}")
