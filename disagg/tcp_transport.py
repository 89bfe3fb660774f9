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
import numpy.typing as npt

from disagg.base import Indices
from disagg.control import close_socket
from disagg.pages import Addresses

_libc = ctypes.CDLL(None, use_errno=True)
_libc.readv.argtypes = _libc.writev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.readv.restype = _libc.writev.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_IOV_MAX = 1024
_BUFFER_BYTES = 4 << 20
_CHECKSUM_BYTES = 1 << 20
_DISCARD = memoryview(bytearray(1 << 20))

# A bulk connection starts with the token its receiver gave out, so that nobody else can write there.
TOKEN_BYTES = 16

_OPENING = struct.Struct(f"<{TOKEN_BYTES}sQI")
_MAX_OFFER = 4 << 20
_STREAM, _PULL, _DEVICE, _TAKEN = b"S", b"P", b"D", b"T"


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
    num_pieces: 0 if the bytes follow; else a table of that many addresses and lengths in the sender's memory follows.
    from_device: the sender's item indices follow, and the bytes are read from its device memory.
    """

    transfer_id: int
    num_bytes: int
    component: int
    region_start: int
    num_regions: int
    item_start: int
    num_items: int
    has_checksum: int = 0
    checksum: int = 0
    num_pieces: int = 0
    from_device: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes) -> FrameHeader:
        magic, *fields = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ConnectionError(f"bulk stream out of step: frame starts with {magic:#x}, expected {_MAGIC:#x}")
        return cls(*fields)


_MAGIC = 0x4C53_4B56
_HEADER = struct.Struct("<IQQiIIIIBIIB")
HEADER_BYTES = _HEADER.size


class ScatterList:
    """Memory pieces in stream order, with a position."""

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        self._iov = np.ascontiguousarray(np.stack((addresses, lengths), axis=1))
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._next = 0
        self._done = 0
        self.num_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @classmethod
    def whole(cls, address: int, num_bytes: int) -> ScatterList:
        """One piece."""
        return cls(np.array([address], dtype=np.uint64), np.array([num_bytes], dtype=np.uint64))

    def __len__(self) -> int:
        return len(self._iov)

    @classmethod
    def from_table(cls, table: bytes) -> ScatterList:
        iov = np.frombuffer(table, dtype=np.uint64).reshape(-1, 2)
        return cls(iov[:, 0], iov[:, 1])

    def table(self) -> bytes:
        return self._iov.tobytes()

    @property
    def remaining(self) -> int:
        return self.num_bytes - self._done

    def checksum(self, value: int = 0) -> int:
        """CRC-32 of all pieces in order, after bytes whose CRC-32 is `value`. Call before any byte has moved."""
        source = ScatterList(self._iov[:, 0], self._iov[:, 1])
        buffer = np.empty(min(self.num_bytes, _CHECKSUM_BYTES), dtype=np.uint8)
        while source.remaining:
            part = buffer[: source.remaining]
            target = ScatterList.whole(part.ctypes.data, len(part))
            while target.remaining and source.remaining:
                target.pull(os.getpid(), source)
            value = zlib.crc32(part.data, value)
        return value

    def write(self, sock: socket.socket) -> None:
        """One writev; blocks if the socket does. Raises OSError."""
        self._move(_libc.writev, sock.fileno())

    def read(self, sock: socket.socket) -> bool:
        """One readv of what is there; False if nothing is. Raises ConnectionError at the end of the stream."""
        return self._move(_libc.readv, sock.fileno())

    def pull(self, pid: int, source: ScatterList) -> None:
        """Copy what one call takes from the memory of process `pid` at `source` to here. Raises OSError."""
        here, there = self._window(), source._window()
        moved = _libc.process_vm_readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved <= 0:
            code = ctypes.get_errno() if moved else errno.EFAULT
            raise OSError(code, f"reading memory of process {pid}: {os.strerror(code)}")
        self._advance(moved)
        source._advance(moved)

    def _window(self) -> npt.NDArray[np.uint64]:
        return self._iov[self._next : self._next + _IOV_MAX]

    def _move(self, call: ctypes._NamedFuncPointer, fd: int) -> bool:
        window = self._window()
        moved = call(fd, window.ctypes.data, len(window))
        if moved < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR):
                return False
            raise OSError(code, os.strerror(code))
        if moved == 0 and len(window):
            raise ConnectionError("connection closed by the peer")
        self._advance(moved)
        return True

    def _advance(self, moved: int) -> None:
        self._done += moved
        new_next = int(np.searchsorted(self._ends, self._done, side="right"))
        if new_next < len(self._iov):
            # The piece that was cut: its end stays, its start moves to the stream position.
            left = int(self._ends[new_next]) - self._done
            start = self._iov[new_next]
            start[0] += start[1] - np.uint64(left)
            start[1] = left
        self._next = new_next


class FrameWriter:
    """Prefill side of a bulk connection. `sock` is blocking; another thread ends a stuck call by shutting it down.

    On one host the decode side reads this process's memory itself where it may, which copies once and not twice.
    pulled: it reads host memory. from_device: it reads the device memory that was offered.
    """

    def __init__(self, sock: socket.socket, token: bytes, timeout: float, offer: bytes = b"") -> None:
        """Raises OSError if the decode side does not take the token. `offer` describes device memory."""
        self._sock = sock
        probe = ctypes.create_string_buffer(token, TOKEN_BYTES)
        address = ctypes.addressof(probe) if sock.family == socket.AF_UNIX else 0
        sock.settimeout(timeout)
        sock.sendall(_OPENING.pack(token, address, len(offer)) + offer)
        answer = sock.recv(1)
        if answer not in (_STREAM, _PULL, _DEVICE):
            raise ConnectionError("the decode rank does not take the connection")
        sock.settimeout(None)
        self.pulled = answer == _PULL
        self.from_device = answer == _DEVICE

    def send(self, header: FrameHeader, pieces: ScatterList) -> None:
        """Returns when no byte is read from the pieces any more."""
        if self.pulled:
            self._offer(header._replace(num_pieces=len(pieces)), pieces.table())
            return
        self._sock.sendall(header.pack())
        while pieces.remaining:
            pieces.write(self._sock)

    def send_items(self, header: FrameHeader, items_N: Indices) -> None:
        """As send(), of device memory that the decode side reads."""
        self._offer(header._replace(from_device=1), items_N.tobytes())

    def _offer(self, header: FrameHeader, table: bytes) -> None:
        self._sock.sendall(header.pack() + table)
        if self._sock.recv(1) != _TAKEN:
            raise ConnectionError("connection closed by the peer")


class FrameReader:
    """Decode side of a bulk connection, used from one thread, waiting without using the processor."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._pid = 0
        self._device = False
        self._source: ScatterList | None = None
        self._taken_by_table = False
        self.source_items: Indices | None = None

    def start(self, opening: Opening, device: bool = False) -> None:
        """Answer an opening: say how bytes are to come. `device`: the offer was taken."""
        self._device = device
        if opening.probe and not device:
            self._pid = _readable_process(self._sock, opening.token, opening.probe)
        self._sock.send(_DEVICE if device else _PULL if self._pid else _STREAM)

    def next_header(self) -> FrameHeader:
        header = FrameHeader.unpack(self._exactly(HEADER_BYTES))
        self._source, self.source_items = None, None
        if (header.num_pieces and not self._pid) or (header.from_device and not self._device):
            raise ConnectionError("the peer offers its memory unasked")
        self._taken_by_table = bool(header.num_pieces or header.from_device)
        if header.from_device:
            self.source_items = np.frombuffer(self._exactly(header.num_items * 8), dtype=np.int64)
        if header.num_pieces:
            self._source = ScatterList.from_table(self._exactly(header.num_pieces * 16))
            if self._source.num_bytes != header.num_bytes:
                raise ConnectionError(f"frame of {header.num_bytes} bytes offers {self._source.num_bytes}")
        return header

    def read_some(self, pieces: ScatterList) -> bool:
        """Move bytes of the frame; False if none are there yet."""
        if self._source is None:
            return pieces.read(self._sock)
        pieces.pull(self._pid, self._source)
        return True

    def end_frame(self, left: int) -> None:
        """`left` bytes of the frame are not wanted: of a transfer that has ended."""
        if self._taken_by_table:
            self._sock.send(_TAKEN)
            return
        while left:
            try:
                count = self._sock.recv_into(_DISCARD, min(left, len(_DISCARD)))
            except BlockingIOError:
                self.wait()
                continue
            if not count:
                raise ConnectionError("connection closed by the peer")
            left -= count

    def wait(self) -> None:
        self._poll.poll()

    def _exactly(self, num_bytes: int) -> bytes:
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


