"""The API process's end of the sockets to the ranks: sends requests, hands each output to whoever waits for it.

Two kinds of ZeroMQ sockets, bound here and connected to by the ranks: one PULL for everything that ranks say, and one
PUSH a rank. A rank sends one message a step; every request with outputs in it is woken once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from scheduler.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    Inbound,
    LoadReport,
    RankReady,
    RequestOutput,
    StepOutput,
    decode_outbound,
    encode,
)
from server.errors import ApiError
from server.load_balance import LoadBalancer

logger = logging.getLogger(__name__)

_FOLDER_PREFIX = "lockstep-api-"
# A folder is locked a moment after it is made: younger ones are left alone.
_STALE_AFTER = 60.0
# Seconds between two looks at whether a rank that says that it is ready can be reached.
_CONNECT_POLL = 0.005


def _remove_stale_folders() -> None:
    """Socket folders of this user's servers that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if time.time() - folder.stat().st_mtime < _STALE_AFTER:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class SilentRanks(TimeoutError):
    """ranks: the data-parallel ones that have not answered."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer of data-parallel rank {', '.join(map(str, ranks))}")
        self.ranks = ranks


class Generation:
    """The live samples of one HTTP request. Outputs wait in it until `take` or `outputs` takes them.

    listener: called when there is something to take; for who cannot afford to wait in a task.
    """

    def __init__(self, client: EngineClient, ranks: Sequence[int], names: Sequence[str]) -> None:
        """ranks: of each sample. names: what the client calls each; several may have one name."""
        self.ranks = ranks
        self.names = names
        self.samples: list[str] = []
        self._client = client
        self.listener: Callable[[], None] | None = None
        self._pending: list[tuple[int, RequestOutput]] = []
        self._error: ApiError | None = None

    async def outputs(self) -> list[tuple[int, RequestOutput]]:
        """As `take`, but waits until there is something."""
        if not self._pending and self._error is None:
            arrived = asyncio.get_running_loop().create_future()
            self.listener = lambda: None if arrived.done() else arrived.set_result(None)
            try:
                await arrived
            finally:
                self.listener = None
        return self.take()

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Everything that arrived since the last call, as (sample index, output).

        ApiError when the engine is gone or the client of this request is.
        """
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, []
        return pending

    def fail(self, error: ApiError) -> None:
        """`take` and `outputs` raise `error` from now on."""
        self._error = error
        self.wake()

    def abort_sample(self, index: int) -> None:
        """The sample needs no more tokens; none arrive after this."""
        self._client.abort_sample(self.samples[index], self.ranks[index])

    def push(self, index: int, output: RequestOutput) -> bool:
        """Keeps the output for whoever takes it; whether it is the first to wait, so that `wake` is to be called."""
        self._pending.append((index, output))
        return len(self._pending) == 1

    def wake(self) -> None:
        """Tells the listener."""
        if self.listener is not None:
            self.listener()


