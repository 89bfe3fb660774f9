"""A step that hangs is reported and ends its process."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from tempfile import TemporaryFile

# Between a report and the end of its process. The ranks of an engine are in a step together, but what they wait in
# fails as soon as one of them ends: they get so long to say where they are.
_GRACE = 1.5


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
            started = self._step_started
            left = self._timeout if started is None else started + self._timeout - time.monotonic()
            if left <= 0:
                try:
                    self._report()
                    time.sleep(_GRACE)
                finally:
                    os._exit(1)
            # To the moment, so that the ranks of a step report together.
            time.sleep(min(1.0, self._timeout / 4, left))

    def _report(self) -> None:
        name = f"rank {self._rank}"
        with TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            stacks.seek(0)
            # In one piece, and each line with its rank: others write to the same place now.
            sys.stderr.write(
                f"error: {name}: step {self.steps} has taken more than --watchdog-timeout {self._timeout:g} s and is "
                f"at {self._phase()}\n" + "".join(f"{name}: {line}" for line in stacks)
            )
        sys.stderr.flush()
