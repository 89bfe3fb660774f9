"""Device memory for the tcp backend: frames through pinned host memory, or read from another process's device."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from disagg import cuda_ipc
from disagg.base import Indices, KVArgs
from disagg.mover import KV_PAGES, component_memory
from disagg.pages import Slices
from disagg.tcp_memory import FramePart
from disagg.tcp_transport import FrameHeader, ScatterList
from layers.kernels.triton_copy_items import ItemSide, copy_items

_PORTABLE_AND_MAPPED = 3

logger = logging.getLogger(__name__)


class _Copier:
    """Copies in order on a stream of its own; a call returns when its bytes are in place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, source: ItemSide, target: ItemSide, slices: Slices) -> None:
        if self._stream is None:
            copy_items(source, target, slices.rows, slices.lengths_R, self.device)
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            copy_items(source, target, slices.rows, slices.lengths_R, self.device)
            self._stream.synchronize()


def _side(ptrs: Sequence[int], item_lens: Sequence[int], items_N: Indices, offsets_R: Indices) -> ItemSide:
    """The bytes at `offsets_R` of every row of the items."""
    return ItemSide(np.asarray(ptrs, dtype=np.int64) + offsets_R, np.asarray(item_lens, dtype=np.int64), items_N)


def prepare(device: str) -> None:
    """Compile the kernel now: an abort waits for the frame under way, which must not wait for a compiler."""
    copier = _Copier(torch.device(device))
    buffer = torch.zeros(256, dtype=torch.uint8, device=copier.device)
    for item_bytes in (16, 4, 1):
        side = ItemSide(np.array([buffer.data_ptr()]), np.array([item_bytes]), np.arange(2))
        copier.copy(side, side, Slices.whole([item_bytes]))


class _Staging:
    """Host memory for one frame that the device reaches too. Address and size are those of ordinary memory, which
    another process may be allowed to read; what the CUDA allocator hands out it could not."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._array = np.empty(num_bytes, dtype=np.uint8)
        self.address = self._array.ctypes.data
        if device.type == "cuda" and num_bytes:
            with torch.cuda.device(device):
                result = _runtime().cudaHostRegister(self.address, num_bytes, _PORTABLE_AND_MAPPED)
            if int(result):
                raise cuda_ipc.CudaError(int(result), f"cudaHostRegister of {num_bytes} bytes failed: {result}")
            weakref.finalize(self, _unregister, self._array, device).atexit = False


def _unregister(array: npt.NDArray[np.uint8], device: torch.device) -> None:
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(array.ctypes.data)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class DeviceMemory:
    """See FrameMemory: frames go through pinned host memory, which the device's own kernel fills and empties."""

    def __init__(self, device: str) -> None:
        self._copier = _Copier(torch.device(device))
        self._staging = _Staging(0, self._copier.device)

    def outgoing(self, part: FramePart) -> ScatterList:
        source = _side(part.ptrs, part.item_lens, part.items_N, part.slices.source_offsets_R)
        pieces = self.incoming(part)
        self._copier.copy(source, self._staged(part), part.slices)
        return pieces

    def incoming(self, part: FramePart) -> ScatterList:
        if self._staging.num_bytes < part.num_bytes:
            self._staging = _Staging(part.num_bytes, self._copier.device)
        return ScatterList.whole(self._staging.address, part.num_bytes)

    def place(self, part: FramePart) -> None:
        target = _side(part.ptrs, part.item_lens, part.items_N, part.slices.target_offsets_R)
        self._copier.copy(self._staged(part), target, part.slices)

    def _staged(self, part: FramePart) -> ItemSide:
        """The frame's items in stream order, region by region."""
        item_bytes_R = part.slices.item_bytes_R
        region_bytes_R = len(part.items_N) * item_bytes_R
        starts_R = np.cumsum(region_bytes_R) - region_bytes_R
        return ItemSide(self._staging.address + starts_R, item_bytes_R, np.arange(len(part.items_N)))


def make_offer(kv_args: KVArgs) -> bytes:
    """What a decode rank on this host needs to read this rank's device memory; empty where that cannot be shared."""
    memory = [component_memory(kv_args, component) for component in range(KV_PAGES, len(kv_args.state))]
    try:
        offer = cuda_ipc.offer([ptrs for ptrs, _ in memory], [lens for _, lens in memory], torch.device(kv_args.device))
    except cuda_ipc.CudaError as error:
        logger.warning("device memory cannot be shared with other processes, it will go through the host: %s", error)
        return b""
    return msgspec.msgpack.encode(offer)


class RemoteDevice:
    """A prefill rank's device memory, read by this rank's device. Raises OSError where that is not possible."""

    def __init__(self, offer: bytes, device: str) -> None:
        self._copier = _Copier(torch.device(device))
        self._mapped = cuda_ipc.MappedOffer(msgspec.msgpack.decode(offer, type=cuda_ipc.Offer), self._copier.device)

    def fetch(self, header: FrameHeader, source_items: Indices, part: FramePart) -> None:
        """Copy the frame's items to `part`."""
        regions = slice(header.region_start, header.region_start + header.num_regions)
        ptrs = self._mapped.component_ptrs[header.component + 1][regions]
        item_lens = self._mapped.component_item_lens[header.component + 1][regions]
        source = _side(ptrs, item_lens, source_items, part.slices.source_offsets_R)
        target = _side(part.ptrs, part.item_lens, part.items_N, part.slices.target_offsets_R)
        self._copier.copy(source, target, part.slices)

    def close(self) -> None:
        self._mapped.close()
