"""Where decode ranks find prefill ranks: a small HTTP table beside each prefill server.

Ranks use the client alone (disagg/bootstrap_client.py), which loads no web server.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from disagg.base import MAX_ROOM as MAX_ROOM
from disagg.bootstrap_client import FAKE_BOOTSTRAP_HOST as FAKE_BOOTSTRAP_HOST
from disagg.bootstrap_client import Registration, Route

# A registration is a few kilobytes, and comes from a program.
_MAX_REGISTRATION_BYTES = 4 << 20
_REGISTRATION_SECONDS = 10.0


def _http_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off")


class BootstrapServer:
    """Serves in a thread of its own. Port 0 asks the system; `port` is the one in use. OSError where it cannot be had.

    listener: a listening socket to use instead of making one for host and port; it is closed with the server.
    http_config: how the application is served.
    """

    def __init__(
        self,
        host: str,
        port: int,
        listener: socket.socket | None = None,
        http_config: Callable[[FastAPI], uvicorn.Config] = _http_config,
    ) -> None:
        self._table = _Table()
        self._socket = listener or socket.create_server((host, port), backlog=512)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(http_config(_app(self._table)))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="kv-bootstrap", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()


class _Table:
    """Registered ranks of the newest incarnation."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int], Registration] = {}

    def register(self, new: Registration) -> str | None:
        """Returns why the rank is refused, None if it was taken."""
        if not (0 <= new.dp_rank < new.dp_size and 0 <= new.tp_rank < new.tp_size):
            return f"rank dp {new.dp_rank} tp {new.tp_rank} is outside dp_size {new.dp_size} tp_size {new.tp_size}"
        first = next(iter(self.ranks.values()), None)
        if first is not None and first.incarnation != new.incarnation:
            # A restarted server: ranks of both starts must never be handed out together.
            self.ranks.clear()
            first = None
        if first is not None:
            for name in ("dp_size", "tp_size"):
                if getattr(first, name) != getattr(new, name):
                    return (
                        f"{name} differs: this rank has {getattr(new, name)}, "
                        f"an earlier rank of this server has {getattr(first, name)}"
                    )
            shared = ("model", "page_size", "kv_dtype", "kv_layout")
            difference = new.description.difference(
                first.description, "this rank", "an earlier rank of this server", shared
            )
            if difference:
                return difference
        self.ranks[new.dp_rank, new.tp_rank] = new
        return None

    def missing(self) -> int | None:
        """Ranks still to come, None if none has come yet."""
        if not self.ranks:
            return None
        first = next(iter(self.ranks.values()))
        return first.dp_size * first.tp_size - len(self.ranks)


class _Unread(Exception):
    """A body that did not come, or only in part."""


async def _read_registration(request: Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_REGISTRATION_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_REGISTRATION_BYTES:
                    raise _Unread(f"it has more than {_MAX_REGISTRATION_BYTES} bytes")
    except (TimeoutError, ClientDisconnect):
        raise _Unread(f"it does not come: {len(body)} bytes in {_REGISTRATION_SECONDS:g} s") from None
    return body


def _app(table: _Table) -> FastAPI:
    """All handlers run on the one event loop, so the table needs no lock."""
    app = FastAPI(openapi_url=None)

    def answer(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
        return Response(msgspec.json.encode(body), status, headers, media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        return Response("OK")

    @app.put("/route")
    async def register(request: Request) -> Response:
        try:
            registration = msgspec.json.decode(await _read_registration(request), type=Registration)
        except msgspec.DecodeError as error:
            return answer(400, {"error": f"registration: {error}"})
        except _Unread as error:
            return answer(400, {"error": f"registration: {error}"}, {"connection": "close"})
        refusal = table.register(registration)
        return answer(409, {"error": refusal}) if refusal else answer(200, {})

    @app.get("/route")
    async def route(dp_rank: str = "", tp_rank: str = "") -> Response:
        try:
            key = (int(dp_rank), int(tp_rank))
        except ValueError:
            return answer(400, {"error": f"dp_rank and tp_rank must be integers, got {dp_rank!r} and {tp_rank!r}"})
        missing = table.missing()
        if missing is None or missing > 0:
            return answer(503, {"error": f"prefill ranks still to register: {missing or 'all'}"})
        registration = table.ranks.get(key)
        if registration is None:
            first = next(iter(table.ranks.values()))
            return answer(
                404, {"error": f"no prefill rank dp {key[0]} tp {key[1]}: sizes are {first.dp_size}, {first.tp_size}"}
            )
        return answer(200, Route(registration.dp_size, registration.tp_size, registration))

    return app
