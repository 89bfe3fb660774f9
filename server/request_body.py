"""Reading of request bodies."""

from __future__ import annotations

import asyncio

from fastapi import Request

from server.errors import CLIENT_GONE, ApiError

# A body that comes more slowly than this for the whole time limit is given up.
MIN_BYTES_PER_SECOND = 1024
# A time limit that was noticed so much later says that this process stood still, not its client.
STOOD_STILL = 1.0


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The body. ApiError 413 when it is too long, 408 when it does not come, CLIENT_GONE when its client leaves.

    limit: bytes it may have. timeout: seconds in which it has to end, or to grow by MIN_BYTES_PER_SECOND for each of
    them; then it has as long again. So a body of any length may come slowly, and none may stand still.
    """
    too_long = ApiError(413, f"the body is longer than {limit} bytes (--max-request-bytes)")
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise too_long
    parts: list[bytes] = []
    length = 0
    now = asyncio.get_running_loop().time
    deadline, wanted = now() + timeout, timeout * MIN_BYTES_PER_SECOND
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                message = await request.receive()
        except TimeoutError:
            if now() - deadline < STOOD_STILL:
                raise _too_slow(length, announced, timeout) from None
            deadline = now() + STOOD_STILL
            continue
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_GONE, "the client closed the connection")
        part = message.get("body", b"")
        length += len(part)
        if length > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        if length >= wanted:
            deadline, wanted = now() + timeout, length + timeout * MIN_BYTES_PER_SECOND


def _too_slow(length: int, announced: str | None, timeout: float) -> ApiError:
    of = "" if announced is None else f" of {announced}"
    return ApiError(
        408,
        f"the body does not come: {length} bytes{of} so far, and less than {MIN_BYTES_PER_SECOND} a second in the "
        f"last {timeout:g} s (--request-read-timeout)",
        code="body_timeout",
    )
