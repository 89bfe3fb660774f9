"""One server from start to end: listens, starts the ranks, serves HTTP, drains, and leaves no process behind.

Exit statuses: 0 after an orderly end, 1 when a rank or the HTTP server failed, 2 when the settings or the model were
refused, 128 + signal number when a second signal cut the draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import uvicorn
import uvloop

import server.logging
from scheduler.messages import STATUS_PEER_LOST
from server import load_balance, nodes, parent_link
from server.config import ChildReady, ServerConfig, StartupError
from server.engine_client import EngineClient
from server.errors import ApiError
from server.nodes import MeetingPoint
from server.rank_group import RankGroup
from server.rank_process import HandOverAddress, RankProcess

if TYPE_CHECKING:
    from fastapi import FastAPI

    from disagg.bootstrap import BootstrapServer

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Time for clients to read their errors, and for probes to see /health fail, before a broken server ends.
_FAILURE_GRACE = 1.0
# Time for ranks to end after they were told to, and for open connections to be closed.
_RANK_END_GRACE = 5.0
_HTTP_END_GRACE = 3.0
# Where ranks compute on the CPU, this process works in the pauses between their steps. At equal priority it would halt
# one compute thread in the middle of a step and leave the others waiting for it.
_NICENESS_BESIDE_COMPUTE = 10
# Of that time, for the requests of connections that are cut off to end.
_CUT_LEAD = 0.5
# A rank is given up after so many pings in a row without an answer; one alone may be this process's own fault, which
# finds its timeout run out before the answer is read when it was itself suspended.
_PINGS = 4
# A rank whose step hangs ends itself after the same time, having printed where; it gets so much longer to do it.
_WATCHDOG_LEAD = 2.0
# The rank that ended first is looked for so long.
_CAUSE_GRACE = 1.0
# A client whose machine is gone is noticed after 20 + 4 * 10 seconds.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket; port 0 lets the system choose. host: name, IPv4 or IPv6 address (brackets allowed).

    flag: the one that sets the port.

    StartupError when the address cannot be had. It listens at once, because two sockets may be bound to one port as
    long as neither listens.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        reason = f"--host {host} cannot be resolved ({error.strerror}): use an address of this machine"
        raise StartupError(reason) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(_explain_bind(error, host, port, flag)) from error
    return listener


def listen_bootstrap(config: ServerConfig, meeting: MeetingPoint | None = None) -> socket.socket | None:
    """Where a prefill server's bootstrap server listens; None for a server that has none. StartupError as `listen`."""
    if not _has_bootstrap_server(config):
        return None
    listener = listen(config.host, config.disaggregation_bootstrap_port, "--disaggregation-bootstrap-port")
    if meeting is not None and not _is_reached_from_nodes(listener, meeting):
        listener.close()
        every = "::" if ":" in meeting.host else "0.0.0.0"
        raise StartupError(
            f"--host {config.host} is not reached from the other nodes, whose ranks register at the bootstrap server "
            f"there: use --host {meeting.host}, or {every} for every interface"
        )
    return listener


def check_kv_host(config: ServerConfig) -> None:
    """StartupError when the ranks could not listen on --disaggregation-kv-host."""
    host = config.disaggregation_kv_host
    if host is None:
        return
    try:
        listen(host, 0).close()
    except StartupError as error:
        raise StartupError(
            f"--disaggregation-kv-host {host} is not an address of this machine: name one at which others reach it"
        ) from error


def _has_bootstrap_server(config: ServerConfig) -> bool:
    return config.engine.disaggregation_mode == "prefill" and config.engine.disaggregation_transfer_backend != "fake"


