"""A server of this repository for the time of a measurement."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LAUNCH = Path(__file__).resolve().parent.parent / "launch.py"
_END_TIMEOUT = 60.0


@dataclass(frozen=True)
class RunningServer:
    """pid: of the API process."""

    url: str
    pid: int


@contextmanager
def running_server(words: list[str]) -> Iterator[RunningServer]:
    """A server started with these arguments, once it is ready. RuntimeError when it ends instead."""
    command = [sys.executable, str(_LAUNCH), "--port", "0", "--log-level", "warning", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.match(r"Lockstep is ready: .* at (http://\S+)", line):
                yield RunningServer(match.group(1), process.pid)
                return
        raise RuntimeError(f"the server ended with {process.wait()}: {' '.join(command)}")
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
