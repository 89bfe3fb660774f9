"""Control messages of the tcp manager and the connection that carries them."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from disagg.bootstrap import KVDescription
from disagg.tcp_transport import close_socket


class Hello(msgspec.Struct, tag=True, frozen=True):
    """D to P, first on a connection: who D is and where P reaches D's memory."""

    description: KVDescription
    incarnation: str
    host: str
    port: int
    unix_name: str
    host_identity: str
    token: bytes


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """P to D: the bulk connections stand."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """P to D, then P closes."""

    reason: str


class Claim(msgspec.Struct, tag=True, frozen=True):
    """D to P: D lives and will send indices for this room, however long its memory takes."""

    room: int
    transfer_id: int


class TransferInfo(msgspec.Struct, tag=True, frozen=True):
    """D to P: how many items of each kind P is to send; where they go stays with D."""

    room: int
    transfer_id: int
    num_pages: int
    num_state_items: list[int]
    skip_pages: int


class Abort(msgspec.Struct, tag=True, frozen=True):
    """D to P: stop; D takes no byte of this transfer any more."""

    room: int
    transfer_id: int
    reason: str


class Failure(msgspec.Struct, tag=True, frozen=True):
    """P to D: the transfer will not be completed."""

    transfer_id: int
    reason: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """P to D: the transfer has `num_frames` frames in all; `aux_row` is written once they are in, `note` kept."""

    transfer_id: int
    prefill_rank: int
    num_frames: int
    aux_row: bytes
    note: bytes


class Received(msgspec.Struct, tag=True, frozen=True):
    """D to P: everything lies in D's memory."""

    room: int
    transfer_id: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Either way, when nothing else was said for a while."""


Message = Hello | Welcome | Refused | Claim | TransferInfo | Abort | Failure | Done | Received | Ping

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE = 64 << 20


class ControlLink:
    """One control connection with a thread of its own. send() never blocks; callbacks run in the link's thread.

    `on_close` is called exactly once, with the reason.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_message: Callable[[ControlLink, Message], None],
        on_close: Callable[[ControlLink, str], None],
        heartbeat_interval: float,
        heartbeat_failures: int,
    ) -> None:
        sock.setblocking(False)
        self.name = name
        self._sock = sock
        self._on_message = on_message
        self._on_close = on_close
        self._interval = heartbeat_interval
        self._silence_limit = heartbeat_interval * heartbeat_failures
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._lock = threading.Lock()
        self._outgoing: deque[bytes] = deque()
        self._close_reason: str | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"kv-control {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; without effect once the link is closed."""
        payload = self._encoder.encode(message)
        with self._lock:
            if not self._ended:
                self._outgoing.append(_LENGTH.pack(len(payload)) + payload)
                os.eventfd_write(self._wake, 1)

    def close(self, reason: str) -> None:
        """Ask the thread to end the link after what is queued has been offered to the socket once."""
        with self._lock:
            if self._close_reason is None and not self._ended:
                self._close_reason = reason
                os.eventfd_write(self._wake, 1)

    def join(self, timeout: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            reason = self._loop()
        except (OSError, msgspec.DecodeError) as error:
            reason = f"connection to {self.name} failed: {error}"
        with self._lock:
            self._ended = True
            os.close(self._wake)
        close_socket(self._sock)
        self._on_close(self, reason)

    def _loop(self) -> str:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        received = bytearray()
        sending = b""
        last_heard = last_said = time.monotonic()
        while True:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if sending else 0))
            now = time.monotonic()
            wait = min(last_said + self._interval, last_heard + self._silence_limit) - now
            events = dict(poller.poll(max(0.0, wait) * 1000 + 1))
            now = time.monotonic()
            if self._wake in events:
                os.eventfd_read(self._wake)
            if events.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                data = self._sock.recv(1 << 18)
                if not data:
                    return f"connection closed by {self.name}"
                last_heard = now
                received += data
                self._deliver(received)
            elif now - last_heard >= self._silence_limit and not self._readable():
                return f"{self.name} has been silent for {self._silence_limit:g} s"
            if now - last_said >= self._interval:
                self.send(Ping())
                last_said = now
            with self._lock:
                sending += b"".join(self._outgoing)
                self._outgoing.clear()
                close_reason = self._close_reason
            if sending:
                try:
                    sent = self._sock.send(sending)
                except BlockingIOError:
                    sent = 0
                sending = sending[sent:]
                last_said = now if sent else last_said
            if close_reason is not None:
                return close_reason

    def _readable(self) -> bool:
        """Asked before a peer is taken for dead: this process itself may have been stopped for a while."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(0))

    def _deliver(self, received: bytearray) -> None:
        while len(received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received)
            if length > _MAX_MESSAGE:
                raise ConnectionError(f"control message of {length} bytes, the limit is {_MAX_MESSAGE}")
            end = _LENGTH.size + length
            if len(received) < end:
                return
            message = self._decoder.decode(received[_LENGTH.size : end])
            del received[:end]
            self._on_message(self, message)
