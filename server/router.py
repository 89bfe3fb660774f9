"""The router in front of prefill and decode servers: the API of one server, answered by a pair of them.

Generation goes through `router_exchange`; everything else is asked of one server, or of all.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI, Request, Response

from server import http_common
from server.errors import ApiError
from server.http_common import json_response
from server.metrics import CONTENT_TYPE
from server.native_protocol import AbortBody
from server.request_body import read_body
from server.router_body import RoutedBody, chat_samples, completion_samples, generate_samples
from server.router_config import RouterConfig
from server.router_exchange import Exchange, outbound_headers
from server.router_health import describe, error_message
from server.router_state import RouterState
from server.router_workers import Worker
from server.validation import check_abort, decode_body

_CONTROL_TIMEOUT = 30.0
_abort_decoder = msgspec.json.Decoder(AbortBody)


def create_router_app(config: RouterConfig) -> FastAPI:
    """The application; its lifespan opens the connections and starts the health checks in the serving event loop.

    `app.state.router` is its RouterState, for draining and for waiting until requests can be routed.
    """
    state = RouterState(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await state.start()
        yield
        await state.close()

    app = FastAPI(title="Lockstep router", lifespan=lifespan, openapi_url=None)
    app.state.router = state
    _add_generation(app, state)
    _add_probes(app, state)
    _add_single(app, state)
    _add_reports(app, state)
    _add_commands(app, state)
    http_common.install(app, config.api_key, state.metrics.rejected)
    return app


def _add_generation(app: FastAPI, state: RouterState) -> None:
    async def generate(request: Request, count_samples: Callable[[bytes], int]) -> Response:
        arrived = time.monotonic()
        body = RoutedBody(await _read(request, state), count_samples)
        state.check_accepting()
        request_id = request.headers.get("x-request-id") or f"req-{uuid.uuid4().hex}"
        headers = outbound_headers(request.headers, request_id)
        return Exchange(state, request.url.path, body, headers, request_id, arrived)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, chat_samples)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, completion_samples)

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def native_generate(request: Request) -> Response:
        return await generate(request, generate_samples)


def _add_probes(app: FastAPI, state: RouterState) -> None:
    dispatcher = state.dispatcher

    @app.get("/health")
    async def health() -> Response:
        """200 while a server of each role is healthy."""
        dispatcher.check_routable()
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken."""
        state.check_accepting()
        if dispatcher.queue_is_full:
            raise ApiError(503, f"{dispatcher.queued} requests are waiting already", code="queue_full")
        return json_response({"status": "ready"})

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """200 when a server of each role can generate a token."""
        dispatcher.check_routable()
        for workers in (dispatcher.prefill, dispatcher.decode):
            answers = await _ask_all(state, "GET", "/health_generate", workers)
            if not any(answer.status == 200 for answer in answers):
                raise ApiError(503, "; ".join(answer.problem for answer in answers), code="engine_not_answering")
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _add_single(app: FastAPI, state: RouterState) -> None:
    """What any server of a role answers for all of them; decode servers, because only they need a tokenizer's text."""

    async def forward(request: Request) -> Response:
        body = await _read(request, state)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        state.dispatcher.check_routable()
        workers = sorted(
            (worker for worker in state.dispatcher.decode if worker.healthy), key=lambda worker: worker.in_flight
        )
        problem = ""
        for worker in workers:
            answer = await _ask(state, worker, request.method, path, body, request)
            if answer.status != 502:
                return Response(answer.body, answer.status, media_type="application/json")
            problem = answer.problem
        raise ApiError(502, problem, code="server_failed")

    for path in ("/v1/models", "/v1/models/{model:path}", "/model_info", "/get_model_info"):
        app.add_api_route(path, forward, methods=["GET"])
    for path in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
        app.add_api_route(path, forward, methods=["POST"])


