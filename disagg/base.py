"""What every KV manager offers: moving one request's pages, state and metadata row from prefill to decode memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Role = Literal["prefill", "decode"]


class KVPoll(IntEnum):
    """State of one room on one rank. The order matters: ranks reduce their states with MIN."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVTransferError(Exception):
    """The transfer of one room failed; other rooms are not affected.

    unfit: the two servers cannot work together as they were started, so that trying again is of no use.
    """

    def __init__(self, room: int, reason: str, unfit: bool = False) -> None:
        super().__init__(f"KV transfer of room {room} failed: {reason}")
        self.room = room
        self.reason = reason
        self.unfit = unfit


@dataclass
class StateComponent:
    """One named kind of per-request state beside the KV pages, with its own index lists.

    Region i starts at address data_ptrs[i], is data_lens[i] bytes long and is cut into items of item_lens[i] bytes.
    head_rows: 0 if all ranks of a TP group hold the same bytes; else an item is that many rows, each row the KV heads
        of its rank one after the other, as in the pages.
    """

    name: str
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    head_rows: int = 0


@dataclass
class KVArgs:
    """The memory one rank exposes to its KV manager, and what both sides must agree on.

    kv_data_ptrs, kv_data_lens, kv_item_lens, kv_layer_ids: one entry a memory region, lengths in bytes; one item is
        one page of one region.
    kv_dtype, kv_layout: compared as text between the two sides.
    kv_head_num, total_kv_head_num: key/value heads of this rank and of the whole model.
    state: state components in the order of their index lists.
    aux_*: the metadata row arrays; one item is one row.
    """

    model: str
    page_size: int
    kv_dtype: str
    kv_layout: str
    kv_head_num: int
    total_kv_head_num: int
    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    kv_layer_ids: list[int]
    aux_data_ptrs: list[int]
    aux_data_lens: list[int]
    aux_item_lens: list[int]
    state: list[StateComponent] = field(default_factory=list)
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: str = "cpu"

    @property
    def state_types(self) -> list[str]:
        return [component.name for component in self.state]

    def __post_init__(self) -> None:
        _check_regions("kv", self.kv_data_ptrs, self.kv_data_lens, self.kv_item_lens)
        _check_regions("aux", self.aux_data_ptrs, self.aux_data_lens, self.aux_item_lens)
        for component in self.state:
            _check_regions(f"state {component.name}", component.data_ptrs, component.data_lens, component.item_lens)
        if len(self.kv_layer_ids) != len(self.kv_data_ptrs):
            raise ValueError(f"kv_layer_ids has {len(self.kv_layer_ids)} entries for {len(self.kv_data_ptrs)} regions")


def _check_regions(what: str, ptrs: list[int], lens: list[int], item_lens: list[int]) -> None:
    if not len(ptrs) == len(lens) == len(item_lens):
        raise ValueError(
            f"{what}_data_ptrs, {what}_data_lens and {what}_item_lens must be equally long, "
            f"they have {len(ptrs)}, {len(lens)} and {len(item_lens)} entries"
        )
    for i, (length, item) in enumerate(zip(lens, item_lens, strict=True)):
        if item <= 0 or length % item:
            raise ValueError(f"{what} region {i}: length {length} is not a multiple of its item length {item}")


@dataclass(frozen=True)
class TransferOptions:
    """Settings of a KV manager; times in seconds, sizes in bytes.

    host: the address this rank listens on and tells its peers.
    num_connections: bulk connections from one prefill rank to one decode rank.
    frame_bytes: largest piece sent under one header; an abort takes effect between pieces on the sending side.
    same_host_path: use a unix socket where both ranks run on one host.
    checksum: of a prefill rank: have the decode rank compare a CRC-32 of all it was sent; a mismatch fails its request
        alone.
    bootstrap_timeout: from the creation of a sender or receiver until its peer is known.
    waiting_timeout: from the decode side's claim until the prefill server has the request too, queued or not.
    heartbeat_interval, heartbeat_failures: a peer that says nothing for interval * failures is taken as dead.
    release_grace, release_timeout: with backends whose prefill side writes into decode memory, how long pages of an
        ended transfer are held back after its prefill process was seen to end, and how long its host may not answer
        before that counts as its end. While the process is only stopped they are held back.
    tombstone_time: how long a concluded room answers late messages with its conclusion.
    ib_device: RDMA devices of the mooncake backend, separated by commas; empty means TCP.
    """

    host: str = "127.0.0.1"
    num_connections: int = 2
    frame_bytes: int = 8 << 20
    same_host_path: bool = True
    checksum: bool = False
    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    heartbeat_interval: float = 2.0
    heartbeat_failures: int = 3
    release_grace: float = 1.0
    release_timeout: float = 30.0
    tombstone_time: float = 120.0
    ib_device: str = ""

    @property
    def silence_limit(self) -> float:
        """Seconds after which a peer that says nothing is taken as dead."""
        return self.heartbeat_interval * self.heartbeat_failures


