"""The servers behind the router: which are healthy, how many requests each has, and who waits for a place."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from server.errors import ApiError
from server.router_config import PrefillAddress, RouterConfig

logger = logging.getLogger(__name__)

# Prompts are compared in blocks of so many bytes of their JSON; so many blocks are remembered, and so many looked at.
_PREFIX_BLOCK = 512
_MAX_PREFIXES = 1 << 16
_MAX_BLOCKS = 256
# Requests by which the server with the longest known prefix may be ahead of the least loaded one.
_CACHE_AWARE_SLACK = 4


class WorkerError(Exception):
    """A server did not answer as it should; the message says which and what happened."""


@dataclass(eq=False)
class _Guard:
    task: asyncio.Task[object]
    reason: str | None = None


class Worker:
    """One server. It gets requests while it is `healthy`; before the first health check it is not.

    role: "prefill" or "decode". in_flight: requests it has been given and not answered yet. terms: what it says that a
    server of the other role must have too, by name; empty where it has not said.
    """

    def __init__(self, role: str, address: PrefillAddress, limit: int) -> None:
        self.role = role
        self.url = address.url
        self.address = address
        self.limit = limit
        self.in_flight = 0
        self.terms: dict[str, str] = {}
        self._problems = {"answers": "it has not been asked yet"}
        self._guards: set[_Guard] = set()

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @property
    def healthy(self) -> bool:
        return not self._problems

    @property
    def problem(self) -> str:
        """Why it is not healthy; empty when it is."""
        return next(iter(self._problems.values()), "")

    def note(self, check: str, problem: str) -> bool:
        """Takes the result of a check, `problem` empty when it passed; returns whether `healthy` has changed."""
        before = self.healthy
        if problem:
            self._problems[check] = problem
        else:
            self._problems.pop(check, None)
        if self.healthy == before:
            return False
        if self.healthy:
            logger.info("%s is healthy", self)
        else:
            logger.warning("%s gets no requests: %s", self, self.problem)
        return True

    def misfit(self, others: Iterable[Worker]) -> str:
        """What keeps it from working with any of `others`, of which those that have not said their terms may fit."""
        problem = ""
        for other in others:
            name = next((name for name, value in self.terms.items() if other.terms.get(name, value) != value), None)
            if name is None:
                return ""
            problem = f"{name} differs: it has {self.terms[name]!r}, {other} has {other.terms[name]!r}"
        return problem

    @contextmanager
    def guard(self) -> Iterator[None]:
        """While a task waits for this server inside the block, `give_up` ends the wait with WorkerError."""
        task = asyncio.current_task()
        assert task is not None
        guard = _Guard(task)
        self._guards.add(guard)
        try:
            yield
        except asyncio.CancelledError:
            # Cancelled by others as well: theirs is the stronger wish.
            if guard.reason is None or task.uncancel() > 0:
                raise
            raise WorkerError(f"{self} {guard.reason}") from None
        finally:
            self._guards.discard(guard)

    def give_up(self, reason: str) -> None:
        """Ends every wait for this server. reason: continues a sentence that begins with its name."""
        for guard in list(self._guards):
            if guard.reason is None:
                guard.reason = reason
                guard.task.cancel()


@dataclass(frozen=True)
class Pair:
    prefill: Worker
    decode: Worker


@dataclass(eq=False)
class _Waiter:
    future: asyncio.Future[Pair]
    prefix: bytes
    avoid: Collection[Worker] = field(default=())


class Dispatcher:
    """Gives each request a prefill and a decode server, in the order of arrival; lets it wait while all are full."""

    def __init__(self, config: RouterConfig) -> None:
        self.prefill = [Worker("prefill", address, config.max_prefill_requests) for address in config.prefill]
        self.decode = [Worker("decode", PrefillAddress(url), config.max_decode_requests) for url in config.decode]
        self._max_queued = config.max_queued_requests
        self._queue_timeout = config.queue_timeout
        self._policies = {"prefill": make_policy(config.policy), "decode": make_policy(config.policy)}
        self._waiters: deque[_Waiter] = deque()

    @property
    def workers(self) -> list[Worker]:
        return self.prefill + self.decode

    @property
    def queued(self) -> int:
        """Requests that wait for a server."""
        return len(self._waiters)

    @property
    def queue_is_full(self) -> bool:
        return self.queued >= self._max_queued

    def check_routable(self) -> None:
        """ApiError 503 that says what is wrong while there is no healthy server of one of the roles."""
        for role, workers in (("prefill", self.prefill), ("decode", self.decode)):
            if not any(worker.healthy for worker in workers):
                reasons = "; ".join(f"{worker.url}: {worker.problem}" for worker in workers)
                raise ApiError(503, f"no {role} server is healthy ({reasons})", code=f"no_{role}_server")

    def has_pair_besides(self, pairs: Collection[Pair]) -> bool:
        """Whether healthy servers make a pair that is not one of these."""
        return any(
            Pair(prefill, decode) not in pairs
            for prefill in self.prefill
            if prefill.healthy
            for decode in self.decode
            if decode.healthy
        )

    async def acquire(self, prefix: bytes, avoid: Collection[Worker]) -> Pair:
        """A place at one server of each role; both have to be given back with `release`.

        prefix: bytes that begin alike when prompts do. avoid: servers to be taken only when there are no others.
        ApiError 503 when no server is healthy, when too many wait already, or when the wait takes too long.
        """
        self.check_routable()
        if not self._waiters and (pair := self._take(prefix, avoid)) is not None:
            return pair
        if self.queue_is_full:
            message = f"{self.queued} requests are waiting already (--max-queued-requests); try again later"
            raise ApiError(503, message, code="queue_full")
        waiter = _Waiter(asyncio.get_running_loop().create_future(), prefix, avoid)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._queue_timeout):
                return await waiter.future
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                pair = waiter.future.result()
                self.release(pair.prefill)
                self.release(pair.decode)
            if not isinstance(error, TimeoutError):
                raise
            message = f"no server had a place within {self._queue_timeout:g} s (--queue-timeout); try again later"
            raise ApiError(503, message, code="queue_timeout") from error

    def release(self, worker: Worker) -> None:
        worker.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Serves those who wait, as far as there are places; to be called when there may be more than before."""
        if not self._waiters:
            return
        try:
            self.check_routable()
        except ApiError as error:
            while self._waiters:
                self._settle(self._waiters.popleft(), error)
            return
        while self._waiters:
            pair = self._take(self._waiters[0].prefix, self._waiters[0].avoid)
            if pair is None:
                return
            self._settle(self._waiters.popleft(), pair)

    def _settle(self, waiter: _Waiter, outcome: Pair | ApiError) -> None:
        if isinstance(outcome, ApiError):
            if not waiter.future.done():
                waiter.future.set_exception(ApiError(outcome.status, outcome.message, code=outcome.code))
        elif waiter.future.done():  # cancelled, and not yet out of the queue
            outcome.prefill.in_flight -= 1
            outcome.decode.in_flight -= 1
        else:
            waiter.future.set_result(outcome)

    def _take(self, prefix: bytes, avoid: Collection[Worker]) -> Pair | None:
        chosen = []
        for workers in (self.prefill, self.decode):
            free = [worker for worker in workers if worker.healthy and worker.in_flight < worker.limit]
            if not free:
                return None
            chosen.append([worker for worker in free if worker not in avoid] or free)
        pair = Pair(*(self._policies[free[0].role].choose(free, prefix) for free in chosen))
        pair.prefill.in_flight += 1
        pair.decode.in_flight += 1
        return pair


