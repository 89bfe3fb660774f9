"""What every application of ours does alike: answers in JSON, errors in one shape, nobody past without the key."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError

# Probes and scrapers have no key.
_OPEN_PATHS = frozenset(("/health", "/health_generate", "/ready", "/metrics"))
# Seconds after which a client that was turned away may find a place.
_RETRY_AFTER = "1"
# What is left of a body whose request has been refused is read for so long, and while no pause is longer than this.
_LINGER_SECONDS = 30.0
_LINGER_PAUSE = 2.0


def json_response(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 503:
        headers["retry-after"] = _RETRY_AFTER
    return Response(error.body(), error.status, headers, "application/json")


def install(app: FastAPI, api_key: str | None, count: Callable[[int], None]) -> None:
    """Error handlers, and the check of `Authorization: Bearer <api_key>` unless that is None.

    count: called with the status of each error that is answered.
    """

    def answer(error: ApiError) -> Response:
        count(error.status)
        return error_response(error)

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"there is no {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return answer(ApiError(error.status_code, message))

    async def on_validation_error(_: Request, error: Exception) -> Response:
        return answer(ApiError(400, str(error)))

    async def on_failure(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, "internal error"))  # Starlette logs the traceback

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_failure)
    if api_key is not None:
        app.add_middleware(_Authorization, key=api_key, answer=answer)
    app.add_middleware(_Lingering)


class _Authorization:
    """Lets nobody without the key past, other than to probes."""

    def __init__(self, app: ASGIApp, key: str, answer: Callable[[ApiError], Response]) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "this server needs `Authorization: Bearer <api key>`", code="invalid_api_key")
                await self._answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Lingering:
    """Closes the connection of a request that is refused before its body has come, but not before it has been read.

    A client that sends all of a body before it reads would otherwise get a reset in place of the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_unread, lingers = True, False

        async def receive_noting() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = message.get("more_body", False)
            return message

        async def send_lingering(message: Message) -> None:
            nonlocal lingers
            if message["type"] == "http.response.start":
                if is_unread and message["status"] >= 400:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
                    lingers = message["status"] != 408  # nothing comes there
            elif lingers and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _read_rest(receive)
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive_noting, send_lingering)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _read_rest(receive: Receive) -> None:
    """Until the body ends, its client leaves, or one of the limits is reached."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            is_unread = True
            while is_unread:
                async with asyncio.timeout(_LINGER_PAUSE):
                    is_unread = (await receive()).get("more_body", False)
