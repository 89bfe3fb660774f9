"""Control messages between prefill (P) and decode (D) ranks, and the connection that carries them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from disagg.description import KVDescription

logger = logging.getLogger(__name__)


class Memory(msgspec.Struct, frozen=True):
    """Where a rank's regions begin."""

    kv_data_ptrs: list[int]
    state_data_ptrs: list[list[int]]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """D to P, first on a connection: who D is and how P's mover reaches D's memory.

    incarnation: the start of the prefill server that D looked up.
    group: common to the TP ranks of one decode server's start (and DP rank), which ask for a room together.
    memory: only with one-sided backends.
    """

    backend: str
    description: KVDescription
    incarnation: str
    group: str
    host: str
    endpoint: bytes
    memory: Memory | None


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """P to D: the mover's session stands."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """P to D, then P closes. unfit: as in KVTransferError."""

    reason: str
    unfit: bool = False


class Lost(msgspec.Struct, tag=True, frozen=True):
    """P to D: P cannot write any more. The connection ends when nothing that P has begun moves, which may take long."""

    reason: str


class Claim(msgspec.Struct, tag=True, frozen=True):
    """D to P: D lives and will send indices for this room, however long its memory takes."""

    room: int
    transfer_id: int


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """P to D: the request has arrived at P too; however long P's queue is, it ends with Done or Failure."""

    transfer_id: int


class TransferInfo(msgspec.Struct, tag=True, frozen=True):
    """D to P: how many items of each kind P is to send.

    skip_pages: pages of the prompt that D has.
    items: with one-sided backends where they go, int64 bytes, the KV pages first; otherwise that stays with D.
    """

    room: int
    transfer_id: int
    num_pages: int
    num_state_items: list[int]
    skip_pages: int
    items: list[bytes]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """D to P: stop; the transfer has failed. P answers with Stopped."""

    room: int
    transfer_id: int
    reason: str


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """P to D: no byte of the transfer moves any more and none will."""

    transfer_id: int


class Failure(msgspec.Struct, tag=True, frozen=True):
    """P to D: the transfer will not be completed."""

    transfer_id: int
    reason: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """P to D: the first bytes are on their way."""

    transfer_id: int


class JobChecksum(msgspec.Struct, frozen=True):
    """CRC-32 of num_items items of a component (as in Job), from item_start of the decode side's list on."""

    component: int
    item_start: int
    num_items: int
    value: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """P to D: the last byte was sent; `aux_row` is to be written, and `note` kept, once all are in.

    checksums: of every job; with one-sided backends, if P was told to make them.
    """

    transfer_id: int
    aux_row: bytes
    note: bytes
    checksums: list[JobChecksum] = []


