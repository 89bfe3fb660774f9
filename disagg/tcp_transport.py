"""Bulk bytes between scattered memory and a stream socket, without copies in user space and without per-page Python.

An iovec array is an [n, 2] uint64 array of addresses and lengths, so numpy builds it and readv/writev take it as it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import zlib
from typing import NamedTuple

import msgspec
import numpy as np

from disagg.control import close_socket
from disagg.pages import Addresses

_libc = ctypes.CDLL(None, use_errno=True)
_libc.readv.argtypes = _libc.writev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.readv.restype = _libc.writev.restype = ctypes.c_ssize_t
_IOV_MAX = 1024
_BUFFER_BYTES = 4 << 20
_DISCARD = memoryview(bytearray(1 << 20))

TOKEN_BYTES = 16
"""A bulk connection starts with the token its receiver gave out, so that nobody else can write there."""


class Endpoint(msgspec.Struct, frozen=True):
    """How a prefill rank reaches a decode rank's bulk listener, and the token that lets it in."""

    host: str
    port: int
    unix_name: str
    host_identity: str
    token: bytes

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Endpoint:
        return msgspec.msgpack.decode(data, type=cls)


class FrameHeader(NamedTuple):
    """Says which part of a transfer follows: items item_start.. of the index list, in regions region_start.. .

    The receiver finds the addresses from its own lists, so a sender can never name memory outside them.
    """

    transfer_id: int
    num_bytes: int
    component: int
    region_start: int
    num_regions: int
    item_start: int
    num_items: int
    has_checksum: int
    checksum: int

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes) -> FrameHeader:
        magic, *fields = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ConnectionError(f"bulk stream out of step: frame starts with {magic:#x}, expected {_MAGIC:#x}")
        return cls(*fields)


_MAGIC = 0x4C53_4B56
_HEADER = struct.Struct("<IQQiIIIIBI")
HEADER_BYTES = _HEADER.size


class ScatterList:
    """Memory pieces in stream order, with a position."""

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        self._iov = np.ascontiguousarray(np.stack((addresses, lengths), axis=1))
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._next = 0
        self._done = 0
        self.num_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def remaining(self) -> int:
        return self.num_bytes - self._done

    def checksum(self) -> int:
        """CRC-32 of all pieces in order. Call before any byte has moved."""
        value = 0
        for address, length in self._iov.tolist():
            value = zlib.crc32((ctypes.c_char * length).from_address(address), value)
        return value

    def write(self, sock: socket.socket) -> None:
        """One writev; blocks if the socket does. Raises OSError."""
        self._move(_libc.writev, sock.fileno())

    def read(self, sock: socket.socket) -> bool:
        """One readv of what is there; False if nothing is. Raises ConnectionError at the end of the stream."""
        return self._move(_libc.readv, sock.fileno())

    def _move(self, call: ctypes._NamedFuncPointer, fd: int) -> bool:
        count = min(len(self._iov) - self._next, _IOV_MAX)
        moved = call(fd, self._iov[self._next :].ctypes.data, count)
        if moved < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR):
                return False
            raise OSError(code, os.strerror(code))
        if moved == 0 and count:
            raise ConnectionError("connection closed by the peer")
        self._done += moved
        new_next = int(np.searchsorted(self._ends, self._done, side="right"))
        if new_next < len(self._iov):
            # The piece that was cut: its end stays, its start moves to the stream position.
            left = int(self._ends[new_next]) - self._done
            start = self._iov[new_next]
            start[0] += start[1] - np.uint64(left)
            start[1] = left
        self._next = new_next
        return True


def send_frame(sock: socket.socket, header: FrameHeader, pieces: ScatterList) -> None:
    """`sock` is blocking; another thread ends a stuck send by shutting the socket down."""
    sock.sendall(header.pack())
    while pieces.remaining:
        pieces.write(sock)


class FrameReader:
    """Reads a non-blocking bulk socket from one thread, waiting without using the processor."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def wait(self) -> None:
        self._poll.poll()

    def exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self._sock.recv(num_bytes - len(data))
            except BlockingIOError:
                self.wait()
                continue
            if not piece:
                raise ConnectionError("connection closed by the peer")
            data += piece
        return bytes(data)

    def read_some(self, pieces: ScatterList) -> bool:
        return pieces.read(self._sock)

    def discard(self, num_bytes: int) -> None:
        """Read payload of a transfer that has ended, to where nobody looks."""
        while num_bytes:
            try:
                count = self._sock.recv_into(_DISCARD, min(num_bytes, len(_DISCARD)))
            except BlockingIOError:
                self.wait()
                continue
            if not count:
                raise ConnectionError("connection closed by the peer")
            num_bytes -= count


class BulkListener:
    """A TCP port and, for peers on the same host, an abstract unix socket."""

    def __init__(self, host: str, unix_name: str | None) -> None:
        self.tcp = socket.create_server((host, 0), backlog=128)
        self.sockets = [self.tcp]
        self.unix_name = unix_name or ""
        if unix_name:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind("\0" + unix_name)
            unix.listen(128)
            self.sockets.append(unix)

    @property
    def port(self) -> int:
        port: int = self.tcp.getsockname()[1]
        return port

    def accept(self) -> socket.socket:
        """The next connection on any of the sockets. Raises OSError once close() was called."""
        poller = select.poll()
        for sock in self.sockets:
            poller.register(sock, select.POLLIN)
        by_fd = {sock.fileno(): sock for sock in self.sockets}
        while True:
            for fd, _ in poller.poll():
                connection, _ = by_fd[fd].accept()
                tune(connection)
                return connection

    def close(self) -> None:
        for sock in self.sockets:
            close_socket(sock)


def connect_bulk(host: str, port: int, unix_name: str, timeout: float) -> socket.socket:
    """Over the unix socket if a name is given, else TCP; blocking afterwards."""
    if unix_name:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        sock.connect("\0" + unix_name)
    else:
        sock = socket.create_connection((host, port), timeout=timeout)
    tune(sock)
    sock.settimeout(None)
    return sock


def tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def host_identity() -> str:
    """Equal for two processes exactly if an abstract unix socket of one can be reached by the other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
