"""A host of an engine on several, other than the one with the HTTP server: starts its ranks and ends with them.

HTTP answers /health alone; other paths say where requests go. Exit statuses as in `server.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import Response

import server.logging
from scheduler.config import EngineConfig
from scheduler.messages import STATUS_HUNG, STATUS_PEER_LOST, RankReady
from server import http_common
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ApiError
from server.http_server import HTTPServer, http_config
from server.lifetime import Lifetime
from server.listening import base_url, hand_over_address
from server.nodes import MeetingPoint
from server.rank_group import CAUSE_GRACE, END_GRACE, RankGroup
from server.rank_process import RankProcess

logger = logging.getLogger(__name__)

_HTTP_END_GRACE = 1.0


def run(config: ServerConfig, listener: socket.socket, meeting: MeetingPoint) -> int:
    """Until the engine ends, or this host is told to stop, which ends the engine too; returns the exit status."""
    engine = config.engine
    server.logging.configure(config.log_level, f"node {engine.node_rank}")
    url = base_url(listener)
    logger.info("joining node 0 at --dist-init-addr %s; /health of this node at %s", engine.dist_init_addr, url)
    client = EngineClient(engine.ranks_per_node, speaks=False)
    try:
        ranks = RankGroup(engine, client, hand_over_address(config, listener, meeting=meeting), meeting=meeting)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Node(config, listener, meeting.host, client, ranks).run())
        finally:
            ranks.end(grace=0)
    finally:
        client.close()


class _Node:
    """Lives as long as the event loop."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, first_host: str, client: EngineClient, ranks: RankGroup
    ) -> None:
        """first_host: address of node 0."""
        self._config = config
        self._listener = listener
        self._first_host = first_host
        self._client = client
        self._ranks = ranks
        self._rank_end_grace = 0.0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._lifetime = Lifetime(self._drain)
        self._lifetime.take_signals()
        for rank in self._ranks:
            loop.add_reader(rank.pidfd, self._on_rank_end, rank)
        self._client.start()
        app = create_node_app(self._config.engine, self._first_host, self._client)
        http = HTTPServer(http_config(app, _HTTP_END_GRACE, self._config.request_read_timeout))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        announcing = asyncio.create_task(self._announce())
        try:
            return await self._lifetime.outcome
        finally:
            announcing.cancel()
            http.should_exit = True
            await serving
            for rank in self._ranks:
                loop.remove_reader(rank.pidfd)
            await asyncio.to_thread(self._ranks.end, self._rank_end_grace)

    async def _announce(self) -> None:
        engine, url = self._config.engine, base_url(self._listener)
        with contextlib.suppress(RuntimeError):  # a rank ended first, which is reported where it is noticed
            ready = await self._client.wait_ready()
            print(ready_message(engine, ready, url), flush=True)

    async def _drain(self, name: str) -> None:
        logger.info("%s: stopping this node, and with it the engine", name)

    def _on_rank_end(self, rank: RankProcess) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        if self._lifetime.is_over:
            return
        self._client.fail(f"rank {rank.rank} has ended")
        match rank.returncode():
            case 0:
                logger.info("the engine has ended")
                self._rank_end_grace = END_GRACE  # the others here were told to end as well
                self._lifetime.finish(0)
            case 2:  # it has printed why
                self._lifetime.finish(2)
            case status if status == STATUS_PEER_LOST:
                # The end of a rank here may be the cause, and be noticed a little later.
                asyncio.get_running_loop().call_later(CAUSE_GRACE, self._lifetime.finish, 1)
            case status:
                logger.error("rank %d ended unexpectedly (%s)", rank.rank, rank.describe_end())
                if status == STATUS_HUNG:
                    self._ranks.ask_where()
                    asyncio.get_running_loop().call_later(CAUSE_GRACE, self._lifetime.finish, 1)
                else:
                    self._lifetime.finish(1)


def create_node_app(engine: EngineConfig, first_host: str, client: EngineClient) -> FastAPI:
    """first_host: address of node 0."""
    app = FastAPI(openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        """200 while the ranks of this host serve: from when the first rank of all can do so too."""
        is_serving = client.engine is not None and client.failure is None
        return Response(status_code=200 if is_serving else 503)

    async def on_unknown_path(request: Request, _: Exception) -> Response:
        message = (
            f"there is no {request.url.path} on node {engine.node_rank} of {engine.nnodes}, which answers /health "
            f"alone: requests go to node 0, on {first_host}"
        )
        return http_common.error_response(ApiError(404, message))

    http_common.install(app, None, lambda _: None)
    app.add_exception_handler(404, on_unknown_path)
    return app


def ready_message(engine: EngineConfig, ready: RankReady, url: str) -> str:
    """The line that says that the ranks of this host serve. url: of this host."""
    count = engine.ranks_per_node
    return (
        f"Lockstep node {engine.node_rank} of {engine.nnodes} is ready: {count} rank{'' if count == 1 else 's'} "
        f"({ready.dtype} on {ready.device}); /health at {url}, requests go to node 0"
    )