def _add_reports(app: FastAPI, state: RouterState) -> None:
    """What every server says of itself."""
    dispatcher = state.dispatcher

    async def server_info(request: Request) -> Response:
        """The router's settings and what every server says of itself; internal_states are those of decode servers."""
        answers = await _ask_all(state, "GET", "/server_info", dispatcher.workers, request=request)
        shown = [_describe_worker(answer.worker) | {"server_info": answer.content()} for answer in answers]
        states: list[Any] = []
        for answer in answers:
            if answer.worker.role == "decode" and isinstance(info := answer.content(), dict):
                states += info.get("internal_states") or []
        settings = msgspec.to_builtins(state.config)
        del settings["parent_link"]
        settings["api_key"] = None if state.config.api_key is None else "***"
        return json_response(settings | {"workers": shown, "internal_states": states, "queued": dispatcher.queued})

    async def gather_loads(request: Request) -> list[Any]:
        loads: list[Any] = []
        for answer in await _ask_all(state, "GET", "/get_load", dispatcher.workers, request=request):
            found = answer.content()
            for load in found if isinstance(found, list) else []:
                loads.append(load | {"role": answer.worker.role, "server": answer.worker.url})
        return loads

    async def get_load(request: Request) -> Response:
        return json_response(await gather_loads(request))

    async def loads(request: Request) -> Response:
        return json_response({"timestamp": time.time(), "loads": await gather_loads(request)})

    @app.get("/workers")
    async def workers() -> Response:
        return json_response({"workers": [_describe_worker(worker) for worker in dispatcher.workers]})

    for path, endpoint in (
        ("/server_info", server_info),
        ("/get_server_info", server_info),
        ("/get_load", get_load),
        ("/v1/loads", loads),
    ):
        app.add_api_route(path, endpoint, methods=["GET"])


def _add_commands(app: FastAPI, state: RouterState) -> None:
    """What every server is told to do."""
    dispatcher = state.dispatcher

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        data = await _read(request, state)
        body = decode_body(_abort_decoder, data)
        check_abort(body)
        state.abort(None if body.abort_all else body.rid)
        # Decode first: it then ends with what it has, rather than with the failure of its prefill server.
        counts = []
        for group in (dispatcher.decode, dispatcher.prefill):
            answers = await _ask_all(state, "POST", "/abort_request", group, data, request)
            contents = [answer.content() for answer in answers]
            counts.append(sum(content.get("aborted", 0) for content in contents if isinstance(content, dict)))
        return json_response({"aborted": max(counts)})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        answers = await _ask_all(state, "POST", "/flush_cache", dispatcher.workers, request=request)
        failed = [answer for answer in answers if answer.status != 200]
        if failed:
            status = 400 if all(answer.status == 400 for answer in failed) else 502
            code = "busy" if status == 400 else "server_failed"
            raise ApiError(status, "; ".join(answer.problem for answer in failed), code=code)
        return json_response({"message": "the prefix caches are empty"})


async def _read(request: Request, state: RouterState) -> bytes:
    return await read_body(request, state.config.max_request_bytes, state.config.request_read_timeout)


def _describe_worker(worker: Worker) -> dict[str, Any]:
    return {
        "role": worker.role,
        "url": worker.url,
        "bootstrap_port": worker.address.bootstrap_port,
        "healthy": worker.healthy,
        "problem": worker.problem,
        "in_flight": worker.in_flight,
    }


@dataclass(frozen=True)
class _Reply:
    """A server's answer; status 502 and no body when there was none. problem: what was wrong, for people."""

    worker: Worker
    status: int
    body: bytes
    problem: str

    def content(self) -> Any:
        """The decoded JSON, or an error object that says why there is none."""
        if self.status == 200:
            try:
                return msgspec.json.decode(self.body)
            except msgspec.DecodeError:
                return {"error": {"message": f"{self.worker} does not answer in JSON"}}
        return {"error": {"message": self.problem}}


async def _ask(
    state: RouterState, worker: Worker, method: str, path: str, body: bytes = b"", request: Request | None = None
) -> _Reply:
    """One server's answer. request: the client's, whose headers go along."""
    headers = {} if request is None else outbound_headers(request.headers, request.headers.get("x-request-id"))
    try:
        async with (
            asyncio.timeout(_CONTROL_TIMEOUT),
            state.session.request(method, worker.url + path, data=body or None, headers=headers) as response,
        ):
            content = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        return _Reply(worker, 502, b"", f"{worker}: {describe(error)}")
    problem = "" if response.status == 200 else f"{worker} answers {response.status}: {error_message(content)}"
    return _Reply(worker, response.status, content, problem)


async def _ask_all(
    state: RouterState,
    method: str,
    path: str,
    workers: Sequence[Worker],
    body: bytes = b"",
    request: Request | None = None,
) -> list[_Reply]:
    """The answers of all these servers, in their order."""
    return await asyncio.gather(*(_ask(state, worker, method, path, body, request) for worker in workers))
