"""What every HTTP process does with signals, and how it comes to its exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

# Who stops a process may signal it and then its whole group, as `timeout` does: repeats within so many seconds are one.
_REPEAT_SECONDS = 0.3


class SignalRepeats:
    """Tells a signal that somebody sent a second time from one that arrives twice.

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted: dict[int, float] = {}

    def is_repeat(self, number: int) -> bool:
        """Whether the signal that has just arrived belongs to the last one of this number that counted."""
        now = self._clock()
        if now - self._counted.get(number, float("-inf")) < _REPEAT_SECONDS:
            return True
        self._counted[number] = now
        return False


class Lifetime:
    """Lasts until the first `finish`. To be made in the running event loop.

    outcome: the exit status, once it is known.
    drain: called with what stops the process, the name of the first SIGINT or SIGTERM; the process ends with status 0
        when it returns, or at once with 128 + number at a second signal.
    has_parent: the process is one of a group, whose parent sends the signals.
    """

    def __init__(self, drain: Callable[[str], Awaitable[None]], *, has_parent: bool = False) -> None:
        self.outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drain = drain
        self._has_parent = has_parent
        self._repeats = SignalRepeats()
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
        if self._repeats.is_repeat(number):
            return
        name = "told by the parent process" if self._has_parent else signal.Signals(number).name
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