class EngineClient:
    """Made before the ranks start; `start` attaches it to the running event loop, `close` ends it.

    outbound_address: where ranks send; inbound_addresses: where rank i receives. Both are for the ranks to connect to.
    steps_address: the beginning of addresses for the ranks' own use.
    ready: one RankReady a rank once that rank can serve. loads: the newest report of each rank.
    """

    def __init__(self, num_ranks: int = 1, load_balance_method: str = "round_robin", *, speaks: bool = True) -> None:
        """num_ranks: data-parallel ones. load_balance_method: see `LoadBalancer`.

        speaks: False on a host other than node 0, whose ranks get their messages from there and only report here.
        """
        _remove_stale_folders()
        # mkdtemp makes the folder accessible to this user alone, and so the sockets in it.
        self._folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        # Held as long as this process lives, however it ends: an unlocked folder is nobody's.
        self._folder_lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._folder_lock, fcntl.LOCK_EX)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outbound_address = f"ipc://{self._folder}/outbound"
        self.inbound_addresses = [f"ipc://{self._folder}/inbound-{rank}" for rank in range(num_ranks)]
        self.steps_address = f"ipc://{self._folder}/steps-"
        self._pull = self._bind(zmq.PULL, self.outbound_address)
        self._push = [self._bind(zmq.PUSH, address) for address in self.inbound_addresses if speaks]
        self.num_ranks = num_ranks
        self._balancer = LoadBalancer(num_ranks, load_balance_method)
        self.ready: dict[int, RankReady] = {}
        self.loads: dict[int, LoadReport] = {}
        self.draining = False
        self.failure: str | None = None
        self._failure_code = "engine_failed"
        self._generations: set[Generation] = set()
        self._names: dict[str, Generation] = {}
        self._samples: dict[str, tuple[Generation, int]] = {}
        self._serial = itertools.count()
        self._control_id = itertools.count()
        self._replies: dict[int, tuple[asyncio.Future[list[ControlReply]], list[ControlReply]]] = {}
        self._changed = asyncio.Event()
        self._tokens_made = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.bind(address)
        return socket

    def listen_remote(self, host: str) -> tuple[str, list[str]]:
        """As outbound_address and inbound_addresses, for ranks on other hosts. host: numeric, of this host."""

        def bind(socket: zmq.Socket[bytes]) -> str:
            socket.setsockopt(zmq.IPV6, 1)
            socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)

        return bind(self._pull), [bind(socket) for socket in self._push]

    # Life

    def start(self) -> None:
        """To be called in the event loop that will serve the requests; a second call does nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pull.fileno(), self._receive)
            # The descriptor tells of changes only: what came before it was watched has to be taken now.
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Closes the sockets and removes their folder. A second call does nothing."""
        if self._loop is not None and not self._loop.is_closed() and not self._pull.closed:
            self._loop.remove_reader(self._pull.fileno())
        self._context.destroy(linger=1000)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._folder_lock >= 0:
            os.close(self._folder_lock)
            self._folder_lock = -1

    @property
    def engine(self) -> RankReady | None:
        """What rank 0 said of the model; None until every rank is ready."""
        return self.ready.get(0) if len(self.ready) == self.num_ranks else None

    @property
    def load_reports(self) -> list[LoadReport]:
        """The newest of each rank, in rank order; of zeros until it is ready."""
        return [self.loads.get(rank, LoadReport(rank=rank)) for rank in range(self.num_ranks)]

    @property
    def num_live(self) -> int:
        """HTTP requests being worked on."""
        return len(self._generations)

    async def wait_ready(self) -> RankReady:
        """Returns when every rank is ready. RuntimeError when one failed first."""
        while self.engine is None:
            if self.failure is not None:
                raise RuntimeError(self.failure)
            await self._wait_change()
        return self.engine

    def start_draining(self) -> None:
        """From now on new requests are answered with 503."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is being worked on."""
        while self._generations:
            await self._wait_change()

    def fail(self, message: str) -> None:
        """The engine is gone: every live request ends with this error, and new ones are refused."""
        self._end_all(500, message, "engine_failed")

    def shut_down(self) -> None:
        """As `fail`, for a stop that is meant: clients may ask another server. What failed before stays the reason."""
        if self.failure is None:
            self._end_all(503, "the server is shutting down", "shutting_down")

    def _end_all(self, status: int, message: str, code: str) -> None:
        """status: of the live requests' error."""
        self.failure, self._failure_code = message, code
        for generation in list(self._generations):
            generation.fail(ApiError(status, message, code=code))
        for future, _ in self._replies.values():
            if not future.done():
                future.set_exception(ApiError(503, message, code=code))
        self._notify()

    def shut_down_ranks(self) -> None:
        """Tells every rank to end."""
        for rank in range(self.num_ranks):
            with contextlib.suppress(ApiError):
                self._send(rank, ControlRequest(next(self._control_id), "shutdown"))

    async def wait_tokens(self) -> None:
        """Returns when a rank has made a token since the call, for whichever request."""
        self._tokens_made.clear()
        await self._tokens_made.wait()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    # Requests

    def check_accepting(self) -> RankReady:
        """ApiError 503 while no new request can be taken."""
        if self.failure is None and self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return self._check_running()

    def _check_running(self) -> RankReady:
        """ApiError 503 while the engine is starting or has failed."""
        if self.failure is not None:
            raise ApiError(503, self.failure, code=self._failure_code)
        if self.engine is None:
            raise ApiError(503, "the server is starting: the model is not loaded yet", code="starting")
        return self.engine

    def submit(
        self, names: Sequence[str], requests: Sequence[GenerateRequest], dp_rank: int | None = None
    ) -> Generation:
        """Sends the samples of one HTTP request, whose rid fields are replaced by unique ones.

        names: the client's name for each sample; ApiError 400 when another live request has one. dp_rank: the rank that
        the client asks for. End with `release`.
        """
        self.check_accepting()
        for name in names:
            if name in self._names:
                raise ApiError(400, f"rid {name!r} is in use by a request that is still running", param="rid")
        ranks: list[int] = []
        generation = Generation(self, ranks, names)
        self._generations.add(generation)
        self._names |= dict.fromkeys(names, generation)
        try:
            for index, (name, request) in enumerate(zip(names, requests, strict=True)):
                # A reused name must not meet late outputs of its predecessor: names on the wire are never reused.
                sample = f"{name}#{next(self._serial)}"
                generation.samples.append(sample)
                self._samples[sample] = (generation, index)
                ranks.append(self._rank_for(request, requests[:index], ranks) if dp_rank is None else dp_rank)
                self._balancer.start(sample, request, ranks[index])
                self._send(ranks[index], msgspec.structs.replace(request, rid=sample))
        except ApiError:
            self.release(generation)
            raise
        return generation

    def _rank_for(self, request: GenerateRequest, before: Sequence[GenerateRequest], ranks: Sequence[int]) -> int:
        """before, ranks: the samples of the same HTTP request that have a rank, and their ranks."""
        if before and request.bootstrap is None and request.input_ids is before[-1].input_ids:
            return ranks[-1]  # samples of one prompt compute it once
        return self._balancer.choose(request)

    def release(self, generation: Generation) -> None:
        """Ends what still runs of it and forgets it."""
        for sample, rank in zip(generation.samples, generation.ranks, strict=False):
            self.abort_sample(sample, rank)
        self._generations.discard(generation)
        for name in set(generation.names):
            del self._names[name]
        self._notify()

    def abort_sample(self, sample: str, rank: int) -> None:
        """The sample needs no more tokens; without effect when it has ended."""
        if self._samples.pop(sample, None) is not None:
            self._balancer.end(sample)
            with contextlib.suppress(ApiError):
                self._send(rank, AbortRequest(sample))

    def abort(self, name: str) -> int:
        """Asks the engine to end the live samples of this name; their client gets what there is. Returns how many."""
        generation = self._names.get(name)
        if generation is None:
            return 0
        return sum(self._ask_to_end(generation, index) for index, own in enumerate(generation.names) if own == name)

    def abort_all(self) -> int:
        """As `abort`, for every live sample."""
        return sum(self._ask_to_end(*found) for found in list(self._samples.values()))

    def _ask_to_end(self, generation: Generation, index: int) -> bool:
        sample = generation.samples[index]
        if sample not in self._samples:
            return False
        self._send(generation.ranks[index], AbortRequest(sample))
        return True

    # Control

    async def control(self, kind: str, timeout: float) -> list[ControlReply]:
        """Asks every rank; one reply a rank, in rank order. SilentRanks when one does not answer in `timeout` seconds.

        ApiError 503 while the engine is starting or has failed.
        """
        self._check_running()
        number = next(self._control_id)
        future: asyncio.Future[list[ControlReply]] = asyncio.get_running_loop().create_future()
        replies: list[ControlReply] = []
        self._replies[number] = (future, replies)
        try:
            for rank in range(self.num_ranks):
                self._send(rank, ControlRequest(number, kind))
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            answered = {reply.rank for reply in replies}
            raise SilentRanks([rank for rank in range(self.num_ranks) if rank not in answered]) from None
        finally:
            del self._replies[number]

    # Sockets

    def _send(self, rank: int, message: Inbound) -> None:
        try:
            self._push[rank].send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the rank is not connected any more
            raise ApiError(503, f"rank {rank} does not take messages", code="engine_failed") from error

    def _receive(self) -> None:
        while not self._pull.closed:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_outbound(data)
            except msgspec.DecodeError as error:
                logger.error("a message of %d bytes from a rank cannot be read and is dropped: %s", len(data), error)
                continue
            if isinstance(message, StepOutput):
                self._on_step(message)
            elif isinstance(message, ControlReply):
                self._on_reply(message)
            else:
                self._on_ready(message)

    def _on_ready(self, message: RankReady) -> None:
        if self._pull.closed:
            return
        # The connection on which the rank receives is another one, and may come a moment later.
        if self._push and not self._push[message.rank].poll(0, zmq.POLLOUT):
            asyncio.get_running_loop().call_later(_CONNECT_POLL, self._on_ready, message)
            return
        self.ready[message.rank] = message
        idle = LoadReport(rank=message.rank, total_tokens=message.max_total_tokens)
        self.loads.setdefault(message.rank, idle)  # until its first step
        self._notify()

    def _on_step(self, step: StepOutput) -> None:
        if step.load is not None:
            self.loads[step.rank] = step.load
        samples = self._samples
        touched: list[Generation] = []
        if any(output.token_ids for output in step.outputs):
            self._tokens_made.set()
        for output in step.outputs:
            found = samples.get(output.rid)
            if found is None:  # ended by us while this was under way
                continue
            if output.finish is not None:
                del samples[output.rid]
                self._balancer.end(output.rid)
            generation, index = found
            if generation.push(index, output):
                touched.append(generation)
        for generation in touched:
            generation.wake()

    def _on_reply(self, reply: ControlReply) -> None:
        waiting = self._replies.get(reply.id)
        if waiting is None:
            return
        future, replies = waiting
        replies.append(reply)
        if len(replies) == self.num_ranks and not future.done():
            future.set_result(sorted(replies, key=lambda item: item.rank))
