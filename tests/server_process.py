"""A real server for a test: `python launch.py` in a process of its own, on a port the system chose."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT = 240.0


class ServerProcess:
    """Started by the constructor; `wait_ready` gives its URL, `stop` ends it whatever state it is in.

    `stdout_lines` holds what it has printed; `stderr()` its log so far.
    """

    def __init__(self, *args: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        """prefix: a command that runs the server, such as `ip netns exec NAME`."""
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.stdout_lines: list[str] = []
        self.url = ""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "launch.py"), "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            env=os.environ | (env or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ranks: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def next_line(self, timeout: float) -> str | None:
        """The next line of standard output, None when it has closed. TimeoutError."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"nothing printed for {timeout} s; log:\n{self.stderr()}") from None
        if line is not None:
            self.stdout_lines.append(line)
        return line

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> str:
        """The server's URL, once it has said that it is ready."""
        deadline = time.monotonic() + timeout
        while True:
            line = self.next_line(max(0.1, deadline - time.monotonic()))
            if line is None:
                raise AssertionError(f"the server ended with {self.process.wait()}; log:\n{self.stderr()}")
            match = re.search(r"^Lockstep is ready: .* at (http://\S+)", line)
            if match:
                self.url = match.group(1)
                self._ranks = self.ranks()
                return self.url

    def ranks(self) -> list[psutil.Process]:
        """Its child processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stderr(self) -> str:
        with open(f"/proc/self/fd/{self._stderr.fileno()}") as file:
            return file.read()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """Exit status."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        """Ends the server at once, and every rank it had."""
        ranks = self._ranks
        if self.process.poll() is None:
            ranks = ranks + self.ranks()
            self.process.kill()
        self.process.wait(60)
        self._reader.join(10)
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        self._stderr.close()


def held_port() -> socket.socket:
    """A socket with a port of 127.0.0.1 that nobody else is given.

    A server can listen there all the same, because this does not listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def wait_until(condition: Callable[[], bool], timeout: float = 60.0, what: str = "the condition holds") -> None:
    """Polls 100 times a second. AssertionError naming `what` when it has not come true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether every process has ended (one that only waits to be reaped has)."""
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)
