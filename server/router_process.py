"""The router from start to end: listens, serves, lets running requests finish, and ends.

Exit statuses: 0 after an orderly end, 1 when the HTTP server failed, 128 + signal number when a second signal cut the
draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time

import msgspec
import uvloop

import server.logging
from server import parent_link
from server.config import ChildReady
from server.router_config import RouterConfig
from server.supervisor import HTTPServer, base_url, http_config

logger = logging.getLogger(__name__)

# Time for open connections to be closed.
_HTTP_END_GRACE = 3.0


def run(config: RouterConfig, listener: socket.socket) -> int:
    """Serves until told to stop; returns the exit status."""
    config = msgspec.structs.replace(config, port=listener.getsockname()[1])
    server.logging.configure(config.log_level, config.parent_link.name if config.parent_link else "router")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Supervisor(config, listener).run())


class _Supervisor:
    """Lives as long as the event loop. `_outcome` is the exit status, set once by whatever ends the router."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._started = time.monotonic()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[int] = loop.create_future()
        # Imported here, and signals taken after it: until then one ends the process at once, which serves nobody yet.
        from server.router import create_router_app

        app = create_router_app(self._config)
        self._state = app.state.router
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = HTTPServer(http_config(app, _HTTP_END_GRACE))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        serving.add_done_callback(self._on_http_end)
        announcing = asyncio.create_task(self._announce())
        try:
            return await self._outcome
        finally:
            announcing.cancel()
            self._state.fail("the server is shutting down")
            http.should_exit = True
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, _HTTP_END_GRACE + 1)

    async def _announce(self) -> None:
        """Once requests can be routed."""
        await self._state.wait_ready()
        ready = ChildReady(base_url(self._listener))
        if self._config.parent_link is not None:
            parent_link.announce(self._config.parent_link, ready)
            return
        config = self._config
        seconds = time.monotonic() - self._started
        print(
            f"Lockstep is ready: router of {len(config.prefill)} prefill and {len(config.decode)} decode servers at "
            f"{ready.url} after {seconds:.1f} s",
            flush=True,
        )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s: stopping at once", name)
            self._finish(128 + number)
            return
        self._draining = asyncio.create_task(self._drain(name))

    async def _drain(self, name: str) -> None:
        timeout = self._config.shutdown_timeout
        logger.info("%s: stopping; requests under way get %g s", name, timeout)
        self._state.start_draining()
        try:
            await asyncio.wait_for(self._state.wait_idle(), timeout)
        except TimeoutError:
            logger.warning("some requests did not finish within --shutdown-timeout %g s", timeout)
        self._finish(0)

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        if not self._outcome.done():
            logger.error("the HTTP server ended unexpectedly", exc_info=serving.exception())
            self._finish(1)

    def _finish(self, status: int) -> None:
        if not self._outcome.done():
            self._outcome.set_result(status)
