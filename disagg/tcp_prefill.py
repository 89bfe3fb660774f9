"""Prefill end of the tcp manager: accepts decode ranks, pushes pages into their memory."""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.base import Indices, KVArgs, KVPoll, KVTransferError, TransferOptions, check_room
from disagg.bootstrap import BootstrapClient, KVDescription, Registration
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
    KV_PAGES,
    FrameHeader,
    ScatterList,
    close_socket,
    connect_bulk,
    host_identity,
    send_frame,
)
from disagg.wake import Wake

_CONNECT_TIMEOUT = 5.0
_NO_ITEMS: Indices = np.zeros(0, dtype=np.int64)


@dataclass
class _Outgoing:
    """One room. `link` and `transfer_id` come with the decode rank's claim, `info` with its indices."""

    room: int
    created: float
    has_sender: bool = False
    link: ControlLink | None = None
    transfer_id: int | None = None
    info: TransferInfo | None = None
    num_pages: int = 0
    aux_index: int = 0
    pages_sent: int = 0
    num_frames: int = 0
    frames_left: int = 0
    done: Done | None = None
    failed: bool = False


@dataclass
class _Frame:
    outgoing: _Outgoing
    component: int
    region_start: int
    num_regions: int
    item_start: int
    items: Indices


@dataclass
class _Session:
    """One decode rank. All its bulk connections take frames from one queue, so the faster ones take more."""

    frames: queue.SimpleQueue[_Frame | None] = field(default_factory=queue.SimpleQueue)
    sockets: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)


