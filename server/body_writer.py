"""Writing a streamed body from outside the task that answers the request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from starlette.types import Send


class BodyWriter:
    """What there is to say is sent at once while the client keeps up, and all together when it reads again.

    An awaited send costs a switch to the task of the request and back, which for a token is more than sending it.
    """

    def __init__(self, send: Send, render: Callable[[], bytes]) -> None:
        """send: ASGI's; "http.response.start" has been sent. render: all that has not been sent yet, maybe nothing.

        Nothing is rendered for a client that does not read: events that repeat the whole answer would pile up.
        """
        self._send = send
        self._render = render
        self._sending: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Never waits: what cannot be sent now is rendered when it can."""
        if self._sending is None and (data := self._render()):
            rest = _start(self._send_part(data))
            if rest is not None:
                self._sending = asyncio.create_task(self._send_rest(rest))

    async def end(self, tail: bytes) -> None:
        """Sends what is left and `tail` after all else."""
        if self._sending is not None:
            await self._sending
        await self._send({"type": "http.response.body", "body": self._render() + tail, "more_body": False})

    def close(self) -> None:
        """Nothing more is sent."""
        if self._sending is not None:
            self._sending.cancel()

    def _send_part(self, data: bytes) -> Coroutine[Any, Any, None]:
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        assert asyncio.iscoroutine(sending)
        return sending

    async def _send_rest(self, rest: Awaitable[None]) -> None:
        await rest
        while data := self._render():
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
