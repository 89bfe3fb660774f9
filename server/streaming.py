"""Server-sent events, written to ASGI directly: one send for everything that a step gave to a request."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.body_writer import BodyWriter
from server.errors import CLIENT_GONE, ApiError
from server.generation import Choice, Run

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class EventWriter(Protocol):
    """One API's form of a stream; every method returns whole events, or nothing."""

    def begin(self) -> bytes: ...

    def events(self, choices: Sequence[Choice]) -> bytes:
        """New text, log probabilities and ends of these samples."""

    def end(self) -> bytes:
        """What follows when all samples have ended, before `[DONE]`."""


async def stream(run: Run, writer: EventWriter, interval: int) -> Response:
    """Waits for the first output, so that a request that fails before it gets a real status. Takes over `run`.

    interval: tokens a sample collects before they are sent; the first is sent at once.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(run)
        first = await run.advance()
        stack.pop_all()  # from here on the response ends it
        return _EventStream(run, writer, interval, first)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, run: Run, writer: EventWriter, interval: int, first: Sequence[Choice]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run, self._writer, self._interval = run, writer, interval
        self._opening = writer.begin()
        self._touched = {choice.index: choice for choice in first}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = BodyWriter(send, self._render)
        try:
            with self._run as run:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

                def handle(choices: Sequence[Choice]) -> None:
                    self._touched.update((choice.index, choice) for choice in self._due(choices))
                    # The end of the last sample goes out together with what follows it.
                    if not run.done:
                        body.flush()

                handle(())
                await run.drive(handle)
            await body.end(self._writer.end() + DONE)
        except ApiError as error:
            if error.status != CLIENT_GONE:
                await body.end(b"data: " + error.body() + b"\n\n" + DONE)
        except Exception:
            logger.exception("a stream failed")
            await body.end(b"data: " + ApiError(500, "internal error").body() + b"\n\n" + DONE)
        finally:
            body.close()

    def _render(self) -> bytes:
        """Events of all that has not been sent."""
        opening, self._opening = self._opening, b""
        touched, self._touched = self._touched, {}
        return opening + self._writer.events(list(touched.values()))

    def _due(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        if self._interval == 1:
            return choices
        return [item for item in choices if item.finish_reason is not None or item.num_waiting >= self._interval]
