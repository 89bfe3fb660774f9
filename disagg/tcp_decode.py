"""Decode mover of the tcp backend: reads frames straight into this rank's memory.

Only threads of this process write the memory, so once a transfer is shut here its pages are free at once; no
acknowledgement from the prefill side is needed.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from dataclasses import dataclass, field

from disagg.base import KVArgs, TransferOptions
from disagg.control import close_socket
from disagg.mover import KV_PAGES, DecodeEvents, Destination
from disagg.pages import sliced_address_list
from disagg.tcp_transport import (
    TOKEN_BYTES,
    BulkListener,
    Endpoint,
    FrameHeader,
    FrameReader,
    ScatterList,
    host_identity,
    read_opening,
)

_TOKEN_TIMEOUT = 5.0


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
            except OSError:
                return
            thread = threading.Thread(target=self._receive, args=(sock,), name="kv-receive", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _receive(self, sock: socket.socket) -> None:
        """One bulk connection, from its token to its end."""
        peer = None
        reader = _Reader(sock)
        try:
            sock.settimeout(_TOKEN_TIMEOUT)
            token, probe = read_opening(sock)
            with self._lock:
                peer = next((peer for peer in self._peers.values() if secrets.compare_digest(peer.token, token)), None)
                if peer is not None:
                    peer.readers.append(reader)
            if peer is not None:
                stream = FrameReader(sock)
                stream.start(token, probe)
                self._receive_frames(peer, reader, stream)
        except (OSError, ValueError) as error:
            if peer is not None:
                self._events.lost(peer.peer_id, f"bulk connection failed: {error}")
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if peer is not None:
                    with contextlib.suppress(ValueError):
                        peer.readers.remove(reader)
            close_socket(sock)

    def _receive_frames(self, peer: _Peer, reader: _Reader, stream: FrameReader) -> None:
        while True:
            header = stream.next_header()
            part = self._find(peer.peer_id, header.transfer_id)
            if part is None:
                stream.end_frame(header.num_bytes)
                continue
            pieces = self._pieces(part, header)
            while pieces.remaining:
                with reader.lock:
                    if part.shut:
                        break
                    moved = stream.read_some(pieces)
                if not moved:
                    stream.wait()
            stream.end_frame(pieces.remaining)
            if pieces.remaining:
                continue
            if header.has_checksum:
                found = self._pieces(part, header).checksum()
                if found != header.checksum:
                    self._events.failed(
                        header.transfer_id,
                        f"checksum {found:#010x} of the received bytes, sent {header.checksum:#010x}",
                    )
                    continue
            with self._lock:
                part.bytes_left -= header.num_bytes
                everything = part.bytes_left == 0
            if everything:
                self._events.arrived(peer.peer_id, header.transfer_id)

    def _pieces(self, part: _Part, header: FrameHeader) -> ScatterList:
        """Where the frame goes, from this side's own index lists."""
        if header.component == KV_PAGES:
            ptrs, item_lens = self._args.kv_data_ptrs, self._args.kv_item_lens
        elif 0 <= header.component < len(self._args.state):
            component = self._args.state[header.component]
            ptrs, item_lens = component.data_ptrs, component.item_lens
        else:
            raise ConnectionError(f"frame for state component {header.component}, there are {len(self._args.state)}")
        regions = slice(header.region_start, header.region_start + header.num_regions)
        slices = part.destination.slices[header.component + 1].regions(regions)
        items = part.destination.items[header.component + 1]
        items = items[header.item_start : header.item_start + header.num_items]
        pieces = ScatterList(
            *sliced_address_list(
                ptrs[regions], item_lens[regions], items, slices.rows, slices.target_offsets_R, slices.lengths_R
            )
        )
        if pieces.num_bytes != header.num_bytes:
            raise ConnectionError(f"frame of {header.num_bytes} bytes for memory of {pieces.num_bytes}")
        return pieces
