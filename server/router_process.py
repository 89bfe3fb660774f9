"""The router from start to end: listens, serves, lets running requests finish, and ends.

Exit statuses: 0 after an orderly end, 1 when the HTTP server failed, 128 + signal number when a second signal cut the
draining short.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time

import uvloop

import server.logging
from server import parent_link
from server.config import ChildReady
from server.router_config import RouterConfig
from server.supervisor import HTTPServer, base_url, http_config

logger = logging.getLogger(__name__)


def run(config: RouterConfig, listener: socket.socket) -> int:
    """Serves until told to stop; returns the exit status."""
    server.logging.configure(config.log_level, config.parent_link.name if config.parent_link else "router")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Router(config, listener).run())


class _Router:
    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._started = time.monotonic()
        self._signal = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        from server.router import create_router_app

        self._http = HTTPServer(http_config(create_router_app(self._config), self._config.shutdown_timeout))
        ready = ChildReady(base_url(self._listener))
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        if self._config.parent_link is not None:
            parent_link.announce(self._config.parent_link, ready)
        else:
            seconds = time.monotonic() - self._started
            print(f"Lockstep is ready: a router at {ready.url} after {seconds:.1f} s", flush=True)
        await serving
        if not self._http.should_exit:
            logger.error("the HTTP server ended unexpectedly")
            return 1
        return 128 + self._signal if self._signal else 0

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._http.should_exit:
            logger.warning("%s again: stopping at once", name)
            self._signal = number
            self._http.force_exit = True
            return
        logger.info("%s: finishing the requests under way, for %g s at most", name, self._config.shutdown_timeout)
        self._http.should_exit = True