class KVSender(Protocol):
    """Prefill side of one room."""

    def skip_pages(self) -> int:
        """Pages at the start of the prompt that the decode side already has; known from WaitingForInput on."""

    def init(self, num_pages: int, aux_index: int) -> None:
        """Announce how many pages all sends together carry and which metadata row goes with the last one.

        `num_pages` leaves out the skipped pages.
        """

    def send(
        self, page_indices: Indices, state_indices: Sequence[Indices] = (), last: bool = False, note: bytes = b""
    ) -> None:
        """Push the next pages; returns at once. The last send may carry no page; state and `note` go with it.

        `state_indices` has one list a state component. `note` is any number of opaque bytes that arrive with the
        metadata row. The pages must stay as they are until poll() gives Success or Failed; the metadata row is read
        before this returns.
        """

    def poll(self) -> KVPoll: ...

    def failure(self) -> KVTransferError:
        """Why the room failed; clears it."""

    def abort(self, reason: str = "aborted") -> None:
        """Fail the room on both sides. Pages of the prefill side may be reused at once."""

    def clear(self) -> None:
        """Forget the room. Late messages for it are answered or ignored, never acted on."""


class KVReceiver(Protocol):
    """Decode side of one room."""

    def init(self, prefill_dp_rank: int = 0) -> None:
        """Begin to find the peer; returns at once, poll() tells when it is known.

        prefill_dp_rank: the data-parallel rank of the prefill server that has the request; -1 for the room modulo their
        number, which is where a prefill server with several puts it.
        """

    def send_metadata(
        self, page_indices: Indices, aux_index: int, state_indices: Sequence[Indices] = (), skip_pages: int = 0
    ) -> None:
        """Tell the prefill side where its pages, metadata row and state go. Needs WaitingForInput.

        The first `skip_pages` pages of the prompt are here already; `page_indices` holds the others.
        """

    def poll(self) -> KVPoll: ...

    def note(self) -> bytes:
        """The sender's note; after Success."""

    def failure(self) -> KVTransferError:
        """Why the room failed; clears it."""

    def abort(self, reason: str = "aborted") -> None:
        """Fail the room on both sides."""

    def release_safe(self) -> bool:
        """After abort(), failure or clear(): whether no writer can touch the pages any more."""

    def clear(self) -> None:
        """Forget the room, as for the sender."""


class KVManager(Protocol):
    """One rank's end of a transfer backend. `kv_args` is kept as given.

    wake_fd: an eventfd, readable after the state of any room changed (or its pages became safe to release). Whoever
        waits on it drains it with os.eventfd_read and polls its rooms.
    """

    kv_args: KVArgs
    wake_fd: int

    def create_sender(self, room: int) -> KVSender: ...

    def create_receiver(self, room: int, bootstrap_addr: str) -> KVReceiver:
        """`bootstrap_addr` is host:port of the prefill server's bootstrap server."""

    def num_rooms(self) -> int:
        """Rooms not yet cleared, for the idle check."""

    def close(self) -> None:
        """Fail what is left, end all threads and sockets."""


MAX_ROOM = 2**63 - 1


def check_room(room: int) -> None:
    """Room 0 marks a metadata row that is not written yet, so it cannot name a transfer."""
    if not isinstance(room, int) or isinstance(room, bool) or not 1 <= room <= MAX_ROOM:
        raise ValueError(f"bootstrap_room must be an integer from 1 to {MAX_ROOM}, got {room!r}")
