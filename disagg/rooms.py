"""The states of the rooms of one rank, and which changes are allowed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disagg.base import KVPoll

_CREATING = (KVPoll.Bootstrapping, KVPoll.WaitingForInput)


@dataclass
class _Room:
    status: KVPoll
    reason: str = ""


class RoomTable:
    """Room -> state, safe to use from several threads.

    - Only Bootstrapping and WaitingForInput create a room; any other state for an unknown room is dropped.
    - Failed is terminal and keeps its first reason; otherwise a state only rises.
    - A cleared room leaves a tombstone for `tombstone_time` seconds, which carries the ids of the transfers that ended
      (empty: no transfer was ever named), so that a late message can be told from a new use of the same room, and the
      reason of a failure.
    """

    def __init__(
        self,
        tombstone_time: float,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called at each change of a state, by whichever thread makes it, before anyone can see it."""
        self._tombstone_time = tombstone_time
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._tombstones: OrderedDict[int, tuple[float, frozenset[int], str]] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        with self._lock:
            return room in self._rooms

    def update(self, room: int, status: KVPoll, reason: str = "") -> KVPoll | None:
        """Apply one change; returns the state that now holds, None if the room does not exist."""
        with self._lock:
            entry = self._rooms.get(room)
            if entry is None:
                if status not in _CREATING:
                    return None
                entry = self._rooms[room] = _Room(status)
                self._tombstones.pop(room, None)
            elif entry.status is KVPoll.Failed:
                return entry.status
            elif status is KVPoll.Failed:
                entry.status, entry.reason = status, reason or "no reason given"
            elif status > entry.status:
                entry.status = status
            else:
                return entry.status
            self._on_change()
            return entry.status

    def status(self, room: int) -> KVPoll:
        """A room that does not exist counts as Failed."""
        with self._lock:
            entry = self._rooms.get(room)
            return KVPoll.Failed if entry is None else entry.status

    def reason(self, room: int) -> str:
        """Why the room failed, also while its tombstone stands; empty if it has not failed."""
        with self._lock:
            entry = self._rooms.get(room)
            if entry is not None:
                return entry.reason
            return self._tombstones[room][2] if room in self._tombstones else "the room is not known"

    def clear(self, room: int, transfer_ids: Iterable[int] = ()) -> None:
        with self._lock:
            entry = self._rooms.pop(room, None)
            if entry is None:
                return
            now = self._clock()
            self._sweep(now)
            self._tombstones[room] = (now + self._tombstone_time, frozenset(transfer_ids), entry.reason)
            self._tombstones.move_to_end(room)

    def concluded(self, room: int, transfer_id: int) -> bool:
        """Whether a message of `transfer_id` belongs to a use of `room` that has ended."""
        with self._lock:
            self._sweep(self._clock())
            if room in self._rooms or room not in self._tombstones:
                return False
            ended = self._tombstones[room][1]
            return not ended or transfer_id in ended

    def _sweep(self, now: float) -> None:
        # Every tombstone lives equally long, so the oldest is first.
        while self._tombstones and next(iter(self._tombstones.values()))[0] <= now:
            self._tombstones.popitem(last=False)
