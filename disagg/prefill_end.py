"""Prefill end of every real KV manager: accepts decode ranks, and follows each room from its claim to its receipt.

How bytes move is the mover's business; see disagg/mover.py.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from disagg.base import Indices, KVArgs, KVPoll, KVTransferError, TransferOptions, check_room
from disagg.bootstrap_client import BootstrapClient, Registration
from disagg.checksum import memory_checksum
from disagg.control import (
    MAX_MESSAGE,
    Abort,
    Accepted,
    Claim,
    ControlLink,
    Done,
    Failure,
    Hello,
    JobChecksum,
    Lost,
    Message,
    Received,
    Refused,
    Started,
    Stopped,
    TransferInfo,
    Welcome,
    close_socket,
    pause_unless_closed,
)
from disagg.description import KVDescription, component_slices, refusal
from disagg.mover import KV_PAGES, Job, PeerMemory, PrefillMover, Session
from disagg.pages import Slices, check_pages
from disagg.rooms import RoomTable
from disagg.tp_plan import num_claimants
from disagg.wake import Alarm, Alarms, Wake

_MAX_NOTE = MAX_MESSAGE - (1 << 20)


class _DecodeRank:
    """One connected decode rank."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.session: Session | None = None
        self.slices: list[Slices] = []
        self.closed = False
        # Jobs of each transfer that have not finished, whatever has become of the room, and who waits for their end.
        self.moving: Counter[int] = Counter()
        self.stop_wanted: set[int] = set()


@dataclass
class _Leg:
    """One decode rank's part of a room: its claim, then its indices."""

    link: ControlLink
    transfer_id: int
    info: TransferInfo | None = None
    target_items: list[Indices] | None = None
    checksums: list[JobChecksum] = field(default_factory=list)
    jobs_left: int = 0
    started: bool = False
    received: bool = False


@dataclass
class _Outgoing:
    """One room. `legs` by the decode side's TP rank; `group` and `expected` come with the first claim."""

    room: int
    has_sender: bool = False
    group: str = ""
    expected: int = 0
    legs: dict[int, _Leg] = field(default_factory=dict)
    num_pages: int = 0
    aux_index: int = 0
    pages_sent: int = 0
    done: tuple[bytes, bytes] | None = None
    failed: bool = False
    alarm: Alarm | None = None

    @property
    def info(self) -> TransferInfo | None:
        """Page counts, once every decode rank has told them; they are the same for all."""
        infos = [leg.info for leg in self.legs.values() if leg.info is not None]
        return infos[0] if infos and len(infos) == self.expected else None