class Opening(NamedTuple):
    """How a bulk connection starts. probe: where a copy of the token lies in the sender's memory, 0 for nowhere."""

    token: bytes
    probe: int
    offer: bytes


def read_opening(sock: socket.socket) -> Opening:
    """`sock` has a timeout. Raises OSError."""

    def exactly(num_bytes: int) -> bytes:
        data = sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if len(data) < num_bytes:
            raise ConnectionError("connection closed by the peer")
        return data

    token, probe, offer_bytes = _OPENING.unpack(exactly(_OPENING.size))
    if offer_bytes > _MAX_OFFER:
        raise ConnectionError(f"offer of {offer_bytes} bytes, the limit is {_MAX_OFFER}")
    return Opening(token, probe, exactly(offer_bytes))


def _readable_process(sock: socket.socket, token: bytes, probe: int) -> int:
    """Process id at the other end of a unix socket if this process may read its memory, else 0."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    seen = np.zeros(TOKEN_BYTES, dtype=np.uint8)
    try:
        ScatterList.whole(seen.ctypes.data, TOKEN_BYTES).pull(pid, ScatterList.whole(probe, TOKEN_BYTES))
    except OSError:
        return 0
    return int(pid) if seen.tobytes() == token else 0


class BulkListener:
    """A TCP port and, for peers on the same host, an abstract unix socket."""

    def __init__(self, host: str, unix_name: str | None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.tcp = socket.create_server((host, 0), family=family, backlog=128)
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
        by_fd = {sock.fileno(): sock for sock in self.sockets}
        if -1 in by_fd:
            raise OSError("the listener is closed")
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
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
