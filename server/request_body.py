"""Reading of request bodies."""

from __future__ import annotations

from fastapi import Request

from server.errors import CLIENT_GONE, ApiError


async def read_body(request: Request, limit: int) -> bytes:
    """The body. limit: bytes it may have. ApiError 413 when it is longer, CLIENT_GONE when its client leaves."""
    too_long = ApiError(413, f"the body is longer than {limit} bytes (--max-request-bytes)")
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise too_long
    parts: list[bytes] = []
    length = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_GONE, "the client closed the connection")
        part = message.get("body", b"")
        length += len(part)
        if length > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
