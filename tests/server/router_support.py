"""A router in front of stub servers, all in one thread; stubs do what a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from aiohttp import web

from server.router import create_router_app
from server.router_config import PrefillAddress, RouterConfig
from server.router_state import RouterState

_T = TypeVar("_T")
Handler = Callable[["Stub", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Stub:
    """A server of either role. `handler` answers generation; `bodies` and `headers` hold what came, newest last.

    live: requests being answered. gone: set when a client leaves one. healthy: what /ready and /health say; None
    never answers them. mode, terms: what /ready says of its role and of what peers must have, None for nothing.
    """

    def __init__(self, role: str, handler: Handler, handed_over: dict[str, asyncio.Event]) -> None:
        self.role = role
        self._handed_over = handed_over
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.calls: list[str] = []
        self.live = 0
        self.gone = threading.Event()
        self.healthy: bool | None = True
        self.mode: str | None = None
        self.terms: dict[str, str] | None = None
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """On the same port as before, if there was one."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def kill(self) -> None:
        """Every connection breaks and nobody listens any more."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for connection in list(server.connections):  # type: ignore[attr-defined]
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    def handed_over(self, body: dict[str, Any]) -> asyncio.Event:
        """Set when prefill is done with this request."""
        return self._handed_over.setdefault(str(body["bootstrap_room"]), asyncio.Event())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in ("/ready", "/health"):
            if self.healthy is None:
                await asyncio.Event().wait()
            said = {"disaggregation_mode": self.mode, "hand_over": self.terms}
            said = {name: value for name, value in said.items() if value is not None}
            return web.json_response(said, status=200 if self.healthy else 503)
        self.calls.append(f"{request.method} {request.path_qs}")
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if path == "/get_load":
            return web.json_response([{"dp_rank": 0, "num_reqs": self.live}])
        if path == "/server_info":
            return web.json_response({"internal_states": [{"of": self.role}]})
        if path == "/abort_request":
            return web.json_response({"aborted": 2 if self.role == "decode" else 1})
        if path not in ("/v1/chat/completions", "/v1/completions", "/generate"):
            return web.json_response({"path": path, "role": self.role, "sent": (await request.read()).decode()})
        body = await request.json()
        self.bodies.append(body)
        self.live += 1
        try:
            return await self.handler(self, request, body)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        finally:
            self.live -= 1


async def prefill_ok(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stub.handed_over(body).set()
    return web.json_response({"by": "prefill"})


async def decode_ok(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await stub.handed_over(body).wait()
    return web.json_response({"by": "decode", "echo": body})


async def hang(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def die(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks before anything was answered."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


def answer(status: int, content: Any) -> Handler:
    async def handler(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(content, status=status)

    return handler


def stream(*chunks: bytes, then: str = "end") -> Handler:
    """Each chunk in a write of its own. then: "end", "abort" the connection, or "hang"."""

    async def handler(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", "x-own": "kept"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.002)  # lets the bytes leave by themselves
        if then == "abort":
            assert request.transport is not None
            await asyncio.sleep(0.05)
            request.transport.abort()
        if then != "end":
            await asyncio.Event().wait()
        await response.write_eof()
        return response

    return handler


@dataclass
class Cluster:
    state: RouterState
    url: str
    http: httpx.Client
    prefill: list[Stub]
    decode: list[Stub]
    loop: asyncio.AbstractEventLoop = field(repr=False)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs `work` in the thread of the router and the stubs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.state.dispatcher.workers)

    def metric(self, line: str) -> float:
        """The value of the metric whose line begins with this."""
        found = [text for text in self.http.get("/metrics").text.splitlines() if text.startswith(line)]
        assert len(found) == 1, (line, found)
        return float(found[0].rsplit(" ", 1)[1])


@contextlib.contextmanager
def cluster(
    *, num_prefill: int = 1, num_decode: int = 1, bootstrap_port: int | None = 9001, **settings: Any
) -> Iterator[Cluster]:
    """Every server is known to be healthy when the block begins. settings: fields of RouterConfig."""
    handed_over: dict[str, asyncio.Event] = {}
    prefill = [Stub("prefill", prefill_ok, handed_over) for _ in range(num_prefill)]
    decode = [Stub("decode", decode_ok, handed_over) for _ in range(num_decode)]
    started = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        for stub in prefill + decode:
            await stub.start()
        config = RouterConfig(
            prefill=tuple(PrefillAddress(stub.url, bootstrap_port) for stub in prefill),
            decode=tuple(stub.url for stub in decode),
            **({"health_interval": 0.05, "health_timeout": 10.0} | settings),
        )
        app = create_router_app(config)
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, http="httptools", log_config=None, timeout_graceful_shutdown=2)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.005)
        await app.state.router.wait_ready()
        while not all(worker.healthy for worker in app.state.router.dispatcher.workers):
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        found.update(state=app.state.router, url=f"http://127.0.0.1:{port}", server=server)
        found["loop"] = asyncio.get_running_loop()
        started.set()
        await serving
        for stub in prefill + decode:
            await stub.kill()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        with httpx.Client(base_url=found["url"], timeout=60) as http:
            yield Cluster(found["state"], found["url"], http, prefill, decode, found["loop"])
    finally:
        found["server"].should_exit = True
        thread.join(60)
    assert not thread.is_alive()
