"""A step that hangs is reported and ends its process; where a process is can also be asked from outside."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from tempfile import TemporaryFile

from scheduler.messages import STATUS_HUNG

# Between a report and the end of its process. The ranks of an engine are in a step together, but what they wait in
# fails as soon as one of them ends: they get so long to say where they are.
_GRACE = 1.5


class Watchdog:
    """Ends the process with STATUS_HUNG, and every thread's stack on standard error, when one step takes longer than
    `timeout` s. SIGUSR1 asks for the same report, in a step or between two, and ends nothing.

    `with watchdog:` is one step. phase: tells what the step is doing, for the report. To be made in the main thread.
    """

    def __init__(self, timeout: float, rank: int, phase: Callable[[], str]) -> None:
        self.steps = 0
        self._phase = phase
        self._timeout = timeout
        self._rank = rank
        self._step_started: float | None = None
        # Signals are told to the thread by a descriptor: the main thread may be in a call that does not return.
        self._asked, told = os.pipe()
        os.set_blocking(self._asked, False)
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.siginterrupt(signal.SIGUSR1, False)
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
                    where = f"has taken more than --watchdog-timeout {self._timeout:g} s and is at {self._phase()}"
                    self._report(where, "error: ")
                    time.sleep(_GRACE)
                finally:
                    os._exit(STATUS_HUNG)
            # To the moment, so that the ranks of a step report together.
            asked, _, _ = select.select([self._asked], [], [], min(1.0, self._timeout / 4, left))
            if asked:
                os.read(self._asked, 1 << 16)
                self._report("has ended" if self._step_started is None else f"is at {self._phase()}")

    def _report(self, where: str, kind: str = "") -> None:
        name = f"rank {self._rank}"
        with TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            stacks.seek(0)
            # In one piece, and each line with its rank: others write to the same place now.
            lines = [f"{kind}{name}: step {self.steps} {where}\n", *(f"{name}: {line}" for line in stacks)]
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
