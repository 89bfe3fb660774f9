"""The HTTP server under every API process: uvicorn, with an end of our own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from server.http_protocol import HTTPConfig
from server.listening import BACKLOG

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

# Of the graceful time, for the requests of connections that are cut off to end.
_CUT_LEAD = 0.5


class HTTPServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for whoever runs the server: uvicorn would stop listening at the first one, and cut streams."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Clients that neither send nor read are cut off before the graceful time is over.

        Their requests then end as those of any client that leaves. uvicorn would cancel each with a traceback.
        """
        graceful_seconds = self.config.timeout_graceful_shutdown or 0
        delay = max(0.0, graceful_seconds - _CUT_LEAD)
        cut = asyncio.get_running_loop().call_later(delay, self._cut_connections)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_connections(self) -> None:
        connections = list(self.server_state.connections)
        if connections:
            logger.warning("%d connection(s) are closed whose clients neither send nor read", len(connections))
        for connection in connections:
            connection.transport.abort()


def http_config(app: FastAPI, graceful_seconds: float, read_timeout: float) -> HTTPConfig:
    """graceful_seconds: that open connections get at the end. read_timeout: see HTTPConfig."""
    return HTTPConfig(
        app,
        read_timeout=read_timeout,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(graceful_seconds),
    )
