"""HTTP/1.1 on one connection, as uvicorn speaks it, but with bounds on a request's head, and errors in our shape."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.errors import ApiError
from server.request_body import STOOD_STILL

# Bytes that have come of a head that has not ended, or of chunk extensions or trailers without a byte of the body.
_MAX_HEAD = 64 * 1024


class HTTPConfig(uvicorn.Config):
    """read_timeout: seconds in which a head, that is request line and headers, has to come. settings: uvicorn's."""

    def __init__(self, app: Any, *, read_timeout: float, **settings: Any) -> None:
        super().__init__(app, http=HTTPProtocol, **settings)
        self.read_timeout = read_timeout


class HTTPProtocol(HttpToolsProtocol):
    """Closes a connection whose next head is not complete in time, is too long, or cannot be read.

    Time runs from the beginning of the connection, from the end of an answer and from the first byte of a head, but
    never while an answer is made, when nothing may be read. Between two requests uvicorn's own limit is shorter.

    An upgrade to another protocol is an offer that is not taken (RFC 9110 section 7.8): clients that would rather speak
    HTTP/2, as Java's and `curl --http2`, send one with a request whose body and answer are HTTP/1.1.
    """

    def __init__(
        self,
        config: HTTPConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timeout = config.read_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_message = self._is_in_head = False
        self._head_bytes = self._arriving = 0
        self._part = memoryview(b"")  # of what has come, fed to the parser
        self._parts: list[memoryview] = []  # that follow

    @property
    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn has it so
        super().connection_made(transport)
        self._start_timer(self._timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._parts = [memoryview(data)]
        while self._parts and not self.transport.is_closing():
            self._part = self._parts.pop(0)
            self._arriving = len(self._part)
            super().data_received(self._part)  # type: ignore[arg-type] # the parser takes any buffer
            self._check_length()

    def _check_length(self) -> None:
        if self._is_in_message and not self.transport.is_closing():
            self._head_bytes += self._arriving
            if self._head_bytes > _MAX_HEAD:
                what = "headers are" if self._is_in_head else "chunk extensions or trailers are"
                message = f"the {what} longer than {_MAX_HEAD} bytes"
                self._refuse(ApiError(431, message, code="headers_too_long"))

    # Of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_message = self._is_in_head = True
        self._head_bytes = -self._arriving  # what has come with its beginning may belong to the request before it
        if not self._is_answering:
            self._start_timer(self._timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are of no use
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:
            return  # it is read again without the offer
        self._is_in_head = False
        self._head_bytes = -self._arriving
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = -self._arriving
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._is_in_message = False
        super().on_message_complete()

    # Of uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering and not self.transport.is_closing():
            self._start_timer(self._timeout)

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled."""
        error = sys.exception()
        reason = msg if error is None else str(error.__context__ or error)
        self._refuse(ApiError(400, f"this is not an HTTP request: {reason}", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Called while the parser's HttpParserUpgrade is handled, which says how much of the data it has read."""
        error = sys.exception()
        assert error is not None
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self._parts[:0] = [memoryview(head), self._part[error.args[0] :]]

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout, self.loop.time() + seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, deadline: float) -> None:
        if self.loop.time() - deadline >= STOOD_STILL:
            self._start_timer(STOOD_STILL)
        elif self._is_in_head:
            message = f"the headers have not come to their end in {self._timeout:g} s (--request-read-timeout)"
            self._refuse(ApiError(408, message, code="headers_timeout"))
        else:
            self.transport.close()  # nothing has been asked

    def _refuse(self, error: ApiError) -> None:
        """Answers and closes the connection; only closes it where an answer would stand in the middle of another."""
        if not self._is_answering or not (self.pipeline or self.cycle.response_started):
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
