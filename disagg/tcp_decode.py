"""Decode mover of the tcp backend: reads frames straight into this rank's memory.

Only threads of this process write the memory, so once a transfer is shut here its pages are free at once; no
acknowledgement from the prefill side is needed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.base import KVArgs, TransferOptions
from disagg.checksum import checksum_differs
from disagg.control import close_socket, pause_unless_closed
from disagg.mover import KV_PAGES, DecodeEvents, Destination
from disagg.tcp_memory import FrameMemory, FramePart, frame_memory, frame_part
from disagg.tcp_transport import (
    TOKEN_BYTES,
    BulkListener,
    Endpoint,
    FrameHeader,
    FrameReader,
    Opening,
    host_identity,
    read_opening,
)

if TYPE_CHECKING:
    from disagg.tcp_device import RemoteDevice

_TOKEN_TIMEOUT = 5.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Reader:
    """One bulk connection. `lock` is held while bytes go into memory."""

    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class _Peer:
    """One prefill rank, known by its token."""

    peer_id: int
    token: bytes
    readers: list[_Reader] = field(default_factory=list)


class _Part:
    """What one prefill rank sends of one transfer."""

    def __init__(self, peer: _Peer, destination: Destination) -> None:
        self.peer = peer
        self.destination = destination
        self.bytes_left = destination.num_bytes
        self.shut = False


class TcpDecode:
    """See DecodeMover."""

    one_sided = False

    def __init__(self, kv_args: KVArgs, options: TransferOptions, events: DecodeEvents) -> None:
        self._args = kv_args
        self._events = events
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._parts: dict[int, dict[int, _Part]] = {}
        self._threads: set[threading.Thread] = set()
        self._identity = host_identity() if options.same_host_path else ""
        self._listener = BulkListener(options.host, f"lockstep-kv-{secrets.token_hex(8)}" if self._identity else None)
        self.bulk_address = (options.host, self._listener.port)
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._listener.close()
        self._acceptor.join(5)
        with self._lock:
            peers, threads = list(self._peers), list(self._threads)
        for peer_id in peers:
            self.forget(peer_id)
        for thread in threads:
            thread.join(5)

    def endpoint(self, peer_id: int) -> bytes:
        peer = _Peer(peer_id, secrets.token_bytes(TOKEN_BYTES))
        with self._lock:
            self._peers[peer_id] = peer
        host, port = self.bulk_address
        return Endpoint(host, port, self._listener.unix_name, self._identity, peer.token).pack()

    def joined(self, peer_id: int) -> None:
        """Its connections have told by themselves."""

    def expect(self, peer_id: int, transfer_id: int, destination: Destination) -> None:
        with self._lock:
            peer = self._peers.get(peer_id)
            if peer is not None:
                self._parts.setdefault(transfer_id, {})[peer_id] = _Part(peer, destination)

    def complete(self, peer_id: int, transfer_id: int) -> bool:
        part = self._find(peer_id, transfer_id)
        return part is not None and part.bytes_left == 0

    def shut(self, transfer_id: int) -> None:
        with self._lock:
            parts = list(self._parts.get(transfer_id, {}).values())
            readers = [reader for part in parts for reader in part.peer.readers]
        for part in parts:
            part.shut = True
        for reader in readers:
            # Whoever is in a read now leaves it before we get the lock, and sees `shut` before the next.
            with reader.lock:
                pass

    def release(self, transfer_id: int) -> None:
        with self._lock:
            self._parts.pop(transfer_id, None)

    def forget(self, peer_id: int) -> bool:
        with self._lock:
            peer = self._peers.pop(peer_id, None)
            readers = list(peer.readers) if peer is not None else []
        for reader in readers:
            close_socket(reader.sock)
        return True

    def _find(self, peer_id: int, transfer_id: int) -> _Part | None:
        with self._lock:
            return self._parts.get(transfer_id, {}).get(peer_id)

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()
            except OSError as error:
                if pause_unless_closed(error):
                    return
                continue
            thread = threading.Thread(target=self._receive, args=(sock,), name="kv-receive", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _receive(self, sock: socket.socket) -> None:
        """One bulk connection, from its token to its end."""
        peer, remote = None, None
        reader = _Reader(sock)
        try:
            sock.settimeout(_TOKEN_TIMEOUT)
            opening = read_opening(sock)
            with self._lock:
                peer = next(
                    (peer for peer in self._peers.values() if secrets.compare_digest(peer.token, opening.token)), None
                )
                if peer is not None:
                    peer.readers.append(reader)
            if peer is not None:
                remote = self._take_offer(opening)
                stream = FrameReader(sock)
                stream.start(opening, remote is not None)
                self._receive_frames(peer, reader, stream, remote)
        except Exception as error:  # whatever it is, rooms must not wait for a reader that has gone
            if peer is not None:
                self._events.lost(peer.peer_id, f"bulk connection failed: {error}")
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if peer is not None:
                    with contextlib.suppress(ValueError):
                        peer.readers.remove(reader)
            close_socket(sock)
            if remote is not None:
                remote.close()

    def _take_offer(self, opening: Opening) -> RemoteDevice | None:
        if not opening.offer or self._args.device == "cpu":
            return None
        from disagg.tcp_device import RemoteDevice

        try:
            return RemoteDevice(opening.offer, self._args.device)
        except OSError as error:
            logger.warning("device memory of a prefill rank on this host comes through the host: %s", error)
            return None

    def _receive_frames(self, peer: _Peer, reader: _Reader, stream: FrameReader, remote: RemoteDevice | None) -> None:
        memory = frame_memory(self._args.device)
        while True:
            header = stream.next_header()
            part = self._find(peer.peer_id, header.transfer_id)
            if part is None:
                stream.end_frame(header.num_bytes)
                continue
            frame = self._frame(part, header)
            if remote is not None and stream.source_items is not None:
                with reader.lock:
                    wanted = not part.shut
                    if wanted:
                        remote.fetch(header, stream.source_items, frame)
                stream.end_frame(0)
            else:
                wanted = self._receive_bytes(part, reader, stream, memory, header, frame)
            if wanted:
                with self._lock:
                    part.bytes_left -= header.num_bytes
                    everything = part.bytes_left == 0
                if everything:
                    self._events.arrived(peer.peer_id, header.transfer_id)

    def _receive_bytes(
        self,
        part: _Part,
        reader: _Reader,
        stream: FrameReader,
        memory: FrameMemory,
        header: FrameHeader,
        frame: FramePart,
    ) -> bool:
        """Whether the frame is in its place; not if its transfer has ended or the bytes are not what was sent."""
        pieces = memory.incoming(frame)
        while pieces.remaining:
            with reader.lock:
                if part.shut:
                    break
                moved = stream.read_some(pieces)
            if not moved:
                stream.wait()
        stream.end_frame(pieces.remaining)
        if pieces.remaining:
            return False
        if header.has_checksum:
            found = memory.incoming(frame).checksum()
            if found != header.checksum:
                self._events.failed(header.transfer_id, checksum_differs(found, header.checksum))
                return False
        with reader.lock:
            if not part.shut:
                memory.place(frame)
        return not part.shut

    def _frame(self, part: _Part, header: FrameHeader) -> FramePart:
        """Where the frame goes, from this side's own index lists."""
        if not KV_PAGES <= header.component < len(self._args.state):
            raise ConnectionError(f"frame for state component {header.component}, there are {len(self._args.state)}")
        destination = part.destination
        items = destination.items[header.component + 1][header.item_start : header.item_start + header.num_items]
        frame = frame_part(self._args, header, items, destination.slices[header.component + 1])
        if frame.num_bytes != header.num_bytes:
            raise ConnectionError(f"frame of {header.num_bytes} bytes for memory of {frame.num_bytes}")
        return frame
