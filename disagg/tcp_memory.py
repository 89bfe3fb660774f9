"""Where the tcp backend's frames come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from disagg.base import Indices, KVArgs
from disagg.mover import component_memory
from disagg.pages import Slices, sliced_address_list
from disagg.tcp_transport import FrameHeader, ScatterList


class FramePart(NamedTuple):
    """The memory of one frame on one side: listed items of some regions, and which bytes of them."""

    ptrs: Sequence[int]
    item_lens: Sequence[int]
    items_N: Indices
    slices: Slices

    @property
    def num_bytes(self) -> int:
        return len(self.items_N) * int(self.slices.item_bytes_R.sum())


def frame_part(kv_args: KVArgs, header: FrameHeader, items_N: Indices, slices: Slices) -> FramePart:
    """The part of a component that a header names; `items_N` are the frame's, `slices` are the whole component's."""
    regions = slice(header.region_start, header.region_start + header.num_regions)
    ptrs, item_lens = component_memory(kv_args, header.component)
    return FramePart(ptrs[regions], item_lens[regions], items_N, slices.regions(regions))


class FrameMemory(Protocol):
    """Access to this rank's memory; one for each connection."""

    def outgoing(self, part: FramePart) -> ScatterList:
        """The bytes of a frame to send, good until the next call."""

    def incoming(self, part: FramePart) -> ScatterList:
        """Where to put the bytes of a frame, good until the next call."""

    def place(self, part: FramePart) -> None:
        """incoming() is filled."""


class HostMemory:
    """Bytes go straight from and to the regions."""

    def outgoing(self, part: FramePart) -> ScatterList:
        slices = part.slices
        return ScatterList(
            *sliced_address_list(
                part.ptrs, part.item_lens, part.items_N, slices.rows, slices.source_offsets_R, slices.lengths_R
            )
        )

    def incoming(self, part: FramePart) -> ScatterList:
        slices = part.slices
        return ScatterList(
            *sliced_address_list(
                part.ptrs, part.item_lens, part.items_N, slices.rows, slices.target_offsets_R, slices.lengths_R
            )
        )

    def place(self, part: FramePart) -> None:
        """Every byte was read to its place."""


def frame_memory(device: str) -> FrameMemory:
    """For one connection; device as in KVArgs."""
    if device == "cpu":
        return HostMemory()
    from disagg.tcp_device import DeviceMemory  # loads PyTorch and Triton, which host memory does without

    return DeviceMemory(device)