def meet(config: ServerConfig) -> MeetingPoint | None:
    """Where this host meets the others of its engine; None for an engine on one. StartupError as `listen`."""
    engine = config.engine
    if engine.nnodes == 1 or engine.dist_init_addr is None:
        return None
    host, port = nodes.parse_address(engine.dist_init_addr)
    if host in _EVERY_INTERFACE:
        raise StartupError(f"--dist-init-addr {host} is every interface: name the address at which others reach node 0")
    listener = listen(host, port, "--dist-init-addr") if engine.node_rank == 0 else None
    address = nodes.resolve(host, port) if listener is None else str(listener.getsockname()[0])
    if _is_loopback(address):
        logger.warning("--dist-init-addr %s is %s here, which no other host can reach", host, address)
    return MeetingPoint(address, port, *nodes.way_towards(address), listener)


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
        ranks = RankGroup(config.engine, client, address, name, meeting)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_Supervisor(config, listener, bootstrap_listener, client, ranks, started).run())
        finally:
            ranks.end(grace=0)
    finally:
        client.close()


def hand_over_address(
    config: ServerConfig,
    listener: socket.socket,
    bootstrap_listener: socket.socket | None = None,
    meeting: MeetingPoint | None = None,
) -> HandOverAddress | None:
    """Of the ranks on this host; None where nothing is handed over. listener: of HTTP. meeting: as in `run`."""
    if config.engine.disaggregation_mode == "null":
        return None
    host, bootstrap = reachable_host(config.host), ""
    if bootstrap_listener is not None:
        bootstrap = base_url(bootstrap_listener).removeprefix("http://")
    # On several hosts the way between them leads to each; what --host says need not.
    is_open = config.host.strip("[]") in _EVERY_INTERFACE
    if meeting is not None and (is_open or _is_loopback(listener.getsockname()[0])):
        host = meeting.own_host
    if bootstrap_listener is not None and meeting is not None and is_open:
        bootstrap = f"{bracketed(meeting.host)}:{bootstrap_listener.getsockname()[1]}"
    return HandOverAddress(bootstrap, config.disaggregation_kv_host or host, uuid.uuid4().hex)


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


