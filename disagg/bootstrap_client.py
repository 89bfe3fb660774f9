"""The client of a prefill server's bootstrap server, and what the two say to each other."""

from __future__ import annotations

import contextlib
import http.client
import random
import time
from typing import Any

import msgspec

from disagg.description import KVDescription

# A request with this bootstrap host takes the fake path on a server of any backend.
FAKE_BOOTSTRAP_HOST = "2.2.2.2"


class Registration(msgspec.Struct, frozen=True):
    """One prefill rank. `incarnation` is common to the ranks of one start of a server and new at each start."""

    incarnation: str
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    host: str
    port: int
    description: KVDescription


class Route(msgspec.Struct, frozen=True):
    """A prefill rank as a decode rank sees it."""

    dp_size: int
    tp_size: int
    registration: Registration


class BootstrapNotReady(Exception):
    """The server cannot be reached or not all prefill ranks have registered; trying again may help."""


class BootstrapUnreachable(BootstrapNotReady):
    """Nothing answers there."""


class BootstrapRefused(Exception):
    """The server refused with a reason; trying again does not help."""


class BootstrapClient:
    """Each call opens one connection and blocks for at most `timeout` seconds. Not for the scheduler's thread."""

    def __init__(self, address: str, timeout: float = 5.0) -> None:
        self.address = address
        self._timeout = timeout

    def route(self, dp_rank: int, tp_rank: int) -> Route:
        body = self._call("GET", f"/route?dp_rank={dp_rank}&tp_rank={tp_rank}")
        try:
            return msgspec.json.decode(body, type=Route)
        except msgspec.DecodeError as error:
            raise BootstrapRefused(f"bootstrap server {self.address} gives a route we cannot read: {error}") from error

    def register(self, registration: Registration, patience: float) -> None:
        """Retry with growing, jittered pauses for `patience` seconds while the server is not there.

        Raises BootstrapNotReady then: a prefill rank that nobody can find must not look healthy.
        """
        end = time.monotonic() + patience
        pause = 0.05
        while True:
            try:
                self._call("PUT", "/route", msgspec.json.encode(registration))
                return
            except BootstrapNotReady:
                if time.monotonic() + pause > end:
                    raise
                time.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, 2.0)

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        host, _, port = self.address.rpartition(":")
        try:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=self._timeout)
        except (ValueError, http.client.InvalidURL) as error:
            raise BootstrapRefused(f"bootstrap address must be host:port, got {self.address!r}") from error
        with contextlib.closing(connection):
            try:
                connection.request(method, path, body)
                response = connection.getresponse()
                content = response.read()
            except UnicodeError as error:
                raise BootstrapRefused(f"bootstrap address {self.address!r} has no host name: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                raise BootstrapUnreachable(f"bootstrap server {self.address} does not answer: {error}") from error
        if response.status == 200:
            return content
        try:
            reason = msgspec.json.decode(content, type=dict[str, Any]).get("error", "")
        except msgspec.DecodeError:
            reason = content[:200].decode(errors="replace")
        message = f"bootstrap server {self.address} answers {response.status}: {reason}"
        raise BootstrapNotReady(message) if response.status == 503 else BootstrapRefused(message)