class Policy:
    """Chooses the one with the fewest requests, in turn among equals."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker], prefix: bytes) -> Worker:
        """workers: at least one."""
        least = min(worker.in_flight for worker in workers)
        return self._next([worker for worker in workers if worker.in_flight == least])

    def _next(self, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class _RoundRobin(Policy):
    def choose(self, workers: Sequence[Worker], prefix: bytes) -> Worker:
        return self._next(workers)


class _Random(Policy):
    def choose(self, workers: Sequence[Worker], prefix: bytes) -> Worker:
        return random.choice(workers)


class _PowerOfTwo(Policy):
    """The less loaded of two at random: nearly as even as the least loaded one, with no herd when routers are many."""

    def choose(self, workers: Sequence[Worker], prefix: bytes) -> Worker:
        return super().choose(random.sample(workers, min(2, len(workers))), prefix)


class _CacheAware(Policy):
    """The one that was given the longest prefix of this prompt, unless it is clearly busier than another."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: OrderedDict[bytes, Worker] = OrderedDict()

    def choose(self, workers: Sequence[Worker], prefix: bytes) -> Worker:
        keys = _block_keys(prefix)
        known = next((self._owners[key] for key in reversed(keys) if key in self._owners), None)
        worker = super().choose(workers, prefix)
        if known is not None and known in workers and known.in_flight <= worker.in_flight + _CACHE_AWARE_SLACK:
            worker = known
        for key in keys:
            self._owners[key] = worker
            self._owners.move_to_end(key)
        while len(self._owners) > _MAX_PREFIXES:
            self._owners.popitem(last=False)
        return worker


def _block_keys(prefix: bytes) -> list[bytes]:
    """One key a whole block, each of everything up to there; at least one."""
    digest = blake2b(digest_size=16)
    keys = []
    for start in range(0, max(1, min(len(prefix) // _PREFIX_BLOCK, _MAX_BLOCKS)) * _PREFIX_BLOCK, _PREFIX_BLOCK):
        digest.update(prefix[start : start + _PREFIX_BLOCK])
        keys.append(digest.digest())
    return keys


_POLICIES: dict[str, type[Policy]] = {
    "shortest_queue": Policy,
    "round_robin": _RoundRobin,
    "random": _Random,
    "power_of_two": _PowerOfTwo,
    "cache_aware": _CacheAware,
}


def make_policy(name: str) -> Policy:
    """name: one of router_config.POLICIES."""
    return _POLICIES[name]()
