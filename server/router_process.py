"""The router from start to end: listens, serves, lets running requests finish, and ends.

Exit statuses: 0 after an orderly end, 1 when the HTTP server failed, 128 + signal number when a second signal cut the
draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

import msgspec
import uvloop

import server.logging
from server import parent_link
from server.config import ChildReady
from server.http_server import HTTPServer, http_config
from server.lifetime import Lifetime
from server.listening import base_url, notice_lost_clients
from server.router_config import RouterConfig

logger = logging.getLogger(__name__)

# Time for open connections to be closed.
_HTTP_END_GRACE = 3.0


def run(config: RouterConfig, listener: socket.socket) -> int:
    """Serves until told to stop; returns the exit status."""
    notice_lost_clients(listener, config.client_timeout)
    config = msgspec.structs.replace(config, port=listener.getsockname()[1])
    server.logging.configure(config.log_level, config.parent_link.name if config.parent_link else "router")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Supervisor(config, listener).run())


class _Supervisor:
    """Lives as long as the event loop."""

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._started = time.monotonic()

    async def run(self) -> int:
        lifetime = Lifetime(self._drain, has_parent=self._config.parent_link is not None)
        # Imported here, and signals taken after it: until then one ends the process at once, which serves nobody yet.
        from server.router import create_router_app

        app = create_router_app(self._config)
        self._state = app.state.router
        lifetime.take_signals()
        http = HTTPServer(http_config(app, _HTTP_END_GRACE, self._config.request_read_timeout))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        lifetime.depend_on(serving)
        announcing = asyncio.create_task(self._announce())
        try:
            return await lifetime.outcome
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
        print(ready_message(config, ready.url, time.monotonic() - self._started), flush=True)

    async def _drain(self, name: str) -> None:
        timeout = self._config.shutdown_timeout
        logger.info("%s: stopping; requests under way get %g s", name, timeout)
        self._state.start_draining()
        try:
            await asyncio.wait_for(self._state.wait_idle(), timeout)
        except TimeoutError:
            logger.warning("some requests did not finish within --shutdown-timeout %g s", timeout)


def ready_message(config: RouterConfig, url: str, seconds: float) -> str:
    """The line that says that requests are welcome. seconds: since the start."""
    plural = "" if len(config.decode) == 1 else "s"
    return (
        f"Lockstep is ready: router of {len(config.prefill)} prefill and {len(config.decode)} decode server{plural} at "
        f"{url} after {seconds:.1f} s"
    )
