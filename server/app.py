"""The ASGI application: routes, errors, authorization."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server import routes_admin, routes_native, routes_openai
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.errors import ApiError
from server.service import Service
from server.tokenizer import Tokenizer
from server.validation import load_sampling_defaults

logger = logging.getLogger(__name__)

# Probes and scrapers have no key.
_OPEN_PATHS = frozenset(("/health", "/health_generate", "/ready", "/metrics"))


def create_app(config: ServerConfig, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """The application answers 503 until the ranks are ready, so it can be served before they are.

    Its lifespan starts the client in the serving event loop; closing the client is left to whoever made it.
    """
    service = Service(config, client, tokenizer, load_sampling_defaults(config.engine.model_path))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        client.start()
        yield
        service.close()

    # Bodies are decoded by the endpoints, not declared to FastAPI: a generated schema would be empty of them.
    app = FastAPI(title="Lockstep", lifespan=lifespan, openapi_url=None)
    for routes in (routes_openai, routes_native, routes_admin):
        app.include_router(routes.create_router(service))

    def answer(error: ApiError) -> Response:
        service.metrics.rejected(error.status)
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        return Response(error.body(), error.status, headers, "application/json")

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
    if config.api_key is not None:
        app.add_middleware(_Authorization, key=config.api_key, answer=answer)
    return app


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
