"""Decode end of the tcp manager: finds prefill ranks and receives pages straight into this rank's memory.

Only threads of this process write the memory, so once a transfer is closed here its pages are free at once; no
acknowledgement from the prefill side is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.base import Indices, KVArgs, KVPoll, KVTransferError, TransferOptions, check_room
from disagg.bootstrap import BootstrapClient, BootstrapNotReady, BootstrapRefused, KVDescription, Route
from disagg.pages import address_list, check_pages
from disagg.rooms import RoomTable
from disagg.tcp_control import (
    Abort,
    Claim,
    ControlLink,
    Done,
    Failure,
    Hello,
    Message,
    Received,
    Refused,
    TransferInfo,
    Welcome,
)
from disagg.tcp_transport import (
    HEADER_BYTES,
    KV_PAGES,
    TOKEN_BYTES,
    BulkListener,
    FrameHeader,
    FrameReader,
    ScatterList,
    close_socket,
    host_identity,
)
from disagg.wake import Wake

_RETRY_INTERVAL = 1.0
_CONNECT_TIMEOUT = 5.0


class _Peer:
    """One prefill rank, from the first look-up until its connection is lost. A later request makes a new one."""

    def __init__(self, bootstrap_addr: str, dp_rank: int) -> None:
        self.bootstrap_addr = bootstrap_addr
        self.dp_rank = dp_rank
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.ready = False
        self.link: ControlLink | None = None
        self.readers: list[_Reader] = []
        self.closed = threading.Event()


@dataclass
class _Reader:
    """One bulk connection. `lock` is held while bytes go into memory."""

    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Incoming:
    """One room. `lock` guards the counts and the metadata row; see DecodeEnd._shut for `closed`."""

    room: int
    transfer_id: int
    created: float
    peer: _Peer | None = None
    published: float | None = None
    pages: Indices | None = None
    state: list[Indices] = field(default_factory=list)
    aux_index: int = 0
    frames_in: int = 0
    done: Done | None = None
    closed: bool = False
    writers_gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class DecodeEnd:
    """State and threads of one decode rank."""

    def __init__(self, kv_args: KVArgs, options: TransferOptions) -> None:
        self._args = kv_args
        self._description = KVDescription.of(kv_args)
        self._options = options
        self._lock = threading.Lock()
        self.wake = Wake()
        self.rooms = RoomTable(options.tombstone_time, on_change=self.wake.notify)
        self._incoming: dict[int, _Incoming] = {}
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._threads: set[threading.Thread] = set()
        # Ids are never used twice, not even by a restarted rank: a late frame must not match a newer transfer.
        self._next_id = itertools.count(secrets.randbits(62))
        identity = host_identity() if options.same_host_path else ""
        self._identity = identity
        self._listener = BulkListener(options.host, f"lockstep-kv-{secrets.token_hex(8)}" if identity else None)
        self.bulk_address = (options.host, self._listener.port)
        self._spawn("kv-accept", self._accept)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            self._drop(peer, "the decode rank is shutting down")
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(5)
        self.wake.close()

    def _spawn(self, name: str, target: object, *args: object) -> None:
        def run() -> None:
            try:
                target(*args)  # type: ignore[operator]
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    # Peers

    def _connect(self, peer: _Peer) -> None:
        try:
            route = self._find(peer)
            if route is None:
                return
            target = route.registration
            refusal = self._description.mismatch(target.description, "the decode rank", "the prefill rank")
            if refusal:
                self._drop(peer, refusal)
                return
            sock = socket.create_connection((target.host, target.port), timeout=_CONNECT_TIMEOUT)
        except (OSError, BootstrapRefused) as error:
            self._drop(peer, str(error))
            return
        link = ControlLink(
            sock,
            f"prefill rank at {target.host}:{target.port}",
            lambda link, message: self._on_message(peer, message),
            lambda link, reason: self._drop(peer, reason),
            self._options.heartbeat_interval,
            self._options.heartbeat_failures,
        )
        host, port = self.bulk_address
        link.send(
            Hello(
                self._description, target.incarnation, host, port, self._listener.unix_name, self._identity, peer.token
            )
        )
        with self._lock:
            peer.link = link
        link.start()
        if peer.closed.is_set():
            link.close("no longer wanted")

    def _find(self, peer: _Peer) -> Route | None:
        """Ask until all prefill ranks have registered; None once nobody waits for the answer."""
        client = BootstrapClient(peer.bootstrap_addr)
        while True:
            try:
                route = client.route(peer.dp_rank, self._args.tp_rank)
            except BootstrapNotReady:
                if peer.closed.wait(_RETRY_INTERVAL):
                    return None
                with self._lock:
                    wanted = any(incoming.peer is peer for incoming in self._incoming.values())
                    if not wanted:
                        self._peers.pop((peer.bootstrap_addr, peer.dp_rank), None)
                        peer.closed.set()
                        return None
                continue
            if route.tp_size != self._args.tp_size:
                raise BootstrapRefused(
                    f"tp_size differs: the decode server has {self._args.tp_size}, "
                    f"the prefill server has {route.tp_size}; the tcp backend needs them equal"
                )
            return route

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Fail what waits for the peer and forget it."""
        with self._lock:
            key = (peer.bootstrap_addr, peer.dp_rank)
            if self._peers.get(key) is peer:
                del self._peers[key]
            peer.closed.set()
            waiting = [incoming for incoming in self._incoming.values() if incoming.peer is peer]
            readers = list(peer.readers)
        if peer.link is not None:
            peer.link.close(reason)
        for incoming in waiting:
            self._fail(incoming, f"prefill server {peer.bootstrap_addr}: {reason}", tell=False)
        for reader in readers:
            close_socket(reader.sock)

    def _on_message(self, peer: _Peer, message: Message) -> None:
        match message:
            case Welcome():
                with self._lock:
                    peer.ready = True
                    waiting = [incoming for incoming in self._incoming.values() if incoming.peer is peer]
                for incoming in waiting:
                    self._claim(peer, incoming)
            case Refused(reason=reason):
                self._drop(peer, reason)
            case Failure(transfer_id=transfer_id, reason=reason):
                if (failed := self._find_incoming(peer, transfer_id)) is not None:
                    self._fail(failed, reason, tell=False)
            case Done(transfer_id=transfer_id):
                if (sent := self._find_incoming(peer, transfer_id)) is not None:
                    with sent.lock:
                        sent.done = message
                        self._finish(sent)
            case _:
                pass

    def _claim(self, peer: _Peer, incoming: _Incoming) -> None:
        assert peer.link is not None
        with self._lock:
            if incoming.transfer_id in self._incoming:
                peer.link.send(Claim(incoming.room, incoming.transfer_id))
                self.rooms.update(incoming.room, KVPoll.WaitingForInput)

    def _find_incoming(self, peer: _Peer, transfer_id: int) -> _Incoming | None:
        with self._lock:
            incoming = self._incoming.get(transfer_id)
        return incoming if incoming is not None and incoming.peer is peer else None

    # Rooms

    def open(self, room: int) -> _Incoming:
        check_room(room)
        with self._lock:
            if room in self.rooms:
                raise ValueError(f"bootstrap_room {room} is in use by another request")
            incoming = _Incoming(room, next(self._next_id), time.monotonic())
            self._incoming[incoming.transfer_id] = incoming
            self.rooms.update(room, KVPoll.Bootstrapping)
            return incoming

    def init(self, incoming: _Incoming, bootstrap_addr: str, dp_rank: int) -> None:
        key = (bootstrap_addr, dp_rank)
        with self._lock:
            peer = self._peers.get(key)
            new = peer is None
            if peer is None:
                peer = self._peers[key] = _Peer(bootstrap_addr, dp_rank)
            incoming.peer = peer
            ready = peer.ready
        if new:
            self._spawn("kv-connect", self._connect, peer)
        elif ready:
            self._claim(peer, incoming)

    def publish(
        self, incoming: _Incoming, pages: Indices, aux_index: int, state: Sequence[Indices], skip_pages: int
    ) -> None:
        args = self._args
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        check_pages("page", pages, args.kv_data_lens, args.kv_item_lens)
        lists = [np.ascontiguousarray(items, dtype=np.int64) for items in state]
        lists += [np.zeros(0, dtype=np.int64)] * (len(args.state) - len(lists))
        for component, items in zip(args.state, lists, strict=True):
            check_pages(f"state {component.name}", items, component.data_lens, component.item_lens)
        row = np.array([aux_index], dtype=np.int64)
        check_pages("aux row", row, args.aux_data_lens, args.aux_item_lens)
        if incoming.closed:
            return
        peer = incoming.peer
        if peer is None or peer.link is None or self.rooms.status(incoming.room) < KVPoll.WaitingForInput:
            raise RuntimeError(f"room {incoming.room}: send_metadata() before the room is WaitingForInput")
        incoming.pages, incoming.state, incoming.aux_index = pages, lists, aux_index
        incoming.published = time.monotonic()
        num_state_items = [len(items) for items in lists]
        peer.link.send(TransferInfo(incoming.room, incoming.transfer_id, len(pages), num_state_items, skip_pages))

    def poll(self, incoming: _Incoming) -> KVPoll:
        status = self.rooms.status(incoming.room)
        now = time.monotonic()
        options = self._options
        if status is KVPoll.Bootstrapping and now - incoming.created > options.bootstrap_timeout:
            where = incoming.peer.bootstrap_addr if incoming.peer else "unknown"
            self._fail(
                incoming,
                f"prefill server {where} was not ready within bootstrap_timeout ({options.bootstrap_timeout:g} s)",
            )
        elif (
            status is KVPoll.WaitingForInput
            and incoming.published is not None
            and now - incoming.published > options.waiting_timeout
        ):
            self._fail(incoming, f"no byte arrived within waiting_timeout ({options.waiting_timeout:g} s)")
        else:
            return status
        return self.rooms.status(incoming.room)

    def _fail(self, incoming: _Incoming, reason: str, tell: bool = True) -> None:
        if self._shut(incoming):
            self.rooms.update(incoming.room, KVPoll.Failed, reason)
            peer = incoming.peer
            if tell and peer is not None and peer.link is not None:
                peer.link.send(Abort(incoming.room, incoming.transfer_id, reason))

    def _shut(self, incoming: _Incoming) -> bool:
        """After this no thread writes for the transfer; False if it had already ended."""
        with incoming.lock:
            first = not incoming.closed
            incoming.closed = True
        if incoming.peer is not None:
            with self._lock:
                readers = list(incoming.peer.readers)
            for reader in readers:
                # Whoever is in a read now leaves it before we get the lock, and sees `closed` before the next.
                with reader.lock:
                    pass
        incoming.writers_gone = True
        return first

    def abort(self, incoming: _Incoming, reason: str) -> None:
        self._fail(incoming, reason)

    def clear(self, incoming: _Incoming) -> None:
        self._fail(incoming, "cleared before it was complete")
        with self._lock:
            if self._incoming.pop(incoming.transfer_id, None) is not None:
                self.rooms.clear(incoming.room, incoming.transfer_id)

    def failure(self, incoming: _Incoming) -> KVTransferError:
        error = KVTransferError(incoming.room, self.rooms.reason(incoming.room))
        self.clear(incoming)
        return error

    # Bytes

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()
            except OSError:
                return
            self._spawn("kv-receive", self._receive, sock)

    def _receive(self, sock: socket.socket) -> None:
        """One bulk connection, from its token to its end."""
        peer = None
        reader = _Reader(sock)
        try:
            sock.settimeout(_CONNECT_TIMEOUT)
            token = sock.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            with self._lock:
                peer = next((peer for peer in self._peers.values() if secrets.compare_digest(peer.token, token)), None)
                if peer is not None:
                    peer.readers.append(reader)
            if peer is not None:
                self._receive_frames(peer, reader)
        except (OSError, ValueError) as error:
            if peer is not None:
                self._drop(peer, f"bulk connection failed: {error}")
        finally:
            if peer is not None:
                with self._lock, contextlib.suppress(ValueError):
                    peer.readers.remove(reader)
            close_socket(sock)

    def _receive_frames(self, peer: _Peer, reader: _Reader) -> None:
        stream = FrameReader(reader.sock)
        while True:
            header = FrameHeader.unpack(stream.exactly(HEADER_BYTES))
            incoming = self._find_incoming(peer, header.transfer_id)
            if incoming is None or incoming.pages is None:
                stream.discard(header.num_bytes)
                continue
            self.rooms.update(incoming.room, KVPoll.Transferring)
            pieces = self._pieces(incoming, header)
            while pieces.remaining:
                with reader.lock:
                    if incoming.closed:
                        break
                    moved = stream.read_some(pieces)
                if not moved:
                    stream.wait()
            if pieces.remaining:
                stream.discard(pieces.remaining)
                continue
            if header.has_checksum:
                found = self._pieces(incoming, header).checksum()
                if found != header.checksum:
                    self._fail(incoming, f"checksum {found:#010x} of the received bytes, sent {header.checksum:#010x}")
                    continue
            with incoming.lock:
                incoming.frames_in += 1
                self._finish(incoming)

    def _pieces(self, incoming: _Incoming, header: FrameHeader) -> ScatterList:
        """Where the frame goes, from this side's own index lists."""
        if header.component == KV_PAGES:
            assert incoming.pages is not None
            items, ptrs, item_lens = incoming.pages, self._args.kv_data_ptrs, self._args.kv_item_lens
        elif 0 <= header.component < len(self._args.state):
            component = self._args.state[header.component]
            items, ptrs, item_lens = incoming.state[header.component], component.data_ptrs, component.item_lens
        else:
            raise ConnectionError(f"frame for state component {header.component}, there are {len(self._args.state)}")
        regions = slice(header.region_start, header.region_start + header.num_regions)
        part = items[header.item_start : header.item_start + header.num_items]
        pieces = ScatterList(*address_list(ptrs[regions], item_lens[regions], part))
        if pieces.num_bytes != header.num_bytes:
            raise ConnectionError(f"frame of {header.num_bytes} bytes for memory of {pieces.num_bytes}")
        return pieces

    def _finish(self, incoming: _Incoming) -> None:
        """With `incoming.lock` held: the metadata row, then the state Success, once every frame is in."""
        done = incoming.done
        if incoming.closed or done is None or incoming.frames_in < done.num_frames:
            return
        offset = 0
        for ptr, item in zip(self._args.aux_data_ptrs, self._args.aux_item_lens, strict=True):
            ctypes.memmove(ptr + incoming.aux_index * item, done.aux_row[offset : offset + item], item)
            offset += item
        incoming.closed = incoming.writers_gone = True
        self.rooms.succeed(incoming.room, done.prefill_rank, required=1)
        if incoming.peer is not None and incoming.peer.link is not None:
            incoming.peer.link.send(Received(incoming.room, incoming.transfer_id))


class TcpKVReceiver:
    """See KVReceiver."""

    def __init__(self, end: DecodeEnd, room: int, bootstrap_addr: str) -> None:
        self._end = end
        self._bootstrap_addr = bootstrap_addr
        self._incoming = end.open(room)

    def init(self, prefill_dp_rank: int = 0) -> None:
        self._end.init(self._incoming, self._bootstrap_addr, prefill_dp_rank)

    def send_metadata(
        self, page_indices: Indices, aux_index: int, state_indices: Sequence[Indices] = (), skip_pages: int = 0
    ) -> None:
        self._end.publish(self._incoming, page_indices, aux_index, state_indices, skip_pages)

    def note(self) -> bytes:
        done = self._incoming.done
        return b"" if done is None else done.note

    def poll(self) -> KVPoll:
        return self._end.poll(self._incoming)

    def failure(self) -> KVTransferError:
        return self._end.failure(self._incoming)

    def abort(self, reason: str = "aborted") -> None:
        self._end.abort(self._incoming, reason)

    def release_safe(self) -> bool:
        return self._incoming.writers_gone

    def clear(self) -> None:
        self._end.clear(self._incoming)
