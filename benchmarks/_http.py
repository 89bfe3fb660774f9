"""An HTTP/1.1 client that does little while answers arrive.

A load generator often shares its machine with the server it measures, and then its own work is counted against the
server. So bytes of an answer are only kept with their times; what they say is looked at when nothing is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

_CONNECT_SECONDS = 30.0


class ConnectionFailed(Exception):
    """No connection, or it ended or turned out not to speak HTTP before the answer was complete."""


@dataclass
class Answer:
    """What has arrived so far.

    status: 0 until the head has arrived. pieces: parts of the body and when each came (seconds of time.perf_counter).
    """

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(len(data) for _, data in self.pieces)


class HTTPClient:
    """As many connections as there are requests under way; each is used again unless `new_connection`."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, new_connection: bool = False) -> None:
        """base_url: scheme, host and port, in ASCII. ValueError for anything else than http and https."""
        url = _split(base_url)
        if url is None or url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url} is not the URL of a server: give one such as http://127.0.0.1:30000")
        self._host, self._tls = url.hostname, url.scheme == "https"
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc.rpartition("@")[2], **headers}
        if new_connection:
            lines["Connection"] = "close"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._reuse = not new_connection
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        """The complete answer. ConnectionFailed."""
        answer = Answer()
        await self._exchange("GET", path, b"", answer)
        return answer

    async def post(self, path: str, body: bytes, answer: Answer) -> None:
        """Fills `answer` as it arrives and returns when it is complete. ConnectionFailed."""
        await self._exchange("POST", path, body, answer)

    def close(self) -> None:
        """Ends the connections that nothing uses."""
        for connection in self._idle:
            connection.end()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, answer: Answer) -> None:
        connection = self._take_idle() or await self._connect()
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        try:
            await connection.exchange(head.encode("latin-1") + body, answer)
        except BaseException:  # the caller may have been cancelled in the middle of an answer
            connection.end()
            raise
        if self._reuse and connection.reusable:
            self._idle.append(connection)
        else:
            connection.end()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=True if self._tls else None
                )
        except TimeoutError:
            raise ConnectionFailed(f"no connection to {self._host}:{self._port} in {_CONNECT_SECONDS:g} s") from None
        except (OSError, UnicodeError) as error:  # the second: a name that DNS cannot hold
            raise ConnectionFailed(f"no connection to {self._host}:{self._port}: {error}") from error
        return connection


def _split(base_url: str) -> SplitResult | None:
    """None for what is no URL, or cannot be sent as it stands."""
    if not base_url.isascii():
        return None
    with contextlib.suppress(ValueError):
        url = urlsplit(base_url)
        if url.port != 0:  # reading the port checks it
            return url
    return None


class _Connection(asyncio.Protocol):
    """One exchange at a time. The parser calls the `on_` methods."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer()
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, though not by inheritance

    async def exchange(self, request: bytes, answer: Answer) -> None:
        assert self._transport is not None
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._ends_with_connection = True
        self.reusable = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def end(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.end()  # nobody asked for this
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._answer.status and self._ends_with_connection and error is None:
            self._complete()
        else:
            self._fail(str(error) if error else "the server closed the connection before the answer was complete")

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length" or (lower == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._answer.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._complete()

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionFailed(reason))
