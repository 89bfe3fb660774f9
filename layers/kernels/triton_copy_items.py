"""Copying listed items between two sets of memory regions in one launch, by address.

Either side may be memory of this device, of another that is mapped here, or pinned host memory. Shape letters: N items,
R regions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 8192


@dataclass(frozen=True)
class ItemSide:
    """One side of a copy: row t of item n of region r is at bases_R[r] + items_N[n] * item_lens_R[r] + t * row, where
    row is item_lens_R[r] / rows. All int64, in bytes."""

    bases_R: npt.NDArray[np.int64]
    item_lens_R: npt.NDArray[np.int64]
    items_N: npt.NDArray[np.int64]


@triton.jit(do_not_specialize=["num_items", "num_regions", "rows"])
def _copy_kernel(
    table_ptr,
    num_items,
    num_regions,
    rows,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (item and row, region). The table holds [source items, target items, and R numbers of each kind]."""
    item = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    region = tl.program_id(1)
    source_item = tl.load(table_ptr + item)
    target_item = tl.load(table_ptr + num_items + item)
    of_region = table_ptr + 2 * num_items + region
    source = tl.load(of_region) + source_item * tl.load(of_region + 2 * num_regions)
    target = tl.load(of_region + num_regions) + target_item * tl.load(of_region + 3 * num_regions)
    source += row * (tl.load(of_region + 2 * num_regions) // rows)
    target += row * (tl.load(of_region + 3 * num_regions) // rows)
    length = tl.load(of_region + 4 * num_regions) // UNIT
    if UNIT == 16:
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        length *= 2
    elif UNIT == 4:
        source_ptr = source.to(tl.pointer_type(tl.int32))
        target_ptr = target.to(tl.pointer_type(tl.int32))
    else:
        source_ptr = source.to(tl.pointer_type(tl.int8))
        target_ptr = target.to(tl.pointer_type(tl.int8))
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < length), mask=i < length)


def copy_items(
    source: ItemSide, target: ItemSide, rows: int, lengths_R: npt.NDArray[np.int64], device: torch.device
) -> None:
    """Copy lengths_R[r] bytes of every row of every item, on the current stream of `device`; does not wait.

    Both sides list equally many items and regions. On the CPU this runs in Triton's interpreter.
    """
    num_items, num_regions = len(source.items_N), len(lengths_R)
    if not num_items:
        return
    numbers = np.concatenate(
        (
            source.items_N,
            target.items_N,
            source.bases_R,
            target.bases_R,
            source.item_lens_R,
            target.item_lens_R,
            lengths_R,
        )
    )
    unit = _unit(np.concatenate((numbers[2 * num_items :], source.item_lens_R // rows, target.item_lens_R // rows)))
    table = torch.from_numpy(numbers).to(device)
    _copy_kernel[(num_items * rows, num_regions)](
        table,
        num_items,
        num_regions,
        rows,
        UNIT=unit,
        BLOCK=_BLOCK_BYTES // min(unit, 8),
        num_warps=8,
    )


def _unit(numbers: npt.NDArray[np.int64]) -> int:
    """The widest access that all addresses and lengths are multiples of."""
    bits = int(np.bitwise_or.reduce(numbers))
    return next(unit for unit in (16, 4, 1) if bits % unit == 0)
