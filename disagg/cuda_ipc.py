"""Device memory of another process on this host, mapped into this one through the CUDA driver."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

import msgspec
import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class Allocation(msgspec.Struct, frozen=True):
    """One allocation of the offering process: its handle, and where it lies there."""

    handle: bytes
    address: int
    num_bytes: int


class Offer(msgspec.Struct, frozen=True):
    """Memory regions that another process may map; regions of each component by their addresses in the offerer.

    device: the offerer's number of the device.
    """

    pid: int
    device: int
    allocations: list[Allocation]
    component_ptrs: list[list[int]]
    component_item_lens: list[list[int]]


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class CudaError(OSError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.POINTER(ctypes.c_uint64)
    driver.cuMemGetAddressRange_v2.argtypes = [pointer, ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    return driver


def _check(call: str, result: int) -> None:
    if result:
        raise CudaError(result, f"{call} failed with CUDA driver error {result}")


def offer(component_ptrs: list[list[int]], component_item_lens: list[list[int]], device: torch.device) -> Offer:
    """Handles of the allocations that the regions lie in. Raises CudaError where they cannot be shared."""
    allocations: list[Allocation] = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context that of this thread
        for ptr in (ptr for ptrs in component_ptrs for ptr in ptrs):
            if any(held.address <= ptr < held.address + held.num_bytes for held in allocations):
                continue
            base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
            result = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ptr)
            _check("cuMemGetAddressRange", result)
            _check("cuIpcGetMemHandle", _driver().cuIpcGetMemHandle(ctypes.byref(handle), base))
            allocations.append(Allocation(bytes(handle.reserved), base.value, size.value))
    return Offer(os.getpid(), _index(device), allocations, component_ptrs, component_item_lens)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def enable_peer_access(reader: torch.device, source: torch.device) -> None:
    """Let kernels on `reader` use this process's memory on `source`."""
    if reader != source:
        # torch enables the access of the device that it copies from.
        torch.zeros(1, device=reader).to(source)
        torch.cuda.synchronize(reader)


class _Mappings:
    """Open handles of this process; one that is open already must not be opened again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], tuple[int, int]] = {}

    def open(self, handle: bytes, device: int) -> int:
        with self._lock:
            address, users = self._open.get((handle, device), (0, 0))
            if not users:
                opened = ctypes.c_uint64()
                copied = _Handle.from_buffer_copy(handle)
                _check(
                    "cuIpcOpenMemHandle",
                    _driver().cuIpcOpenMemHandle_v2(ctypes.byref(opened), copied, _LAZY_PEER_ACCESS),
                )
                address = opened.value
            self._open[handle, device] = address, users + 1
            return address

    def close(self, handle: bytes, device: int) -> None:
        with self._lock:
            address, users = self._open.pop((handle, device))
            if users > 1:
                self._open[handle, device] = address, users - 1
            else:
                _check("cuIpcCloseMemHandle", _driver().cuIpcCloseMemHandle(address))


_mappings = _Mappings()


class MappedOffer:
    """An offer whose regions can be read from `device`. Raises CudaError where they cannot be.

    component_ptrs: the regions' addresses in this process.
    """

    def __init__(self, offered: Offer, device: torch.device) -> None:
        self._device = device
        self._index = _index(device)
        self._handles: list[bytes] = []
        self.component_item_lens = offered.component_item_lens
        if offered.pid == os.getpid():
            # A process cannot map its own memory a second time, and need not.
            enable_peer_access(torch.device("cuda", self._index), torch.device("cuda", offered.device))
            self.component_ptrs = offered.component_ptrs
            return
        mapped: list[tuple[Allocation, int]] = []
        try:
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                for allocation in offered.allocations:
                    mapped.append((allocation, _mappings.open(allocation.handle, self._index)))
                    self._handles.append(allocation.handle)
            self.component_ptrs = [
                [_translate(ptr, mapped) for ptr in component_ptrs] for component_ptrs in offered.component_ptrs
            ]
        except CudaError:
            self.close()
            raise

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            while self._handles:
                _mappings.close(self._handles.pop(), self._index)


def _translate(ptr: int, mapped: list[tuple[Allocation, int]]) -> int:
    for allocation, address in mapped:
        if allocation.address <= ptr < allocation.address + allocation.num_bytes:
            return address + ptr - allocation.address
    raise CudaError(0, f"region at {ptr:#x} lies in no offered allocation")
