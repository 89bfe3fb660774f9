"""What a transfer backend adds to the common control plane: moving bytes.

A backend is a prefill mover and a decode mover. In *one-sided* backends the prefill side writes into decode memory at
addresses, in the others the decode side places what it is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from disagg.base import Indices, KVArgs
from disagg.pages import Addresses, Slices, paired_address_list

# Component number of the KV pages; the others are indices of state components.
KV_PAGES = -1


def component_memory(kv_args: KVArgs, component: int) -> tuple[list[int], list[int]]:
    """Addresses and item lengths of the regions of one component."""
    if component == KV_PAGES:
        return kv_args.kv_data_ptrs, kv_args.kv_item_lens
    state = kv_args.state[component]
    return state.data_ptrs, state.item_lens


def data_regions(kv_args: KVArgs) -> tuple[list[int], list[int]]:
    """Addresses and lengths of everything that pages and state lie in."""
    ptrs, lens = list(kv_args.kv_data_ptrs), list(kv_args.kv_data_lens)
    for component in kv_args.state:
        ptrs += component.data_ptrs
        lens += component.data_lens
    return ptrs, lens


@dataclass(frozen=True)
class PeerMemory:
    """A decode rank as a session of the prefill side sees it.

    name: for messages.
    host: the address the decode rank tells.
    endpoint: what the decode rank's mover says of itself; only the backend can read it.
    *_ptrs, *_item_lens: as in the decode rank's KVArgs; addresses are empty unless the backend is one-sided.
    """

    name: str
    host: str
    endpoint: bytes
    kv_data_ptrs: list[int]
    kv_item_lens: list[int]
    state_data_ptrs: list[list[int]]
    state_item_lens: list[list[int]]


class Job:
    """Items of one component of one transfer, to be moved by a session.

    source_items: [N] indices on the prefill side.
    item_start: position of the first of them in the decode side's index list.
    target_items: [N] indices on the decode side, None unless the backend is one-sided.
    slices: which bytes of an item travel.
    """

    def __init__(
        self,
        transfer_id: int,
        component: int,
        source_items: Indices,
        item_start: int,
        target_items: Indices | None,
        slices: Slices,
        is_cancelled: Callable[[], bool],
        on_finish: Callable[[str | None], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.component = component
        self.source_items = source_items
        self.item_start = item_start
        self.target_items = target_items
        self.slices = slices
        self._is_cancelled = is_cancelled
        self._on_finish: Callable[[str | None], None] | None = on_finish

    @property
    def cancelled(self) -> bool:
        """Nobody wants the bytes any more: start no further part of the job, but do finish it."""
        return self._is_cancelled()

    def finish(self, error: str | None = None) -> None:
        """To be called exactly once, from any thread, when no byte of the job moves any more.

        None says that every byte has left the prefill pages and, in a one-sided backend, lies in decode memory.
        """
        on_finish, self._on_finish = self._on_finish, None
        if on_finish is None:
            raise RuntimeError(f"job of transfer {self.transfer_id} finished twice")
        on_finish(error)


class Session(Protocol):
    """The way from this prefill rank into one decode rank."""

    def submit(self, job: Job) -> None:
        """Begin the job or queue it; returns at once."""

    def close(self) -> None:
        """Start nothing more and finish every job that is left. May wait for what is under way."""


class PrefillMover(Protocol):
    """A prefill rank's side of a backend, with a session for each decode rank."""

    def open(self, peer: PeerMemory, on_lost: Callable[[str], None]) -> Session:
        """Connect; may block for some seconds. Raises OSError with the reason.

        `on_lost` may be called later, once, from any thread, when the decode rank cannot be reached any more.
        """

    def close(self) -> None:
        """After every session was closed."""


@dataclass(frozen=True)
class Destination:
    """Where one prefill rank's part of one transfer goes: index lists and slices, the KV pages first."""

    items: list[Indices]
    slices: list[Slices]

    @property
    def num_bytes(self) -> int:
        return sum(
            len(items) * int(slices.item_bytes_R.sum()) for items, slices in zip(self.items, self.slices, strict=True)
        )


class DecodeEvents(Protocol):
    """What a decode mover reports, from any thread. `peer_id` names a prefill rank."""

    def arrived(self, peer_id: int, transfer_id: int) -> None:
        """complete() may now be true."""

    def failed(self, transfer_id: int, reason: str) -> None: ...

    def lost(self, peer_id: int, reason: str) -> None: ...


