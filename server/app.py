"""The ASGI application: routes and their service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from server import http_common, routes_admin, routes_native, routes_openai
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.service import Service
from server.tokenizer import Tokenizer
from server.validation import load_sampling_defaults


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

    http_common.install(app, config.api_key, service.metrics.rejected)
    return app