class Received(msgspec.Struct, tag=True, frozen=True):
    """D to P: everything lies in D's memory."""

    room: int
    transfer_id: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Either way, when nothing else was said for a while."""


Message = (
    Hello
    | Welcome
    | Refused
    | Lost
    | Claim
    | Accepted
    | TransferInfo
    | Abort
    | Stopped
    | Failure
    | Started
    | Done
    | Received
    | Ping
)

_LENGTH = struct.Struct("<I")
MAX_MESSAGE = 64 << 20
_ACCEPT_PAUSE = 0.2


class _PeerClosed(Exception):
    pass


class ControlLink:
    """One control connection with a thread of its own. send() never blocks; callbacks run in the link's thread.

    `on_close` is called exactly once, with the reason and whether the peer itself ended the connection: its process has
    then ended or has given the connection up, while a silent peer may yet go on with what it was doing. With
    `watch_end` the owner learns from peer_ended() when it has ended after all.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_message: Callable[[ControlLink, Message], None],
        on_close: Callable[[ControlLink, str, bool], None],
        heartbeat_interval: float,
        heartbeat_failures: int,
        watch_end: bool = False,
    ) -> None:
        sock.setblocking(False)
        # Two small messages in a row would otherwise wait for the peer's delayed acknowledgement, 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        self._linger = False
        self._watch_end = watch_end
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

    def close(self, reason: str, linger: bool = False) -> None:
        """Ask the thread to end the link after what is queued has been offered to the socket once.

        With `linger` messages are still taken until the peer has closed its side too.
        """
        with self._lock:
            if not self._ended:
                self._close_reason = self._close_reason or reason
                self._linger = linger
                os.eventfd_write(self._wake, 1)

    def join(self, timeout: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        ended_by_peer = False
        try:
            reason = self._loop()
        except _PeerClosed as closed:
            reason, ended_by_peer = self._close_reason or str(closed), True
        except (OSError, msgspec.DecodeError) as error:
            reason = f"connection to {self.name} failed: {error}"
            ended_by_peer = isinstance(error, (ConnectionResetError, BrokenPipeError))
        except Exception as error:  # whatever it is, nobody may wait for messages of a thread that has gone
            logger.exception("handling a message of %s", self.name)
            reason = f"a message of {self.name} could not be handled: {error}"
        with self._lock:
            self._ended = True
            os.close(self._wake)
        # The peer takes the end of the connection as a sign that nothing of ours moves any more.
        try:
            self._on_close(self, reason, ended_by_peer)
        finally:
            if ended_by_peer or not self._watch_end:
                close_socket(self._sock)
            else:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)

    def peer_ended(self) -> bool:
        """After on_close without the peer's doing: whether the peer has closed its side since, or its host is gone."""
        try:
            while self._sock.recv(1 << 18):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        close_socket(self._sock)
        return True

    def _loop(self) -> str:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        received = bytearray()
        sending = b""
        last_heard = last_said = time.monotonic()
        said_goodbye = False
        while True:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if sending else 0))
            now = time.monotonic()
            wait = max(0.0, min(last_said + self._interval, last_heard + self._silence_limit) - now)
            events = dict(poller.poll(wait * 1000 + 1))
            late = time.monotonic() - now - wait
            now += wait + late
            if late > self._interval:
                # This process was stopped, perhaps with its whole host: the peer's silence meanwhile says nothing.
                last_heard += late
            if self._wake in events:
                os.eventfd_read(self._wake)
            if events.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                data = self._sock.recv(1 << 18)
                if not data:
                    raise _PeerClosed(f"connection closed by {self.name}")
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
                close_reason, linger = self._close_reason, self._linger
            if said_goodbye:
                sending = b""
            if sending:
                try:
                    sent = self._sock.send(sending)
                except BlockingIOError:
                    sent = 0
                sending = sending[sent:]
                last_said = now if sent else last_said
            if close_reason is not None and not linger:
                return close_reason
            if close_reason is not None and not sending and not said_goodbye:
                said_goodbye = True
                self._sock.shutdown(socket.SHUT_WR)

    def _readable(self) -> bool:
        """Asked before a peer is taken for dead: this process itself may have been stopped for a while."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(0))

    def _deliver(self, received: bytearray) -> None:
        while len(received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received)
            if length > MAX_MESSAGE:
                raise ConnectionError(f"control message of {length} bytes, the limit is {MAX_MESSAGE}")
            end = _LENGTH.size + length
            if len(received) < end:
                return
            message = self._decoder.decode(received[_LENGTH.size : end])
            del received[:end]
            self._on_message(self, message)


def pause_unless_closed(error: OSError) -> bool:
    """After accept() has failed: True if the listener was closed. Anything else, such as no descriptors being left, may
    pass: False, some time later."""
    if error.errno in (None, errno.EBADF, errno.EINVAL):
        return True
    logger.warning("a connection was not accepted: %s", error)
    time.sleep(_ACCEPT_PAUSE)
    return False


def keep_alive(sock: socket.socket, timeout: float) -> None:
    """Have the connection end with an error once the peer's host has not answered for about `timeout` seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(timeout / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timeout / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout * 1000))


def close_socket(sock: socket.socket) -> None:
    """Shut down first: that wakes a thread blocked on the socket, closing alone does not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