def http_config(app: FastAPI, graceful_seconds: float) -> uvicorn.Config:
    """graceful_seconds: that open connections get at the end."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(graceful_seconds),
    )


class _Supervisor:
    """Lives as long as the event loop. `_outcome` is the exit status, set once by whatever ends the server."""

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
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        for rank in self._ranks:
            loop.add_reader(rank.pidfd, self._on_rank_end, rank)
        # These take a second to import, in which the rank is on its way.
        from server.app import create_app
        from server.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self._config)
        self._can_chat = tokenizer.chat_template is not None
        app = create_app(self._config, self._client, tokenizer)
        bootstrap = self._start_bootstrap()
        self._http = HTTPServer(http_config(app, _HTTP_END_GRACE))
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        serving.add_done_callback(self._on_http_end)
        background = [asyncio.create_task(work) for work in (self._announce(), self._watch_rank())]
        try:
            return await self._outcome
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

        return BootstrapServer(self._config.host, 0, self._bootstrap_listener)

    async def _announce(self) -> None:
        with contextlib.suppress(RuntimeError):  # a rank ended first, which is reported where it is noticed
            rank = await self._client.wait_ready()
            if rank.device == "cpu":
                os.nice(_NICENESS_BESIDE_COMPUTE)
            ready = ChildReady(base_url(self._listener), rank.dtype, rank.device, rank.max_total_tokens, self._can_chat)
            if self._config.parent_link is not None:
                parent_link.announce(self._config.parent_link, ready)
            else:
                print(ready_message(self._config, ready, time.monotonic() - self._started), flush=True)

    async def _watch_rank(self) -> None:
        """Ends a rank that has stopped answering, and so the server: clients get an error rather than wait for ever."""
        timeout = self._config.engine.watchdog_timeout
        missed = 0
        with contextlib.suppress(RuntimeError, ApiError):  # a rank ended, which is reported where it is noticed
            await self._client.wait_ready()
            while missed < _PINGS:
                try:
                    await self._client.control("ping", (timeout + _WATCHDOG_LEAD) / _PINGS)
                except TimeoutError:
                    missed += 1
                else:
                    missed = 0
                    await asyncio.sleep(min(1.0, timeout / _PINGS))
            self._fail(f"rank 0 has not answered for --watchdog-timeout {timeout:g} s")
            self._ranks.kill()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s: stopping at once", name)
            self._finish(128 + number)
            return
        self._draining = asyncio.create_task(self._drain(name))

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
        self._finish(0)

    def _on_rank_end(self, rank: RankProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(rank.pidfd)
        if self._outcome.done():
            return
        status = rank.returncode()
        if status == 2:  # it has printed why
            self._finish(2)
        elif status == STATUS_PEER_LOST:
            # The end of the rank that it lost says more, and may be noticed a little later.
            loop.call_later(_CAUSE_GRACE, self._on_lost_rank, rank)
        else:
            self._on_lost_rank(rank)

    def _on_lost_rank(self, rank: RankProcess) -> None:
        if self._client.failure is None:
            self._fail(f"rank {rank.rank} ended unexpectedly ({rank.describe_end()})")

    def _fail(self, message: str) -> None:
        logger.error("%s; stopping the server", message)
        self._client.fail(message)
        asyncio.get_running_loop().call_later(_FAILURE_GRACE, self._finish, 1)

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        if not self._outcome.done():
            logger.error("the HTTP server ended unexpectedly", exc_info=serving.exception())
            self._finish(1)

    def _finish(self, status: int) -> None:
        if not self._outcome.done():
            self._outcome.set_result(status)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Ends open streams with an error, the HTTP server and the rank; at once where a second signal asked for it."""
        self._client.fail("the server is shutting down")
        self._http.should_exit = True
        at_once = self._outcome.done() and self._outcome.result() > 128
        if at_once:
            # Not force_exit, which leaves the application's lifespan to be cancelled with a traceback.
            self._http.config.timeout_graceful_shutdown = 1
        else:
            self._client.shut_down_ranks()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, _HTTP_END_GRACE + 1)
        for rank in self._ranks:
            asyncio.get_running_loop().remove_reader(rank.pidfd)
        # A rank that is still loading, or that has lost another, does not read messages.
        is_orderly = self._outcome.done() and self._outcome.result() == 0 and self._client.engine is not None
        await asyncio.to_thread(self._ranks.end, _RANK_END_GRACE if is_orderly else 0)


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
        if _has_bootstrap_server(config):
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


def base_url(listener: socket.socket) -> str:
    """A URL that reaches the listener from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(_EVERY_INTERFACE.get(host, host))}:{port}"


def bracketed(host: str) -> str:
    """The host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _is_reached_from_nodes(listener: socket.socket, meeting: MeetingPoint) -> bool:
    """As far as node 0 can tell."""
    host = listener.getsockname()[0]
    if host == "0.0.0.0":
        return ":" not in meeting.host
    return not _is_loopback(host) or _is_loopback(meeting.host)


def reachable_host(host: str) -> str:
    """An address at which other machines reach what listens on `host`; of this machine alone where it has no route."""
    host = host.strip("[]")
    if host not in _EVERY_INTERFACE:
        return host
    # Connecting a datagram socket sends nothing, but has the kernel choose a source address. The targets are
    # addresses reserved for documentation (RFC 5737, RFC 3849).
    family, target = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return _EVERY_INTERFACE[host]
        return str(probe.getsockname()[0])


def _explain_bind(error: OSError, host: str, port: int, flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use: stop the other server, or choose another port with {flag}"
        case errno.EACCES:
            return f"port {port} needs privileges: choose one of at least 1024 with {flag}"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is not an address of this machine: use 127.0.0.1, or 0.0.0.0 for every interface"
    return f"cannot listen on {host} port {port} ({error.strerror}): choose others with --host and {flag}"
