"""What the endpoints of the router share: its servers, connections, metrics, and the requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import aiohttp

from server.errors import ApiError
from server.router_config import RouterConfig
from server.router_health import watch
from server.router_metrics import RouterMetrics
from server.router_workers import Dispatcher

# Less than the time after which servers close an idle connection: none is chosen that is about to go.
_KEEPALIVE = 3.0


class Live(Protocol):
    """A request under way. rids: what its client calls it."""

    rids: tuple[str, ...]

    def abort(self) -> None:
        """Its client has asked the servers to end it."""

    def end(self, error: ApiError) -> None:
        """Ends it with this error."""


class RouterState:
    """`start` attaches it to the running event loop, `close` ends it."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.dispatcher = Dispatcher(config)
        self.metrics = RouterMetrics(self.dispatcher)
        self.live: set[Live] = set()
        self._closed_to: ApiError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Opens no connection yet, but starts the health checks, which do."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Bodies pass through as they are, so nothing may be asked for that the client has not asked for.
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        prefill, decode = self.dispatcher.prefill, self.dispatcher.decode
        for worker in self.dispatcher.workers:
            others = decode if worker.role == "prefill" else prefill
            self.spawn(watch(worker, others, self.session, self.config, self._on_change))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `close` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def check_accepting(self) -> None:
        """ApiError 503 while no new request can be taken."""
        if self._closed_to is not None:
            raise self._closed_to
        self.dispatcher.check_routable()

    async def wait_ready(self) -> None:
        """Returns when a server of each role is healthy."""
        while True:
            try:
                self.dispatcher.check_routable()
                return
            except ApiError:
                await self._wait_change()

    def start_draining(self) -> None:
        """From now on new requests are answered with 503."""
        self._closed_to = ApiError(503, "the router is shutting down", code="shutting_down")

    async def wait_idle(self) -> None:
        """Returns when no request is under way."""
        while self.live:
            await self._wait_change()

    def fail(self, message: str) -> None:
        """Ends every request with this error, and refuses new ones."""
        self._closed_to = ApiError(503, message, code="shutting_down")
        for exchange in list(self.live):
            exchange.end(self._closed_to)

    def abort(self, rid: str | None) -> None:
        """The requests with this name, or all of them, will be ended by their servers: not to be tried again."""
        for exchange in list(self.live):
            if rid is None or rid in exchange.rids:
                exchange.abort()

    def enter(self, exchange: Live) -> None:
        self.live.add(exchange)

    def leave(self, exchange: Live) -> None:
        self.live.discard(exchange)
        self._notify()

    def _on_change(self) -> None:
        self.dispatcher.wake()
        self._notify()

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
