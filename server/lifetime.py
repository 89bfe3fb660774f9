"""What every HTTP process does with signals, and how it comes to its exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class Lifetime:
    """Lasts until the first `finish`. To be made in the running event loop.

    outcome: the exit status, once it is known.
    drain: called with the name of the first SIGINT or SIGTERM; the process ends with status 0 when it returns, or at
        once with 128 + number at a second signal.
    """

    def __init__(self, drain: Callable[[str], Awaitable[None]]) -> None:
        self.outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.outcome.done()

    def finish(self, status: int) -> None:
        """Without effect once it is over."""
        if not self.outcome.done():
            self.outcome.set_result(status)

    def take_signals(self) -> None:
        """Until this is called they do what they did before."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def depend_on(self, serving: asyncio.Task[None]) -> None:
        """The HTTP server is not to end first."""
        serving.add_done_callback(self._on_http_end)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s: stopping at once", name)
            self.finish(128 + number)
            return
        self._draining = asyncio.create_task(self._finish_orderly(name))

    async def _finish_orderly(self, name: str) -> None:
        await self._drain(name)
        self.finish(0)

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        if not self.outcome.done():
            logger.error("the HTTP server ended unexpectedly", exc_info=serving.exception())
            self.finish(1)
