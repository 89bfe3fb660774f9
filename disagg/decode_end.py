"""Decode end of every real KV manager: finds prefill ranks, and follows each room from its claim to its last byte.

How bytes move is the mover's business; see disagg/mover.py.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import secrets
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from disagg.base import Indices, KVArgs, KVPoll, KVTransferError, TransferOptions, check_room
from disagg.bootstrap_client import BootstrapClient, BootstrapRefused, Registration
from disagg.checksum import checksum_differs, memory_checksum
from disagg.control import (
    Abort,
    Accepted,
    Claim,
    ControlLink,
    Done,
    Failure,
    Hello,
    Lost,
    Memory,
    Message,
    Received,
    Refused,
    Started,
    Stopped,
    TransferInfo,
    Welcome,
    keep_alive,
)
from disagg.description import KVDescription, component_slices, refusal
from disagg.mover import DecodeEvents, DecodeMover, Destination
from disagg.pages import Slices, check_pages
from disagg.prefill_lookup import Lookup, T, Unfit, sending_ranks
from disagg.rooms import RoomTable
from disagg.tp_plan import legs_of
from disagg.wake import Alarm, Alarms, Wake

_END_CHECK_INTERVAL = 1.0
_CONNECT_TIMEOUT = 5.0
_MAX_OWED = 10_000

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _PrefillRank:
    """One rank that this rank gets bytes from."""

    peer_id: int
    registration: Registration
    slices: list[Slices]
    link: ControlLink | None = None
    welcomed: bool = False


class _PrefillGroup:
    """The prefill ranks behind one bootstrap address and DP rank that this rank needs for a room.

    It lives from the first look-up until any of its connections is lost. A later request makes a new one.
    owed: of rooms that ended before every connection was there, for the ranks still to be connected: their requests
        must not wait for a decode side that has left.
    """

    def __init__(self, bootstrap_addr: str, dp_rank: int) -> None:
        self.bootstrap_addr = bootstrap_addr
        self.dp_rank = dp_rank
        self.ranks: list[_PrefillRank] = []
        self.ready = False
        self.lookup = Lookup(bootstrap_addr)
        self.owed: deque[Abort] = deque(maxlen=_MAX_OWED)
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None


@dataclass(eq=False)
class _Incoming:
    """One room. `lock` is held at every change of its state.

    closed: no thread of this process writes for it any more, or none has yet.
    accepted: ids of prefill ranks where the request has arrived.
    busy: ids of prefill ranks that may still write into the pages.
    unfit: as in KVTransferError, once it has failed.
    """

    room: int
    transfer_id: int
    group: _PrefillGroup | None = None
    accepted: set[int] = field(default_factory=set)
    published: bool = False
    pages: Indices | None = None
    state: list[Indices] = field(default_factory=list)
    aux_index: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    note: bytes = b""
    closed: bool = False
    cleared: bool = False
    busy: set[int] = field(default_factory=set)
    unfit: bool = False
    alarm: Alarm | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def release_safe(self) -> bool:
        return self.closed and not self.busy


class DecodeEnd:
    """State and threads of one decode rank. `incarnation` is common to the ranks of one start of the decode server."""

    def __init__(
        self,
        kv_args: KVArgs,
        options: TransferOptions,
        incarnation: str | None,
        backend: str,
        make_mover: Callable[[KVArgs, TransferOptions, DecodeEvents], DecodeMover],
    ) -> None:
        if incarnation is None and kv_args.tp_size > 1:
            raise ValueError("the ranks of a decode server with tp_size > 1 need a common incarnation")
        self._args = kv_args
        self._description = KVDescription.of(kv_args)
        self._options = options
        self._group_name = f"{incarnation or uuid.uuid4().hex}/{kv_args.dp_rank}"
        self._backend = backend
        self._lock = threading.Lock()
        self.wake = Wake()
        self.rooms = RoomTable(options.tombstone_time, on_change=self.wake.notify)
        self._alarms = Alarms("kv-alarms")
        self._incoming: dict[int, _Incoming] = {}
        self._groups: dict[tuple[str, int], _PrefillGroup] = {}
        # Data-parallel sizes of prefill servers, as long as nothing is lost of them.
        self._dp_sizes: dict[str, int] = {}
        # Ids are never used twice, not even by a restarted rank: a late byte must not match a newer transfer.
        self._next_id = itertools.count(secrets.randbits(62))
        self._next_peer = itertools.count()
        self.mover = make_mover(kv_args, options, self)

    def close(self) -> None:
        with self._lock:
            groups = list(self._groups.values())
            links = [rank.link for group in groups for rank in group.ranks if rank.link is not None]
        for group in groups:
            self._drop(group, "the decode rank is shutting down")
        for link in links:
            link.close("the decode rank is shutting down")
            link.join(5)
        for group in groups:
            if group.thread is not None:
                group.thread.join(5)
        self._alarms.close()
        self.mover.close()
        self.wake.close()

    # Prefill ranks

    def _connect(self, group: _PrefillGroup) -> None:
        try:
            registrations = self._ask(group, lambda client: sending_ranks(client, self._args, group.dp_rank))
            if registrations is None:
                return
            ranks = []
            for registration in registrations:
                reason = refusal(self._description, registration.description, "the decode rank", "the prefill rank")
                if reason:
                    raise Unfit(reason)
                slices = component_slices(registration.description, self._description)
                ranks.append(_PrefillRank(next(self._next_peer), registration, slices))
            for rank in ranks:
                self._greet(group, rank)
        except Exception as error:
            self._not_found(group, error)

    def _not_found(self, group: _PrefillGroup, error: Exception) -> None:
        """Whatever the error is: its rooms must not wait for the thread that looked for the group."""
        if not isinstance(error, (OSError, BootstrapRefused, Unfit)):
            logger.error("connecting to prefill server %s", group.bootstrap_addr, exc_info=error)
        self._drop(group, str(error) or type(error).__name__, unfit=isinstance(error, Unfit))

    def _greet(self, group: _PrefillGroup, rank: _PrefillRank) -> None:
        target = rank.registration
        sock = socket.create_connection((target.host, target.port), timeout=_CONNECT_TIMEOUT)
        try:
            endpoint = self.mover.endpoint(rank.peer_id)
        except BaseException:
            sock.close()
            raise
        if self.mover.one_sided:
            keep_alive(sock, self._options.release_timeout)
        link = ControlLink(
            sock,
            f"prefill rank at {target.host}:{target.port}",
            lambda link, message: self._on_message(group, rank, message),
            lambda link, reason, ended_by_peer: self._link_closed(group, rank, link, reason, ended_by_peer),
            self._options.heartbeat_interval,
            self._options.heartbeat_failures,
            watch_end=self.mover.one_sided,
        )
        args = self._args
        memory = None
        if self.mover.one_sided:
            memory = Memory(args.kv_data_ptrs, [component.data_ptrs for component in args.state])
        link.send(
            Hello(
                backend=self._backend,
                description=self._description,
                incarnation=target.incarnation,
                group=self._group_name,
                host=self._options.host,
                endpoint=endpoint,
                memory=memory,
            )
        )
        with self._lock:
            rank.link = link
            group.ranks.append(rank)
            for abort in group.owed:
                link.send(abort)
            link.start()
        if group.closed.is_set():
            link.close("no longer wanted")
            self.mover.forget(rank.peer_id)

    def _look_up(self, group: _PrefillGroup) -> None:
        """Find which data-parallel ranks the rooms of a group without one belong to, and move them there."""
        try:
            route = self._ask(group, lambda client: client.route(0, 0))
            if route is None:
                return
            if route.dp_size < 1:
                raise BootstrapRefused(f"it says that it has {route.dp_size} data-parallel ranks")
        except Exception as error:
            self._not_found(group, error)
            return
        with self._lock:
            self._dp_sizes[group.bootstrap_addr] = route.dp_size
            self._groups.pop((group.bootstrap_addr, group.dp_rank), None)
            group.closed.set()
            for abort in group.owed:
                self._tell(self._group_of(abort.room, group.bootstrap_addr, group.dp_rank), abort)
            ready = []
            for incoming in self._incoming.values():
                if incoming.group is group:
                    found = incoming.group = self._group_of(incoming.room, group.bootstrap_addr, group.dp_rank)
                    ready += [(found, incoming)] if found.ready else []
        for found, incoming in ready:
            self._claim(found, incoming)

    def _ask(self, group: _PrefillGroup, question: Callable[[BootstrapClient], T | None]) -> T | None:
        return group.lookup.ask(question, partial(self._wait_for_next, group))

    def _wait_for_next(self, group: _PrefillGroup, seconds: float) -> bool:
        """Wait for the next attempt; False, and the group is forgotten, when no room waits for it."""
        if group.closed.wait(seconds):
            return False
        with self._lock:
            if any(incoming.group is group for incoming in self._incoming.values()):
                return True
            self._groups.pop((group.bootstrap_addr, group.dp_rank), None)
            group.closed.set()
            return False

    def _link_closed(
        self, group: _PrefillGroup, rank: _PrefillRank, link: ControlLink, reason: str, ended_by_peer: bool
    ) -> None:
        self._drop(group, reason, rank if ended_by_peer else None)
        if not ended_by_peer and self.mover.one_sided:
            self._await_end(group, rank, link)

    def _await_end(self, group: _PrefillGroup, rank: _PrefillRank, link: ControlLink) -> None:
        """A silent prefill rank may only have been stopped, and writes on when it resumes, until it sees us gone."""
        if link.peer_ended():
            self._drop(group, "ended", rank)
        else:
            self._alarms.after(_END_CHECK_INTERVAL, partial(self._await_end, group, rank, link))

    def _drop(
        self, group: _PrefillGroup, reason: str, ended: _PrefillRank | None = None, *, unfit: bool = False
    ) -> None:
        """Fail what waits for the group and forget it. `ended` is a rank whose process was seen to leave."""
        with self._lock:
            key = (group.bootstrap_addr, group.dp_rank)
            if self._groups.get(key) is group:
                del self._groups[key]
            self._dp_sizes.pop(group.bootstrap_addr, None)
            first = not group.closed.is_set()
            group.closed.set()
            waiting = [incoming for incoming in self._incoming.values() if incoming.group is group]
            ranks = list(group.ranks)
        if ended is not None:
            self._alarms.after(self._options.release_grace, partial(self._quiet, waiting, ended.peer_id))
        if not first:
            return
        for incoming in waiting:
            self._fail(incoming, f"prefill server {group.bootstrap_addr}: {reason}", unfit=unfit)
        for rank in ranks:
            if rank.link is not None:
                # After the aborts of the rooms, and to the end of their answers, which say when pages are free.
                rank.link.close(reason, linger=True)
            if self.mover.forget(rank.peer_id):
                self._quiet(waiting, rank.peer_id)

    def _on_message(self, group: _PrefillGroup, rank: _PrefillRank, message: Message) -> None:
        match message:
            case Welcome():
                self.mover.joined(rank.peer_id)
                with self._lock:
                    rank.welcomed = True
                    group.ready = all(rank.welcomed for rank in group.ranks) and len(group.ranks) == self._num_legs(
                        group
                    )
                    waiting = [incoming for incoming in self._incoming.values() if incoming.group is group]
                    ready = group.ready
                for incoming in waiting if ready else []:
                    self._claim(group, incoming)
            case Refused(reason=reason, unfit=unfit):
                self._drop(group, reason, rank, unfit=unfit)
            case Lost(reason=reason):
                self._drop(group, reason)
            case Accepted(transfer_id=transfer_id):
                if (accepted := self._find_incoming(group, transfer_id)) is not None:
                    with accepted.lock:
                        accepted.accepted.add(rank.peer_id)
                        if len(accepted.accepted) == len(group.ranks) and accepted.alarm is not None:
                            accepted.alarm.cancel()
            case Started(transfer_id=transfer_id):
                if (started := self._find_incoming(group, transfer_id)) is not None:
                    with started.lock:
                        if not started.closed:
                            self.rooms.update(started.room, KVPoll.Transferring)
            case Failure(transfer_id=transfer_id, reason=reason):
                if (failed := self._find_incoming(group, transfer_id)) is not None:
                    self._fail(failed, reason)
            case Stopped(transfer_id=transfer_id):
                if (stopped := self._find_incoming(group, transfer_id)) is not None:
                    self._quiet([stopped], rank.peer_id)
            case Done(transfer_id=transfer_id):
                if (sent := self._find_incoming(group, transfer_id)) is not None:
                    if message.checksums:
                        # However much is to be read, heartbeats go on.
                        arguments = (rank, sent, message)
                        threading.Thread(target=self._check, args=arguments, name="kv-check", daemon=True).start()
                    else:
                        self._take_done(rank, sent, message)
            case _:
                pass

    def _take_done(self, rank: _PrefillRank, incoming: _Incoming, done: Done) -> None:
        with incoming.lock:
            incoming.done[rank.peer_id] = done
            self._finish(incoming)

    def _check(self, rank: _PrefillRank, incoming: _Incoming, done: Done) -> None:
        try:
            assert incoming.pages is not None
            lists = [incoming.pages, *incoming.state]
            for sent in done.checksums:
                items = lists[sent.component + 1][sent.item_start : sent.item_start + sent.num_items]
                slices = rank.slices[sent.component + 1].mirrored()
                found = memory_checksum(self._args, sent.component, items, slices)
                if found != sent.value:
                    self._fail(incoming, checksum_differs(found, sent.value))
                    return
        except Exception as error:  # whatever it is, the room must not wait for this thread
            self._fail(incoming, f"no checksum of what was received: {error}")
            return
        self._take_done(rank, incoming, done)

    def _num_legs(self, group: _PrefillGroup) -> int:
        size = group.ranks[0].registration.tp_size
        return len(legs_of(self._args.tp_rank, self._args.tp_size, size, self._args.total_kv_head_num))

    def _claim(self, group: _PrefillGroup, incoming: _Incoming) -> None:
        with incoming.lock:
            if incoming.closed:
                return
            if incoming.alarm is not None:
                incoming.alarm.cancel()
            incoming.alarm = self._alarms.after(self._options.waiting_timeout, lambda: self._not_accepted(incoming))
            for rank in group.ranks:
                assert rank.link is not None
                rank.link.send(Claim(incoming.room, incoming.transfer_id))
            self.rooms.update(incoming.room, KVPoll.WaitingForInput)

    def _find_incoming(self, group: _PrefillGroup, transfer_id: int) -> _Incoming | None:
        with self._lock:
            incoming = self._incoming.get(transfer_id)
        return incoming if incoming is not None and incoming.group is group else None

    # What the mover reports

    def arrived(self, peer_id: int, transfer_id: int) -> None:
        with self._lock:
            incoming = self._incoming.get(transfer_id)
        if incoming is not None:
            with incoming.lock:
                self._finish(incoming)

    def failed(self, transfer_id: int, reason: str) -> None:
        with self._lock:
            incoming = self._incoming.get(transfer_id)
        if incoming is not None:
            self._fail(incoming, reason)

    def lost(self, peer_id: int, reason: str) -> None:
        with self._lock:
            group = next(
                (group for group in self._groups.values() if any(rank.peer_id == peer_id for rank in group.ranks)), None
            )
        if group is not None:
            self._drop(group, reason)

    # Rooms

    def open(self, room: int) -> _Incoming:
        check_room(room)
        with self._lock:
            if room in self.rooms:
                raise ValueError(f"bootstrap_room {room} is in use by another request")
            incoming = _Incoming(room, next(self._next_id))
            self._incoming[incoming.transfer_id] = incoming
            self.rooms.update(room, KVPoll.Bootstrapping)
        incoming.alarm = self._alarms.after(self._options.bootstrap_timeout, lambda: self._not_ready(incoming))
        return incoming

    def init(self, incoming: _Incoming, bootstrap_addr: str, dp_rank: int) -> None:
        with self._lock:
            group = incoming.group = self._group_of(incoming.room, bootstrap_addr, dp_rank)
            ready = group.ready
        if ready:
            self._claim(group, incoming)

    def _group_of(self, room: int, bootstrap_addr: str, dp_rank: int) -> _PrefillGroup:
        """With `_lock` held: the prefill ranks of a room, which are looked for from now on if they are not known."""
        if dp_rank < 0 and bootstrap_addr in self._dp_sizes:
            dp_rank = room % self._dp_sizes[bootstrap_addr]
        key = (bootstrap_addr, dp_rank)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _PrefillGroup(bootstrap_addr, dp_rank)
            work = self._look_up if dp_rank < 0 else self._connect
            group.thread = threading.Thread(target=work, args=(group,), name="kv-connect", daemon=True)
            group.thread.start()
        return group

    def _not_ready(self, incoming: _Incoming) -> None:
        if self.rooms.status(incoming.room) is KVPoll.Bootstrapping and not incoming.closed:
            where, problem, limit = "unknown", "nobody has asked it", self._options.bootstrap_timeout
            if incoming.group is not None:
                where, problem = incoming.group.bootstrap_addr, incoming.group.lookup.problem
            reason = f"prefill server {where} was not ready within bootstrap_timeout ({limit:g} s): {problem}"
            self._fail(incoming, reason)

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
        # Asked before `closed`, which is set first where a room fails meanwhile.
        status = self.rooms.status(incoming.room)
        if incoming.closed:
            return
        group = incoming.group
        if group is None or status < KVPoll.WaitingForInput:
            raise RuntimeError(f"room {incoming.room}: send_metadata() before the room is WaitingForInput")
        incoming.pages, incoming.state, incoming.aux_index = pages, lists, aux_index
        everything = [pages, *lists]
        info = TransferInfo(
            room=incoming.room,
            transfer_id=incoming.transfer_id,
            num_pages=len(pages),
            num_state_items=[len(items) for items in lists],
            skip_pages=skip_pages,
            items=[items.tobytes() for items in everything] if self.mover.one_sided else [],
        )
        # A failure meanwhile either sees `published` and waits for the prefill ranks, or keeps the list from going out.
        with incoming.lock:
            if incoming.closed:
                return
            incoming.published = True
            for rank in group.ranks:
                self.mover.expect(rank.peer_id, incoming.transfer_id, Destination(everything, rank.slices))
                if self.mover.one_sided:
                    incoming.busy.add(rank.peer_id)
            for rank in group.ranks:
                assert rank.link is not None
                rank.link.send(info)

    def _not_accepted(self, incoming: _Incoming) -> None:
        """Prefill ranks that have the request and answer heartbeats may take their time; these have not got it."""
        limit = self._options.waiting_timeout
        self._fail(incoming, f"the request did not arrive at the prefill server within waiting_timeout ({limit:g} s)")

    def _finish(self, incoming: _Incoming) -> None:
        """With `incoming.lock` held: the metadata row, then the state Success, once everything is in."""
        group = incoming.group
        if incoming.closed or not incoming.published or group is None or len(incoming.done) < len(group.ranks):
            return
        transfer_id = incoming.transfer_id
        if not all(self.mover.complete(rank.peer_id, transfer_id) for rank in group.ranks):
            return
        done = incoming.done[group.ranks[0].peer_id]
        offset = 0
        for ptr, item in zip(self._args.aux_data_ptrs, self._args.aux_item_lens, strict=True):
            ctypes.memmove(ptr + incoming.aux_index * item, done.aux_row[offset : offset + item], item)
            offset += item
        incoming.note = done.note
        incoming.closed = True
        incoming.busy.clear()
        if incoming.alarm is not None:
            incoming.alarm.cancel()
        self.mover.release(transfer_id)
        for rank in group.ranks:
            assert rank.link is not None
            rank.link.send(Received(incoming.room, transfer_id))
        self.rooms.update(incoming.room, KVPoll.Success)

    def _fail(self, incoming: _Incoming, reason: str, *, unfit: bool = False) -> None:
        # All under the lock: once clear() has had it, nothing of this transfer may touch the room's number any more.
        with incoming.lock:
            if incoming.closed:
                return
            self.mover.shut(incoming.transfer_id)
            incoming.closed = True
            incoming.unfit = unfit
            if incoming.alarm is not None:
                incoming.alarm.cancel()
            if not incoming.busy:
                self.mover.release(incoming.transfer_id)
            self.rooms.update(incoming.room, KVPoll.Failed, reason)
            with self._lock:
                if incoming.group is not None:
                    self._tell(incoming.group, Abort(incoming.room, incoming.transfer_id, reason))

    def _tell(self, group: _PrefillGroup, abort: Abort) -> None:
        """With `_lock` held: to the ranks that are connected, and to the others once they are."""
        if not group.ready:
            group.owed.append(abort)
        for rank in group.ranks:
            if rank.link is not None:
                rank.link.send(abort)

    def _quiet(self, transfers: Sequence[_Incoming], peer_id: int) -> None:
        """The prefill rank writes no more for transfers that have failed."""
        for incoming in transfers:
            with incoming.lock:
                if peer_id not in incoming.busy:
                    continue
                incoming.busy.discard(peer_id)
                safe = incoming.release_safe()
                if safe:
                    self.mover.release(incoming.transfer_id)
            if safe:
                self._forget_if_over(incoming)
                self.wake.notify()

    def _forget_if_over(self, incoming: _Incoming) -> None:
        with self._lock:
            if incoming.cleared and incoming.release_safe():
                self._incoming.pop(incoming.transfer_id, None)

    def abort(self, incoming: _Incoming, reason: str) -> None:
        self._fail(incoming, reason)

    def clear(self, incoming: _Incoming) -> None:
        self._fail(incoming, "cleared before it was complete")
        with self._lock:
            if not incoming.cleared:
                incoming.cleared = True
                self.rooms.clear(incoming.room, [incoming.transfer_id])
        self._forget_if_over(incoming)

    def failure(self, incoming: _Incoming) -> KVTransferError:
        error = KVTransferError(incoming.room, self.rooms.reason(incoming.room), incoming.unfit)
        self.clear(incoming)
        return error