class PrefillEnd:
    """State and threads of one prefill rank. Registers itself if a bootstrap address is given; failure raises."""

    def __init__(
        self, kv_args: KVArgs, options: TransferOptions, bootstrap_addr: str | None, incarnation: str | None
    ) -> None:
        self._args = kv_args
        self._description = KVDescription.of(kv_args)
        self._options = options
        self._incarnation = incarnation or uuid.uuid4().hex
        self._lock = threading.Lock()
        self.wake = Wake()
        self.rooms = RoomTable(options.tombstone_time, on_change=self.wake.notify)
        self._outgoing: dict[int, _Outgoing] = {}
        self._declined: dict[int, tuple[float, str]] = {}
        self._sessions: dict[ControlLink, _Session] = {}
        self._listener = socket.create_server((options.host, 0), backlog=128)
        port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()
        if bootstrap_addr is not None:
            registration = Registration(
                incarnation=self._incarnation,
                dp_rank=kv_args.dp_rank,
                dp_size=kv_args.dp_size,
                tp_rank=kv_args.tp_rank,
                tp_size=kv_args.tp_size,
                host=options.host,
                port=port,
                description=self._description,
            )
            try:
                BootstrapClient(bootstrap_addr).register(registration, patience=options.bootstrap_timeout)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        close_socket(self._listener)
        with self._lock:
            links = list(self._sessions)
        for link in links:
            link.close("the prefill rank is shutting down")
        for link in links:
            link.join(5)
        self._thread.join(5)
        self.wake.close()

    # Decode ranks

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            link = ControlLink(
                sock,
                f"decode rank at {address[0]}:{address[1]}",
                self._on_message,
                self._on_close,
                self._options.heartbeat_interval,
                self._options.heartbeat_failures,
            )
            with self._lock:
                self._sessions[link] = _Session()
            link.start()

    def _on_message(self, link: ControlLink, message: Message) -> None:
        match message:
            case Hello():
                self._welcome(link, message)
            case Claim(room=room, transfer_id=transfer_id):
                with self._lock:
                    self._claim(link, room, transfer_id)
            case TransferInfo(room=room, transfer_id=transfer_id):
                with self._lock:
                    claimed = self._claim(link, room, transfer_id)
                    if claimed is not None and claimed.info is None:
                        claimed.info = message
                        self.rooms.update(room, KVPoll.WaitingForInput)
            case Abort(room=room, transfer_id=transfer_id, reason=reason):
                with self._lock:
                    self._give_up(room, transfer_id, f"the decode side gave up: {reason}")
            case Received(room=room, transfer_id=transfer_id):
                with self._lock:
                    received = self._outgoing.get(room)
                    if received is not None and received.transfer_id == transfer_id and received.done is not None:
                        self.rooms.update(room, KVPoll.Success)
            case _:
                pass

    def _welcome(self, link: ControlLink, hello: Hello) -> None:
        refusal = self._description.mismatch(hello.description, "the prefill rank", "the decode rank")
        if hello.incarnation != self._incarnation:
            refusal = f"the prefill rank was restarted: it is {self._incarnation}, looked for was {hello.incarnation}"
        if refusal:
            link.send(Refused(refusal))
            link.close("refused")
            return
        same_host = self._options.same_host_path and hello.unix_name and hello.host_identity == host_identity()
        with self._lock:
            session = self._sessions[link]
        try:
            for _ in range(self._options.num_connections):
                sock = connect_bulk(hello.host, hello.port, hello.unix_name if same_host else "", _CONNECT_TIMEOUT)
                session.sockets.append(sock)
                sock.sendall(hello.token)
        except OSError as error:
            link.send(Refused(f"the decode rank cannot be reached at {hello.host}:{hello.port}: {error}"))
            link.close("no bulk connection")
            return
        for sock in session.sockets:
            thread = threading.Thread(target=self._send_frames, args=(link, session, sock), name="kv-send", daemon=True)
            session.threads.append(thread)
            thread.start()
        link.send(Welcome())

    def _on_close(self, link: ControlLink, reason: str) -> None:
        with self._lock:
            session = self._sessions.pop(link)
            for outgoing in [outgoing for outgoing in self._outgoing.values() if outgoing.link is link]:
                self._fail(outgoing, reason, tell=False)
        for sock in session.sockets:
            close_socket(sock)
        for _ in session.threads:
            session.frames.put(None)
        for thread in session.threads:
            thread.join()

    # Rooms. _claim, _give_up, _fail, _decline and _forget need the lock held.

    def _claim(self, link: ControlLink, room: int, transfer_id: int) -> _Outgoing | None:
        """The room of this transfer, made if its request has not arrived yet; None if the transfer was refused."""
        outgoing = self._outgoing.get(room)
        if outgoing is None:
            if self.rooms.concluded(room, transfer_id):
                link.send(Failure(transfer_id, f"room {room} has already ended on the prefill side"))
                return None
            outgoing = self._outgoing[room] = _Outgoing(room, time.monotonic())
            self.rooms.update(room, KVPoll.Bootstrapping)
        if outgoing.failed:
            link.send(Failure(transfer_id, self.rooms.reason(room)))
            return None
        if outgoing.transfer_id is None:
            outgoing.link, outgoing.transfer_id = link, transfer_id
        if outgoing.transfer_id != transfer_id:
            link.send(Failure(transfer_id, f"room {room} is in use by another request"))
            return None
        return outgoing

    def _give_up(self, room: int, transfer_id: int, reason: str) -> None:
        outgoing = self._outgoing.get(room)
        if outgoing is not None and outgoing.transfer_id in (transfer_id, None):
            self._fail(outgoing, reason, tell=False)
        elif outgoing is None and not self.rooms.concluded(room, transfer_id):
            self._decline(room, reason)

    def _decline(self, room: int, reason: str) -> None:
        """The request itself may still be on its way here; it must not wait for a decode side that has left."""
        now = time.monotonic()
        self._declined = {room: entry for room, entry in self._declined.items() if entry[0] > now}
        self._declined[room] = (now + self._options.tombstone_time, reason)

    def _fail(self, outgoing: _Outgoing, reason: str, tell: bool = True) -> None:
        if outgoing.failed or self.rooms.status(outgoing.room) is KVPoll.Success:
            return
        outgoing.failed = True
        self.rooms.update(outgoing.room, KVPoll.Failed, reason)
        if tell and outgoing.link is not None and outgoing.transfer_id is not None:
            outgoing.link.send(Failure(outgoing.transfer_id, reason))
        if not outgoing.has_sender:
            self._decline(outgoing.room, reason)
            self._forget(outgoing)

    def _forget(self, outgoing: _Outgoing) -> None:
        if self._outgoing.get(outgoing.room) is outgoing:
            del self._outgoing[outgoing.room]
            self.rooms.clear(outgoing.room, outgoing.transfer_id)

    def open(self, room: int) -> _Outgoing:
        check_room(room)
        with self._lock:
            outgoing = self._outgoing.get(room)
            if outgoing is None:
                outgoing = self._outgoing[room] = _Outgoing(room, time.monotonic())
                self.rooms.update(room, KVPoll.Bootstrapping)
            elif outgoing.has_sender:
                raise ValueError(f"bootstrap_room {room} is in use by another request")
            outgoing.has_sender = True
            outgoing.created = time.monotonic()
            expiry, reason = self._declined.pop(room, (0.0, ""))
            if expiry > time.monotonic() and outgoing.link is None:
                self._fail(outgoing, reason)
            return outgoing

    def poll(self, outgoing: _Outgoing) -> KVPoll:
        status = self.rooms.status(outgoing.room)
        # A decode rank that has claimed the room and answers heartbeats may take its time.
        if status is KVPoll.Bootstrapping and outgoing.link is None:
            limit = self._options.bootstrap_timeout
            if time.monotonic() - outgoing.created > limit:
                self.abort(outgoing, f"no decode rank asked for the room within bootstrap_timeout ({limit:g} s)")
                status = self.rooms.status(outgoing.room)
        return status

    def abort(self, outgoing: _Outgoing, reason: str) -> None:
        with self._lock:
            self._fail(outgoing, reason)

    def clear(self, outgoing: _Outgoing) -> None:
        with self._lock:
            self._fail(outgoing, "cleared before it was complete")
            self._forget(outgoing)

    def failure(self, outgoing: _Outgoing) -> KVTransferError:
        error = KVTransferError(outgoing.room, self.rooms.reason(outgoing.room))
        self.clear(outgoing)
        return error

    # Bytes

    def send(self, outgoing: _Outgoing, pages: Indices, state: Sequence[Indices], last: bool, note: bytes) -> None:
        args = self._args
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        check_pages("page", pages, args.kv_data_lens, args.kv_item_lens)
        for component, items in zip(args.state, state, strict=False):
            check_pages(f"state {component.name}", items, component.data_lens, component.item_lens)
        with self._lock:
            info, link = outgoing.info, outgoing.link
            if outgoing.failed:
                return
            if info is None or link is None:
                raise RuntimeError(f"room {outgoing.room}: send() before the room is WaitingForInput")
            if outgoing.done is not None:
                raise RuntimeError(f"room {outgoing.room}: send() after the last send")
            problem = self._disagreement(outgoing, info, len(pages), state, last)
            if problem:
                self._fail(outgoing, problem)
                return
            frames = list(self._frames(outgoing, KV_PAGES, args.kv_item_lens, pages, outgoing.pages_sent))
            outgoing.pages_sent += len(pages)
            if last:
                for i, (component, items) in enumerate(zip(args.state, state, strict=False)):
                    items = np.ascontiguousarray(items, dtype=np.int64)
                    frames += self._frames(outgoing, i, component.item_lens, items, 0)
            outgoing.num_frames += len(frames)
            outgoing.frames_left += len(frames)
            self.rooms.update(outgoing.room, KVPoll.Transferring)
            if last:
                row = _row(args, outgoing.aux_index)
                outgoing.done = Done(info.transfer_id, args.tp_rank, outgoing.num_frames, row, note)
                if not outgoing.frames_left:
                    link.send(outgoing.done)
            session = self._sessions[link]
            for frame in frames:
                session.frames.put(frame)

    def _disagreement(
        self, outgoing: _Outgoing, info: TransferInfo, num_pages: int, state: Sequence[Indices], last: bool
    ) -> str | None:
        if outgoing.num_pages != info.num_pages:
            return f"the prefill side has {outgoing.num_pages} pages, the decode side expects {info.num_pages}"
        total = outgoing.pages_sent + num_pages
        if total > outgoing.num_pages or (last and total != outgoing.num_pages):
            return f"{total} pages were given to send, announced were {outgoing.num_pages}"
        if last:
            for i, component in enumerate(self._args.state):
                have = len(state[i]) if i < len(state) else 0
                if have != info.num_state_items[i]:
                    return (
                        f"state {component.name}: the prefill side has {have} items, "
                        f"the decode side expects {info.num_state_items[i]}"
                    )
        return None

    def _frames(
        self, outgoing: _Outgoing, component: int, item_lens: list[int], items: Indices, item_start: int
    ) -> Iterator[_Frame]:
        """Cut regions x items into frames near frame_bytes, by regions first: long runs stay long."""
        if not len(items):
            return
        connections = self._options.num_connections
        share = max(sum(item_lens) * len(items) // connections, 1 << 20)
        limit = min(self._options.frame_bytes, share)
        step = max(1, limit // max(item_lens))
        for start in range(0, len(items), step):
            part = items[start : start + step]
            first, size = 0, 0
            for region, item_len in enumerate(item_lens):
                size += item_len * len(part)
                if region + 1 == len(item_lens) or size + item_lens[region + 1] * len(part) > limit:
                    yield _Frame(outgoing, component, first, region + 1 - first, item_start + start, part)
                    first, size = region + 1, 0

    def _send_frames(self, link: ControlLink, session: _Session, sock: socket.socket) -> None:
        try:
            while (frame := session.frames.get()) is not None:
                if not frame.outgoing.failed:
                    self._send_frame(link, sock, frame)
        except OSError as error:
            link.close(f"bulk connection to {link.name} failed: {error}")

    def _send_frame(self, link: ControlLink, sock: socket.socket, frame: _Frame) -> None:
        outgoing = frame.outgoing
        if frame.component == KV_PAGES:
            ptrs, item_lens = self._args.kv_data_ptrs, self._args.kv_item_lens
        else:
            component = self._args.state[frame.component]
            ptrs, item_lens = component.data_ptrs, component.item_lens
        regions = slice(frame.region_start, frame.region_start + frame.num_regions)
        pieces = ScatterList(*address_list(ptrs[regions], item_lens[regions], frame.items))
        assert outgoing.transfer_id is not None
        header = FrameHeader(
            transfer_id=outgoing.transfer_id,
            num_bytes=pieces.num_bytes,
            component=frame.component,
            region_start=frame.region_start,
            num_regions=frame.num_regions,
            item_start=frame.item_start,
            num_items=len(frame.items),
            has_checksum=int(self._options.checksum),
            checksum=pieces.checksum() if self._options.checksum else 0,
        )
        send_frame(sock, header, pieces)
        with self._lock:
            outgoing.frames_left -= 1
            # Said only now, when no byte is read from the pages any more: after an abort, pages given to another
            # request may be half inside a frame, and that transfer must never be called complete.
            if outgoing.done is not None and not outgoing.frames_left and not outgoing.failed:
                link.send(outgoing.done)


def _row(args: KVArgs, index: int) -> bytes:
    """The metadata row `index`, one array after the other."""
    row = np.array([index], dtype=np.int64)
    check_pages("aux row", row, args.aux_data_lens, args.aux_item_lens)
    return b"".join(
        ctypes.string_at(ptr + index * item, item)
        for ptr, item in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    )


class TcpKVSender:
    """See KVSender."""

    def __init__(self, end: PrefillEnd, room: int) -> None:
        self._end = end
        self._outgoing = end.open(room)

    def init(self, num_pages: int, aux_index: int) -> None:
        self._outgoing.num_pages = num_pages
        self._outgoing.aux_index = aux_index

    def skip_pages(self) -> int:
        info = self._outgoing.info
        if info is None:
            raise RuntimeError(f"room {self._outgoing.room}: skip_pages() before the room is WaitingForInput")
        return info.skip_pages

    def send(
        self, page_indices: Indices, state_indices: Sequence[Indices] = (), last: bool = False, note: bytes = b""
    ) -> None:
        self._end.send(self._outgoing, page_indices, state_indices, last, note)

    def poll(self) -> KVPoll:
        return self._end.poll(self._outgoing)

    def failure(self) -> KVTransferError:
        return self._end.failure(self._outgoing)

    def abort(self, reason: str = "aborted") -> None:
        self._end.abort(self._outgoing, reason)

    def clear(self) -> None:
        self._end.clear(self._outgoing)
