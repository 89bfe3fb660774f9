"""Checksums for one-sided backends: of what the prefill rank has written and of what the decode rank then has."""

from __future__ import annotations

from disagg.base import Indices, KVArgs
from disagg.mover import component_memory
from disagg.pages import Slices
from disagg.tcp_memory import FramePart, frame_memory

_PART_BYTES = 8 << 20


def checksum_differs(found: int, sent: int) -> str:
    return f"checksum {found:#010x} of the received bytes, sent {sent:#010x}"


def memory_checksum(kv_args: KVArgs, component: int, items_N: Indices, slices: Slices) -> int:
    """CRC-32 of the bytes that `slices` takes from the items as a source, equal for equal bytes on both sides.

    Raises OSError or RuntimeError if the memory cannot be read.
    """
    ptrs, item_lens = component_memory(kv_args, component)
    memory = frame_memory(kv_args.device)
    step = max(1, _PART_BYTES // int(slices.item_bytes_R.sum()))
    value = 0
    for start in range(0, len(items_N), step):
        part = FramePart(ptrs, item_lens, items_N[start : start + step], slices)
        value = memory.outgoing(part).checksum(value)
    return value
