"""One server from start to end: listens, starts the ranks, serves HTTP, drains, and leaves no process behind.

Exit statuses: 0 after an orderly end, 1 when a rank or the HTTP server failed, 2 when the settings or the model were
refused, 128 + signal number when a second signal cut the draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import uvloop

import server.logging
from scheduler.messages import STATUS_HUNG, STATUS_PEER_LOST
from server import load_balance, parent_link
from server.config import ChildReady, ServerConfig
from server.engine_client import EngineClient, SilentRanks
from server.errors import ApiError
from server.http_server import HTTPServer, http_config
from server.lifetime import Lifetime
from server.listening import base_url, hand_over_address, has_bootstrap_server, notice_lost_clients
from server.nodes import MeetingPoint
from server.rank_group import CAUSE_GRACE, END_GRACE, RankGroup
from server.rank_process import RankProcess

if TYPE_CHECKING:
    from disagg.bootstrap import BootstrapServer

logger = logging.getLogger(__name__)

# Time for clients to read their errors, and for probes to see /health fail, before a broken server ends.
_FAILURE_GRACE = 1.0
# Time for open connections to be closed.
_HTTP_END_GRACE = 3.0
# Where ranks compute on the CPU, this process works in the pauses between their steps. At equal priority it would halt
# one compute thread in the middle of a step and leave the others waiting for it.
_NICENESS_BESIDE_COMPUTE = 10
# A rank is given up after so many pings in a row without an answer; one alone may be this process's own fault, which
# finds its timeout run out before the answer is read when it was itself suspended.
_PINGS = 4
# A rank whose step hangs ends itself after the same time, having printed where; it gets so much longer to do it.
_WATCHDOG_LEAD = 2.0


def run(
    config: ServerConfig,
    listener: socket.socket,
    bootstrap_listener: socket.socket | None = None,
    meeting: MeetingPoint | None = None,
) -> int:
    """Serves until told to stop; returns the exit status. StartupError when the tokenizer cannot be loaded.

    bootstrap_listener: of a prefill server, as `listen_bootstrap` gives it. meeting: of an engine on several hosts.
    """
    started = time.monotonic()
    notice_lost_clients(listener, config.client_timeout)
    config = msgspec.structs.replace(config, port=listener.getsockname()[1])
    if bootstrap_listener is not None:
        bootstrap_port = bootstrap_listener.getsockname()[1]
        config = msgspec.structs.replace(config, disaggregation_bootstrap_port=bootstrap_port)
    name = config.parent_link.name if config.parent_link else ""
    server.logging.configure(config.log_level, name or "api")
    if not config.outputs_are_meaningful:
        logger.warning("outputs are not meaningful: a fake transfer backend or a fake choice of experts is set")
    engine = config.engine
    method = load_balance.resolve(engine.load_balance_method, engine.disaggregation_mode)
    if meeting is not None:
        logger.info("node 0 of %d: the others join at --dist-init-addr %s", engine.nnodes, engine.dist_init_addr)
    client = EngineClient(engine.dp_size, method)
    address = hand_over_address(config, listener, bootstrap_listener, meeting)
    try:
        # The ranks first: they import and load for seconds while this process does the same for the HTTP side.
        ranks = RankGroup(config.engine, client, address, config.parent_link, meeting)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Supervisor(config, listener, bootstrap_listener, client, ranks, started).run())
        finally:
            ranks.end(grace=0)
    finally:
        client.close()


class _Supervisor:
    """Lives as long as the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        bootstrap_listener: socket.socket | None,
        client: EngineClient,
        ranks: RankGroup,
        started: float,
    ) -> None:
        self._config = config
        self._listener = listener
        self._bootstrap_listener = bootstrap_listener
        self._client = client
        self._ranks = ranks
        self._started = started

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._lifetime = Lifetime(self._drain, has_parent=self._config.parent_link is not None)
        self._lifetime.take_signals()
        for rank in self._ranks:
            loop.add_reader(rank.pidfd, self._on_rank_end, rank)
        # These take a second to import, in which the rank is on its way.
        from server.app import create_app
        from server.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._config)
        self._can_chat = tokenizer.chat_template is not None
        app = create_app(self._config, self._client, tokenizer)
        bootstrap = self._start_bootstrap()
        self._http = HTTPServer(http_config(app, _HTTP_END_GRACE, self._config.request_read_timeout))
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._lifetime.depend_on(serving)
        background = [asyncio.create_task(work) for work in (self._announce(), self._watch_ranks())]
        try:
            return await self._lifetime.outcome
        finally:
            for task in background:
                task.cancel()
            await self._end(serving)
            if bootstrap is not None:
                await asyncio.to_thread(bootstrap.close)

    def _start_bootstrap(self) -> BootstrapServer | None:
        if self._bootstrap_listener is None:
            return None
        from disagg.bootstrap import BootstrapServer

        config = self._config
        as_here = partial(http_config, graceful_seconds=_HTTP_END_GRACE, read_timeout=config.request_read_timeout)
        return BootstrapServer(config.host, 0, self._bootstrap_listener, as_here)

    async def _announce(self) -> None:
        with contextlib.suppress(RuntimeError):  # a rank ended first, which is reported where it is noticed
            rank = await self._client.wait_ready()
            if rank.device == "cpu":
                os.nice(_NICENESS_BESIDE_COMPUTE)
            # What exists by now stays: a collection that went through it would hold up all streams for milliseconds.
            gc.collect()
            gc.freeze()
            ready = ChildReady(base_url(self._listener), rank.dtype, rank.device, rank.max_total_tokens, self._can_chat)
            if self._config.parent_link is not None:
                parent_link.announce(self._config.parent_link, ready)
            else:
                print(ready_message(self._config, ready, time.monotonic() - self._started), flush=True)

    async def _watch_ranks(self) -> None:
        """Ends the server when a rank has stopped answering: clients get an error rather than wait for ever."""
        engine = self._config.engine
        timeout = engine.watchdog_timeout
        missed, silent = 0, ""
        with contextlib.suppress(RuntimeError, ApiError):  # a rank ended, which is reported where it is noticed
            await self._client.wait_ready()
            while missed < _PINGS:
                try:
                    await self._client.control("ping", (timeout + _WATCHDOG_LEAD) / _PINGS)
                except SilentRanks as error:
                    missed += 1
                    # By the number of the process that speaks for the data-parallel rank, as when one has ended.
                    group_size = engine.num_replicas * engine.tp_size // engine.dp_size
                    silent = ", ".join(str(rank * group_size) for rank in error.ranks)
                else:
                    missed = 0
                    await asyncio.sleep(min(1.0, timeout / _PINGS))
            self._fail(f"rank {silent} has not answered for --watchdog-timeout {timeout:g} s")
            self._ranks.ask_where()
            await asyncio.sleep(_FAILURE_GRACE / 2)
            self._ranks.kill()

    async def _drain(self, name: str) -> None:
        timeout = self._config.shutdown_timeout
        self._client.start_draining()
        live = self._client.num_live
        if live:
            logger.info("%s: finishing %d request(s), %g s at most; another signal stops at once", name, live, timeout)
        else:
            logger.info("%s: stopping", name)
        try:
            await asyncio.wait_for(self._client.wait_idle(), timeout)
        except TimeoutError:
            live = self._client.num_live
            logger.warning("%d request(s) did not finish within --shutdown-timeout %g s", live, timeout)

    def _on_rank_end(self, rank: RankProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(rank.pidfd)
        if self._lifetime.is_over:
            return
        status = rank.returncode()
        if status == 2:  # it has printed why
            self._lifetime.finish(2)
        elif status == STATUS_PEER_LOST:
            # The end of the rank that it lost says more, and may be noticed a little later.
            loop.call_later(CAUSE_GRACE, self._on_lost_rank, rank)
        else:
            # It and others in the step have said where they are; those between steps have not.
            if status == STATUS_HUNG and self._client.failure is None:
                self._ranks.ask_where()
            self._on_lost_rank(rank)

    def _on_lost_rank(self, rank: RankProcess) -> None:
        if self._client.failure is not None:
            return
        if rank.returncode() == STATUS_PEER_LOST:
            self._fail(f"rank {rank.rank} cannot go on: {rank.lost_peer() or 'another rank is gone'}")
        else:
            self._fail(f"rank {rank.rank} ended unexpectedly ({rank.describe_end()})")

    def _fail(self, message: str) -> None:
        logger.error("%s; stopping the server", message)
        self._client.fail(message)
        asyncio.get_running_loop().call_later(_FAILURE_GRACE, self._lifetime.finish, 1)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Ends open streams with an error, the HTTP server and the rank; at once where a second signal asked for it."""
        self._client.shut_down()
        self._http.should_exit = True
        outcome = self._lifetime.outcome
        status = outcome.result() if outcome.done() else None
        if status is not None and status > 128:
            # Not force_exit, which leaves the application's lifespan to be cancelled with a traceback.
            self._http.config.timeout_graceful_shutdown = 1
        else:
            self._client.shut_down_ranks()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, _HTTP_END_GRACE + 1)
        for rank in self._ranks:
            asyncio.get_running_loop().remove_reader(rank.pidfd)
        # A rank that is still loading, or that has lost another, does not read messages.
        is_orderly = status == 0 and self._client.engine is not None
        await asyncio.to_thread(self._ranks.end, END_GRACE if is_orderly else 0)


def ready_message(config: ServerConfig, ready: ChildReady, seconds: float, layout: str = "") -> str:
    """The line that says that requests are welcome, and one to copy that makes the first.

    seconds: since the start. layout: the servers behind the URL, where they are several.
    """
    role = config.engine.disaggregation_mode
    layout = layout or ("" if role == "null" else f"{role} server")
    first = (
        f"Lockstep is ready: {config.served_model_name} ({ready.dtype} on {ready.device}{layout and ', '}{layout}) at "
        f"{ready.url} after {seconds:.1f} s, room for {ready.max_total_tokens} tokens. "
    )
    if role != "null":
        prefill, decode = (ready.url, "URL") if role == "prefill" else ("URL", ready.url)
        if has_bootstrap_server(config):
            prefill += f" {config.disaggregation_bootstrap_port}"
        router = f"python launch.py --disaggregation-mode router --prefill {prefill} --decode {decode}"
        return f"{first}Requests go to a router:\n{router}"
    body: dict[str, object] = {"model": config.served_model_name, "max_tokens": 64, "temperature": 0}
    if ready.can_chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "List three fruits."}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    key = "-H 'Authorization: Bearer YOUR_API_KEY' " if config.api_key else ""
    curl = f"curl {ready.url}{path} -H 'Content-Type: application/json' {key}-d {shlex.quote(json.dumps(body))}"
    return f"{first}Try:\n{curl}"