class DecodeMover(Protocol):
    """A decode rank's side of a backend. peer_id names a prefill rank."""

    one_sided: bool

    def endpoint(self, peer_id: int) -> bytes:
        """What the prefill rank's mover needs to reach this one; asked once before a prefill rank is greeted."""

    def expect(self, peer_id: int, transfer_id: int, destination: Destination) -> None:
        """Called before the prefill side hears of the transfer."""

    def complete(self, peer_id: int, transfer_id: int) -> bool:
        """Whether all bytes are in, given that the prefill side says that it has sent them."""

    def shut(self, transfer_id: int) -> None:
        """The transfer has ended here, either way. Afterwards no thread of this process writes for it."""

    def release(self, transfer_id: int) -> None:
        """After shut(): the prefill side is quiet too (or given up); forget the transfer."""

    def joined(self, peer_id: int) -> None:
        """The prefill rank's session stands."""

    def forget(self, peer_id: int) -> bool:
        """The prefill rank is gone. True if nothing can be written by it any more, whatever has become of it."""

    def close(self) -> None: ...


class OneSidedDecode:
    """Decode mover of backends that write into registered memory: nothing arrives here that needs placing.

    endpoint: gives the blob for a prefill rank.
    close: ends the engine.
    on_active: told, whenever it changes, how many prefill ranks are being greeted and transfers are not released.
    fence: makes writes of a lost prefill rank impossible; left out where the engine cannot.
    """

    one_sided = True

    def __init__(
        self,
        endpoint: Callable[[int], bytes],
        close: Callable[[], None],
        on_active: Callable[[int], None] | None = None,
        fence: Callable[[int], None] | None = None,
    ) -> None:
        self.close = close
        self._endpoint = endpoint
        self._on_active = on_active
        self._fence = fence
        self._lock = threading.Lock()
        self._expected: set[int] = set()
        self._greeted: set[int] = set()

    def active(self) -> int:
        return len(self._expected) + len(self._greeted)

    def endpoint(self, peer_id: int) -> bytes:
        blob = self._endpoint(peer_id)
        with self._lock:
            self._greeted.add(peer_id)
            self._tell()
        return blob

    def joined(self, peer_id: int) -> None:
        with self._lock:
            self._greeted.discard(peer_id)
            self._tell()

    def expect(self, peer_id: int, transfer_id: int, destination: Destination) -> None:
        with self._lock:
            self._expected.add(transfer_id)
            self._tell()

    def complete(self, peer_id: int, transfer_id: int) -> bool:
        return True

    def shut(self, transfer_id: int) -> None:
        """The writers are on the other side."""

    def release(self, transfer_id: int) -> None:
        with self._lock:
            self._expected.discard(transfer_id)
            self._tell()

    def forget(self, peer_id: int) -> bool:
        self.joined(peer_id)
        if self._fence is None:
            return False
        self._fence(peer_id)
        return True

    def _tell(self) -> None:
        if self._on_active is not None:
            self._on_active(self.active())


class Pieces(NamedTuple):
    """Absolute addresses on both sides and lengths in bytes, [M] uint64 each."""

    sources_M: Addresses
    targets_M: Addresses
    lengths_M: Addresses


def split(pieces: Pieces, piece_bytes: int) -> Pieces:
    """The same bytes in pieces of at most `piece_bytes`."""
    sources_M, targets_M, lengths_M = pieces
    counts_M = -(-lengths_M.astype(np.int64) // piece_bytes)
    first_M = np.cumsum(counts_M) - counts_M
    total = int(counts_M.sum())
    offsets = ((np.arange(total) - np.repeat(first_M, counts_M)) * piece_bytes).astype(np.uint64)
    left = np.repeat(lengths_M, counts_M) - offsets
    return Pieces(
        np.repeat(sources_M, counts_M) + offsets,
        np.repeat(targets_M, counts_M) + offsets,
        np.minimum(left, np.uint64(piece_bytes)),
    )


def batches(pieces: Pieces, piece_bytes: int, batch_bytes: int, batch_pieces: int) -> Iterator[Pieces]:
    """The same bytes in pieces of at most `piece_bytes`; a batch is as many as its two limits allow, at least one."""
    pieces = split(pieces, piece_bytes)
    ends_M = np.cumsum(pieces.lengths_M, dtype=np.int64)
    start, before = 0, 0
    while start < len(ends_M):
        stop = int(np.searchsorted(ends_M, before + batch_bytes, side="right"))
        stop = min(max(stop, start + 1), start + batch_pieces)
        yield Pieces(*(array[start:stop] for array in pieces))
        start, before = stop, int(ends_M[stop - 1])


def job_pieces(kv_args: KVArgs, peer: PeerMemory, job: Job) -> Pieces:
    """The job as pieces that are contiguous on both sides; for one-sided backends."""
    assert job.target_items is not None
    source = component_memory(kv_args, job.component)
    if job.component == KV_PAGES:
        target = peer.kv_data_ptrs, peer.kv_item_lens
    else:
        target = peer.state_data_ptrs[job.component], peer.state_item_lens[job.component]
    return Pieces(*paired_address_list(*source, job.source_items, *target, job.target_items, job.slices))
