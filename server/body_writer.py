"""Writing a streamed body from outside the task that answers the request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Send


class BodyWriter:
    """The next part is sent at once while the client keeps up, and after the earlier ones while it does not.

    An awaited send costs a switch to the task of the request and back, which for a token is more than sending it.
    """

    def __init__(self, send: Send) -> None:
        """send: ASGI's; "http.response.start" has been sent."""
        self._send = send
        self._held: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    def write(self, data: bytes) -> None:
        """Never waits: what cannot be sent now is held."""
        if self._sending is not None:
            self._held.append(data)
            return
        rest = _start(self._send_part(data))
        if rest is not None:
            self._sending = asyncio.create_task(self._send_held(rest))

    async def end(self, data: bytes) -> None:
        """Sends the last part after all others."""
        if self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Nothing held is sent any more."""
        if self._sending is not None:
            self._sending.cancel()

    def _send_part(self, data: bytes) -> Coroutine[Any, Any, None]:
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        assert asyncio.iscoroutine(sending)
        return sending

    async def _send_held(self, rest: Awaitable[None]) -> None:
        await rest
        while self._held:
            data = b"".join(self._held)
            self._held.clear()
            await self._send_part(data)
        self._sending = None


def _start(work: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Runs `work` until it has to wait; returns what is left of it for a task to await, None when it has ended.

    Python has this as `asyncio.eager_task_factory` since 3.12.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return _Rest(work, awaited)


class _Rest:
    """Waits for what `work` waits for, and then does the rest of it."""

    def __init__(self, work: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._work, self._awaited = work, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._awaited
        except BaseException:
            self._work.close()
            raise
        yield from self._work.__await__()
