"""How a KV manager wakes the loop that polls its rooms, and itself at time limits, so that nothing polls in vain."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Wake:
    """An eventfd. notify() makes `fd` readable and does nothing once the wake is closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def notify(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """The number may be given to another file at once, so nobody may write to it afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


_MIN_SWEEP = 1024


class Alarm:
    """A time limit; cancel() drops what it would have called."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Alarms:
    """Calls functions at times, in a thread that sleeps until the next."""

    def __init__(self, name: str) -> None:
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self._sweep_at = _MIN_SWEEP
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after(self, seconds: float, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        with self._changed:
            if len(self._heap) >= self._sweep_at:
                # Most limits are never reached: without this, cancelled ones would pile up until their time.
                self._heap = [entry for entry in self._heap if entry[2].call is not None]
                heapq.heapify(self._heap)
                self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))
            entry = (time.monotonic() + seconds, next(self._order), alarm)
            heapq.heappush(self._heap, entry)
            if self._heap[0] is entry:
                self._changed.notify()
        return alarm

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._heap and self._heap[0][2].call is None:
                    heapq.heappop(self._heap)
                if self._closed:
                    return
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                alarm = heapq.heappop(self._heap)[2]
            call = alarm.call
            if call is not None:
                try:
                    call()
                except Exception:  # whatever it is, the time limits of others must still be kept
                    logger.exception("at a time limit")
