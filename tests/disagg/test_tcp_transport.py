"""Frames over one bulk connection, as a stream and by reading the sender's memory."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from disagg.tcp_transport import (
    TOKEN_BYTES,
    BulkListener,
    FrameHeader,
    FrameReader,
    FrameWriter,
    Opening,
    ScatterList,
    connect_bulk,
    read_opening,
)

pytestmark = pytest.mark.timeout(120)
TOKEN = bytes(range(TOKEN_BYTES))


def scattered(memory: np.ndarray, starts: np.ndarray, length: int) -> ScatterList:
    addresses = (memory.ctypes.data + starts).astype(np.uint64)
    return ScatterList(addresses, np.full(len(starts), length, dtype=np.uint64))


def connected(unix: bool) -> tuple[socket.socket, socket.socket]:
    if unix:
        return socket.socketpair(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def exchange(unix: bool, pieces: ScatterList, target: ScatterList, wanted: bool = True) -> tuple[bool, FrameHeader]:
    """One frame through a pair of sockets; whether it was pulled, and its header as it came."""
    left, right = connected(unix)
    with left, right:
        pulled = []

        def send() -> None:
            writer = FrameWriter(left, TOKEN, 60)
            pulled.append(writer.pulled)
            writer.send(FrameHeader(7, pieces.num_bytes, -1, 0, 1, 0, 1, 0, 0), pieces)

        thread = threading.Thread(target=send)
        thread.start()
        right.settimeout(60)
        opening = read_opening(right)
        reader = FrameReader(right)
        reader.start(opening)
        header = reader.next_header()
        while wanted and target.remaining:
            if not reader.read_some(target):
                reader.wait()
        reader.end_frame(target.remaining)
        thread.join()
        return pulled[0], header


@pytest.mark.parametrize("unix", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_frames_of_many_pieces_arrive_or_are_thrown_away(unix: bool, wanted: bool) -> None:
    """More pieces than one call takes, cut differently on both sides."""
    rng = np.random.default_rng(2)
    source, target = rng.integers(1, 256, 1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    sources, targets = rng.permutation(5000) * 96, rng.permutation(2500) * 192
    pulled, header = exchange(unix, scattered(source, sources, 96), scattered(target, targets, 192), wanted)
    assert pulled is unix
    assert header.num_pieces == (5000 if unix else 0)
    if not wanted:
        assert not target.any()
        return
    have = np.concatenate([target[start : start + 192] for start in targets])
    want = np.concatenate([source[start : start + 96] for start in sources])
    np.testing.assert_array_equal(have, want)
    assert np.count_nonzero(target) == 5000 * 96


def test_memory_is_not_read_unless_it_holds_the_token() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        right.settimeout(60)
        other = ctypes.create_string_buffer(b"something else!!", TOKEN_BYTES)
        for probe in (ctypes.addressof(other), 8, 0):
            left.sendall(struct.pack(f"<{TOKEN_BYTES}sQI", TOKEN, probe, 0))
            FrameReader(right).start(read_opening(right))
            assert left.recv(1) == b"S"
            right.settimeout(60)


def test_offered_memory_is_refused_where_bytes_were_asked_for() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        reader = FrameReader(right)
        reader.start(Opening(TOKEN, 0, b""))
        left.sendall(FrameHeader(7, 16, -1, 0, 1, 0, 1, 0, 0, num_pieces=1).pack() + bytes(16))
        with pytest.raises(ConnectionError, match="unasked"):
            reader.next_header()
        left.sendall(bytes(16) + b"x" * 60)
        with pytest.raises(ConnectionError, match="out of step"):
            reader.next_header()


def test_checksum_is_that_of_the_bytes_in_order() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
    starts = np.random.default_rng(2).permutation(2900) * 1024
    pieces = scattered(memory, starts, 1000)
    want = zlib.crc32(b"".join(memory[start : start + 1000].tobytes() for start in starts))
    assert pieces.checksum() == want
    assert pieces.remaining == 2_900_000
    assert scattered(memory, starts[:0], 1000).checksum() == 0


def test_listens_on_ipv6_addresses() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    listener = BulkListener("::1", None)
    try:
        with connect_bulk("::1", listener.port, "", 60) as sock:
            assert sock.family == socket.AF_INET6
            listener.accept().close()
    finally:
        listener.close()