class PrefillEnd:
    """State and threads of one prefill rank. Registers itself if a bootstrap address is given; failure raises."""

    def __init__(
        self,
        kv_args: KVArgs,
        options: TransferOptions,
        bootstrap_addr: str | None,
        incarnation: str | None,
        backend: str,
        make_mover: Callable[[KVArgs, TransferOptions], PrefillMover],
    ) -> None:
        self._args = kv_args
        self._description = KVDescription.of(kv_args)
        self._options = options
        self._incarnation = incarnation or uuid.uuid4().hex
        self._backend = backend
        self._lock = threading.Lock()
        self._outgoing: dict[int, _Outgoing] = {}
        self._declined: dict[int, tuple[float, str]] = {}
        self._ranks: dict[ControlLink, _DecodeRank] = {}
        self._mover = make_mover(kv_args, options)
        self.wake = Wake()
        self.rooms = RoomTable(options.tombstone_time, on_change=self.wake.notify)
        self._alarms = Alarms("kv-alarms")
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._listener = socket.create_server((options.host, 0), family=family, backlog=128)
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
        self._thread.join(5)
        self._alarms.close()
        with self._lock:
            links = list(self._ranks)
        for link in links:
            link.close("the prefill rank is shutting down")
        for link in links:
            link.join(5)
        self._mover.close()
        self.wake.close()

    # Decode ranks

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
                link = ControlLink(
                    sock,
                    f"decode rank at {address[0]}:{address[1]}",
                    self._on_message,
                    self._on_close,
                    self._options.heartbeat_interval,
                    self._options.heartbeat_failures,
                )
            except OSError as error:
                if pause_unless_closed(error):
                    return
                continue
            with self._lock:
                self._ranks[link] = _DecodeRank()
            link.start()

    def _on_message(self, link: ControlLink, message: Message) -> None:
        if isinstance(message, Hello):
            # Connecting may take seconds, and heartbeats go on meanwhile.
            threading.Thread(target=self._welcome, args=(link, message), name="kv-open", daemon=True).start()
            return
        with self._lock:
            match message:
                case Claim(room=room, transfer_id=transfer_id):
                    self._claim(link, room, transfer_id)
                case TransferInfo():
                    self._take_info(link, message)
                case Abort(room=room, transfer_id=transfer_id, reason=reason):
                    self._give_up(link, room, transfer_id, f"the decode side gave up: {reason}")
                case Received(room=room, transfer_id=transfer_id):
                    self._receipt(link, room, transfer_id)
                case _:
                    pass

    def _welcome(self, link: ControlLink, hello: Hello) -> None:
        restarted = hello.incarnation != self._incarnation
        reason = refusal(self._description, hello.description, "the prefill rank", "the decode rank")
        if hello.backend != self._backend:
            reason = f"backend differs: the prefill rank has {self._backend}, the decode rank has {hello.backend}"
        elif restarted:
            reason = f"the prefill rank was restarted: it is {self._incarnation}, looked for was {hello.incarnation}"
        if reason:
            link.send(Refused(reason, unfit=not restarted))
            link.close("refused")
            return
        memory = hello.memory
        peer = PeerMemory(
            name=link.name,
            host=hello.host,
            endpoint=hello.endpoint,
            kv_data_ptrs=memory.kv_data_ptrs if memory else [],
            kv_item_lens=hello.description.kv_item_lens,
            state_data_ptrs=memory.state_data_ptrs if memory else [],
            state_item_lens=hello.description.state_item_lens,
        )
        try:
            slices = component_slices(self._description, hello.description)
            session = self._mover.open(peer, partial(self._lost, link))
        except Exception as error:  # the decode rank must not wait for an answer that never comes
            link.send(Refused(f"the decode rank cannot be reached: {error}"))
            link.close("no way to move bytes")
            return
        with self._lock:
            rank = self._ranks.get(link)
            if rank is not None:
                rank.hello, rank.session = hello, session
                rank.slices = slices
        if rank is None:
            session.close()
        else:
            link.send(Welcome())

    def _lost(self, link: ControlLink, reason: str) -> None:
        link.send(Lost(reason))
        link.close(reason)

    def _on_close(self, link: ControlLink, reason: str, ended_by_peer: bool) -> None:
        with self._lock:
            rank = self._ranks.pop(link)
            rank.closed = True
            for outgoing in list(self._outgoing.values()):
                if any(leg.link is link for leg in outgoing.legs.values()):
                    self._fail(outgoing, reason)
        if rank.session is not None:
            rank.session.close()

    # Rooms. Methods from here to _forget need the lock held.

    def _claim(self, link: ControlLink, room: int, transfer_id: int) -> _Leg | None:
        """The leg of this transfer; its room is made if its request has not arrived yet. None if it was refused."""
        hello = self._ranks[link].hello
        if hello is None:
            return None
        outgoing = self._outgoing.get(room)
        if outgoing is None:
            if self.rooms.concluded(room, transfer_id):
                ended, reason = f"room {room} has already ended on the prefill side", self.rooms.reason(room)
                link.send(Failure(transfer_id, f"{ended}: {reason}" if reason else ended))
                return None
            outgoing = self._outgoing[room] = _Outgoing(room)
            self.rooms.update(room, KVPoll.Bootstrapping)
        if outgoing.failed:
            link.send(Failure(transfer_id, self.rooms.reason(room)))
            return None
        if not outgoing.legs:
            outgoing.group = hello.group
            outgoing.expected = num_claimants(self._args.tp_size, hello.description.tp_size)
        leg = outgoing.legs.get(hello.description.tp_rank)
        if outgoing.group != hello.group or (leg is not None and leg.transfer_id != transfer_id):
            link.send(Failure(transfer_id, f"room {room} is in use by another request"))
            return None
        if leg is None:
            leg = outgoing.legs[hello.description.tp_rank] = _Leg(link, transfer_id)
            if outgoing.has_sender:
                link.send(Accepted(transfer_id))
        return leg

    def _take_info(self, link: ControlLink, info: TransferInfo) -> None:
        leg = self._claim(link, info.room, info.transfer_id)
        if leg is None or leg.info is not None:
            return
        outgoing = self._outgoing[info.room]
        counts = [info.num_pages, *info.num_state_items]
        if len(counts) != len(self._args.state) + 1 or (
            info.items and [len(items) for items in info.items] != [8 * count for count in counts]
        ):
            self._fail(outgoing, f"the decode side's index lists are not {counts} items of each kind")
            return
        leg.info = info
        if info.items:
            leg.target_items = [np.frombuffer(items, dtype=np.int64) for items in info.items]
        for other in outgoing.legs.values():
            if other.info is not None and (
                (other.info.num_pages, other.info.skip_pages, other.info.num_state_items)
                != (info.num_pages, info.skip_pages, info.num_state_items)
            ):
                self._fail(
                    outgoing,
                    f"decode ranks disagree: {info.num_pages} pages after {info.skip_pages} and "
                    f"{other.info.num_pages} pages after {other.info.skip_pages}",
                )
                return
        if outgoing.info is not None:
            if outgoing.alarm is not None:
                outgoing.alarm.cancel()
            self.rooms.update(info.room, KVPoll.WaitingForInput)

    def _give_up(self, link: ControlLink, room: int, transfer_id: int, reason: str) -> None:
        rank = self._ranks[link]
        outgoing = self._outgoing.get(room)
        if outgoing is None:
            if not self.rooms.concluded(room, transfer_id):
                self._decline(room, reason)
        elif not outgoing.legs or any(
            leg.link is link and leg.transfer_id == transfer_id for leg in outgoing.legs.values()
        ):
            self._fail(outgoing, reason)
        if rank.moving[transfer_id]:
            rank.stop_wanted.add(transfer_id)
        else:
            link.send(Stopped(transfer_id))

    def _receipt(self, link: ControlLink, room: int, transfer_id: int) -> None:
        outgoing = self._outgoing.get(room)
        if outgoing is None or outgoing.done is None:
            return
        for leg in outgoing.legs.values():
            if leg.link is link and leg.transfer_id == transfer_id:
                leg.received = True
        if all(leg.received for leg in outgoing.legs.values()):
            self.rooms.update(room, KVPoll.Success)

    def _decline(self, room: int, reason: str) -> None:
        """The request itself may still be on its way here; it must not wait for a decode side that has left."""
        now = time.monotonic()
        self._declined = {room: entry for room, entry in self._declined.items() if entry[0] > now}
        self._declined[room] = (now + self._options.tombstone_time, reason)

    def _fail(self, outgoing: _Outgoing, reason: str) -> None:
        if outgoing.failed or self.rooms.status(outgoing.room) is KVPoll.Success:
            return
        outgoing.failed = True
        if outgoing.alarm is not None:
            outgoing.alarm.cancel()
        self.rooms.update(outgoing.room, KVPoll.Failed, reason)
        for leg in outgoing.legs.values():
            leg.link.send(Failure(leg.transfer_id, reason))
        if not outgoing.has_sender:
            self._decline(outgoing.room, reason)
            self._forget(outgoing)

    def _forget(self, outgoing: _Outgoing) -> None:
        if self._outgoing.get(outgoing.room) is outgoing:
            del self._outgoing[outgoing.room]
            self.rooms.clear(outgoing.room, [leg.transfer_id for leg in outgoing.legs.values()])

    # Senders

    def open(self, room: int) -> _Outgoing:
        check_room(room)
        with self._lock:
            outgoing = self._outgoing.get(room)
            if outgoing is None:
                outgoing = self._outgoing[room] = _Outgoing(room)
                self.rooms.update(room, KVPoll.Bootstrapping)
            elif outgoing.has_sender:
                raise ValueError(f"bootstrap_room {room} is in use by another request")
            outgoing.has_sender = True
            for leg in outgoing.legs.values():
                leg.link.send(Accepted(leg.transfer_id))
            expiry, reason = self._declined.pop(room, (0.0, ""))
            if expiry > time.monotonic() and not outgoing.legs:
                self._fail(outgoing, reason)
            elif outgoing.info is None:
                outgoing.alarm = self._alarms.after(self._options.bootstrap_timeout, partial(self._unclaimed, outgoing))
            return outgoing

    def _unclaimed(self, outgoing: _Outgoing) -> None:
        """At bootstrap_timeout. Decode ranks that have claimed the room and answer heartbeats may take their time."""
        with self._lock:
            if outgoing.legs and len(outgoing.legs) == outgoing.expected:
                return
            limit = f"within bootstrap_timeout ({self._options.bootstrap_timeout:g} s)"
            if outgoing.legs:
                reason = f"{len(outgoing.legs)} of {outgoing.expected} decode ranks asked for the room {limit}"
            else:
                reason = f"no decode rank asked for the room {limit}"
            self._fail(outgoing, reason)

    def skip_pages(self, outgoing: _Outgoing) -> int:
        with self._lock:
            info = outgoing.info
        if info is None:
            raise RuntimeError(f"room {outgoing.room}: skip_pages() before the room is WaitingForInput")
        return info.skip_pages

    def send(self, outgoing: _Outgoing, pages: Indices, state: Sequence[Indices], last: bool, note: bytes) -> None:
        args = self._args
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        check_pages("page", pages, args.kv_data_lens, args.kv_item_lens)
        lists = [np.ascontiguousarray(items, dtype=np.int64) for items in state]
        for component, items in zip(args.state, lists, strict=False):
            check_pages(f"state {component.name}", items, component.data_lens, component.item_lens)
        submits: list[tuple[Session, Job]] = []
        with self._lock:
            info = outgoing.info
            if outgoing.failed:
                return
            if info is None:
                raise RuntimeError(f"room {outgoing.room}: send() before the room is WaitingForInput")
            if outgoing.done is not None:
                raise RuntimeError(f"room {outgoing.room}: send() after the last send")
            problem = self._disagreement(outgoing, info, len(pages), lists, last, note)
            if problem:
                self._fail(outgoing, problem)
                return
            start = outgoing.pages_sent
            outgoing.pages_sent += len(pages)
            if last:
                outgoing.done = (_row(args, outgoing.aux_index), bytes(note))
            self.rooms.update(outgoing.room, KVPoll.Transferring)
            for leg in outgoing.legs.values():
                rank = self._ranks[leg.link]
                assert rank.session is not None
                if not leg.started:
                    leg.started = True
                    leg.link.send(Started(leg.transfer_id))
                jobs = self._jobs(outgoing, leg, rank, KV_PAGES, pages, start)
                for i, items in enumerate(lists if last else []):
                    jobs += self._jobs(outgoing, leg, rank, i, items, 0)
                leg.jobs_left += len(jobs)
                rank.moving[leg.transfer_id] += len(jobs)
                submits += [(rank.session, job) for job in jobs]
                if last and not leg.jobs_left:
                    self._tell_done(outgoing, leg)
        for session, job in submits:
            session.submit(job)

    def _jobs(
        self, outgoing: _Outgoing, leg: _Leg, rank: _DecodeRank, component: int, items: Indices, start: int
    ) -> list[Job]:
        slices = rank.slices[component + 1]
        if not len(items) or not slices.lengths_R.any():
            return []
        targets = None
        if leg.target_items is not None:
            targets = leg.target_items[component + 1][start : start + len(items)]

        def finished(error: str | None) -> None:
            checksum = None
            if self._options.checksum and targets is not None and error is None and not outgoing.failed:
                try:
                    value = memory_checksum(self._args, component, items, slices)
                    checksum = JobChecksum(component, start, len(items), value)
                except Exception as problem:  # whatever it is, the job has ended
                    error = f"no checksum of what was sent: {problem}"
            self._job_finished(outgoing, leg, rank, error, checksum)

        return [
            Job(
                leg.transfer_id,
                component,
                items,
                start,
                targets,
                slices,
                lambda: outgoing.failed or rank.closed,
                finished,
            )
        ]

    def _job_finished(
        self, outgoing: _Outgoing, leg: _Leg, rank: _DecodeRank, error: str | None, checksum: JobChecksum | None
    ) -> None:
        with self._lock:
            if checksum is not None:
                leg.checksums.append(checksum)
            rank.moving[leg.transfer_id] -= 1
            if not rank.moving[leg.transfer_id]:
                del rank.moving[leg.transfer_id]
                if leg.transfer_id in rank.stop_wanted:
                    rank.stop_wanted.discard(leg.transfer_id)
                    leg.link.send(Stopped(leg.transfer_id))
            leg.jobs_left -= 1
            if error is not None:
                self._fail(outgoing, error)
            # Said only now, when no byte is read from the pages any more: after an abort, pages given to another
            # request may be half inside a job, and that transfer must never be called complete.
            elif outgoing.done is not None and not leg.jobs_left and not outgoing.failed:
                self._tell_done(outgoing, leg)

    def _tell_done(self, outgoing: _Outgoing, leg: _Leg) -> None:
        assert outgoing.done is not None
        row, note = outgoing.done
        leg.link.send(Done(leg.transfer_id, row, note, leg.checksums))

    def _disagreement(
        self,
        outgoing: _Outgoing,
        info: TransferInfo,
        num_pages: int,
        state: Sequence[Indices],
        last: bool,
        note: bytes,
    ) -> str | None:
        if outgoing.num_pages != info.num_pages:
            return f"the prefill side has {outgoing.num_pages} pages, the decode side expects {info.num_pages}"
        total = outgoing.pages_sent + num_pages
        if total > outgoing.num_pages or (last and total != outgoing.num_pages):
            return f"{total} pages were given to send, announced were {outgoing.num_pages}"
        if len(note) > _MAX_NOTE:
            return f"the note has {len(note)} bytes, the limit is {_MAX_NOTE}"
        if last:
            for i, component in enumerate(self._args.state):
                have = len(state[i]) if i < len(state) else 0
                if have != info.num_state_items[i]:
                    return (
                        f"state {component.name}: the prefill side has {have} items, "
                        f"the decode side expects {info.num_state_items[i]}"
                    )
        return None

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


def _row(args: KVArgs, index: int) -> bytes:
    """The metadata row `index`, one array after the other."""
    row = np.array([index], dtype=np.int64)
    check_pages("aux row", row, args.aux_data_lens, args.aux_item_lens)
    return b"".join(
        ctypes.string_at(ptr + index * item, item)
        for ptr, item in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    )
