"""A step that hangs is reported and ends its process."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable


class Watchdog:
    """Ends the process, with every thread's stack on standard error, when one step takes longer than `timeout` s.

    `with watchdog:` is one step. phase: tells what the step is doing, for the report.
    """

    def __init__(self, timeout: float, rank: int, phase: Callable[[], str]) -> None:
        self.steps = 0
        self._phase = phase
        self._timeout = timeout
        self._rank = rank
        self._step_started: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self.steps += 1
        self._step_started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._step_started = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            started = self._step_started
            if started is not None and time.monotonic() - started > self._timeout:
                print(
                    f"error: rank {self._rank}: step {self.steps} has taken more than --watchdog-timeout "
                    f"{self._timeout:g} s and is at {self._phase()}",
                    file=sys.stderr,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(1)
