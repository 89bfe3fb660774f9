"""Page lists to memory addresses, without a Python step per page.

Shape letters: N pages of a list, M runs of adjacent pages, R memory regions, T rows of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.base import Indices

Addresses = npt.NDArray[np.uint64]


def contiguous_runs(*lists_N: Indices) -> tuple[list[Indices], Indices]:
    """Cut equally long page lists where any of them stops counting up by one.

    Returns the first page of each run [M] for every list, and the run lengths [M] in pages.
    """
    length = len(lists_N[0])
    if any(len(pages) != length for pages in lists_N):
        raise ValueError(f"page lists must be equally long, got {[len(pages) for pages in lists_N]}")
    if length == 0:
        empty = np.zeros(0, dtype=np.int64)
        return [empty for _ in lists_N], empty
    breaks = np.zeros(length - 1, dtype=bool)
    for pages in lists_N:
        breaks |= np.diff(pages) != 1
    starts_M = np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)
    lengths_M = np.diff(np.append(starts_M, length))
    return [pages[starts_M] for pages in lists_N], lengths_M


@dataclass(frozen=True)
class Slices:
    """Which bytes of an item travel, for each of R regions.

    An item is `rows` equal rows. Of a row of region r, lengths_R[r] bytes at source_offsets_R[r] of the prefill side's
    row go to target_offsets_R[r] of the decode side's row.
    """

    rows: int
    source_offsets_R: Indices
    target_offsets_R: Indices
    lengths_R: Indices

    @classmethod
    def whole(cls, item_lens: Sequence[int]) -> Slices:
        """Items that are equal on both sides."""
        zeros = np.zeros(len(item_lens), dtype=np.int64)
        return cls(1, zeros, zeros, np.asarray(item_lens, dtype=np.int64))

    @property
    def item_bytes_R(self) -> Indices:
        """Bytes of one item that travel."""
        return self.rows * self.lengths_R

    def mirrored(self) -> Slices:
        """The same bytes, with the decode side's rows as the source."""
        return Slices(self.rows, self.target_offsets_R, self.source_offsets_R, self.lengths_R)

    def regions(self, part: slice) -> Slices:
        return Slices(self.rows, self.source_offsets_R[part], self.target_offsets_R[part], self.lengths_R[part])


def address_list(ptrs: Sequence[int], item_lens: Sequence[int], pages_N: Indices) -> tuple[Addresses, Addresses]:
    """Addresses and byte lengths, [R * M] each, of `pages_N` in every region, region by region."""
    (starts_M,), lengths_M = contiguous_runs(pages_N)
    return _addresses(ptrs, item_lens, starts_M).ravel(), _run_bytes(item_lens, lengths_M).ravel()


def sliced_address_list(
    ptrs: Sequence[int], item_lens: Sequence[int], pages_N: Indices, rows: int, offsets_R: Indices, lengths_R: Indices
) -> tuple[Addresses, Addresses]:
    """As address_list, of the `lengths_R` bytes at `offsets_R` of every row; a piece a row unless rows go whole."""
    if np.array_equal(lengths_R * rows, item_lens):
        return address_list(ptrs, item_lens, pages_N)
    addresses_RNT = _row_addresses(ptrs, item_lens, pages_N, rows, offsets_R)
    return addresses_RNT.ravel(), _row_bytes(lengths_R, len(pages_N), rows)


def paired_address_list(
    source_ptrs: Sequence[int],
    source_item_lens: Sequence[int],
    source_N: Indices,
    target_ptrs: Sequence[int],
    target_item_lens: Sequence[int],
    target_N: Indices,
    slices: Slices,
) -> tuple[Addresses, Addresses, Addresses]:
    """Addresses on both sides and byte lengths of the pieces that are contiguous on both, region by region."""
    item_bytes_R = slices.item_bytes_R
    if np.array_equal(item_bytes_R, source_item_lens) and np.array_equal(item_bytes_R, target_item_lens):
        (sources_M, targets_M), lengths_M = contiguous_runs(source_N, target_N)
        return (
            _addresses(source_ptrs, source_item_lens, sources_M).ravel(),
            _addresses(target_ptrs, target_item_lens, targets_M).ravel(),
            _run_bytes(source_item_lens, lengths_M).ravel(),
        )
    rows = slices.rows
    sources_RNT = _row_addresses(source_ptrs, source_item_lens, source_N, rows, slices.source_offsets_R)
    targets_RNT = _row_addresses(target_ptrs, target_item_lens, target_N, rows, slices.target_offsets_R)
    return sources_RNT.ravel(), targets_RNT.ravel(), _row_bytes(slices.lengths_R, len(source_N), rows)


def _addresses(ptrs: Sequence[int], item_lens: Sequence[int], items_M: Indices) -> Addresses:
    ptrs_R1 = np.asarray(ptrs, dtype=np.uint64)[:, None]
    items_R1 = np.asarray(item_lens, dtype=np.uint64)[:, None]
    addresses_RM: Addresses = ptrs_R1 + items_R1 * items_M.astype(np.uint64)[None, :]
    return addresses_RM


def _run_bytes(item_lens: Sequence[int], lengths_M: Indices) -> Addresses:
    bytes_RM: Addresses = np.asarray(item_lens, dtype=np.uint64)[:, None] * lengths_M.astype(np.uint64)[None, :]
    return bytes_RM


def _row_addresses(
    ptrs: Sequence[int], item_lens: Sequence[int], items_N: Indices, rows: int, offsets_R: Indices
) -> Addresses:
    row_lens_R = np.asarray(item_lens, dtype=np.uint64) // np.uint64(rows)
    starts_RN = _addresses(ptrs, item_lens, items_N) + offsets_R.astype(np.uint64)[:, None]
    addresses_RNT: Addresses = (
        starts_RN[:, :, None] + row_lens_R[:, None, None] * np.arange(rows, dtype=np.uint64)[None, None, :]
    )
    return addresses_RNT


def _row_bytes(lengths_R: Indices, num_items: int, rows: int) -> Addresses:
    return np.repeat(lengths_R.astype(np.uint64), num_items * rows)


def check_pages(what: str, pages_N: Indices, data_lens: Sequence[int], item_lens: Sequence[int]) -> None:
    """Raise ValueError if an index lies outside the regions; an address made from it would be someone else's memory."""
    if not len(pages_N):
        return
    limit = min((length // item for length, item in zip(data_lens, item_lens, strict=True)), default=0)
    low, high = int(pages_N.min()), int(pages_N.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} indices must lie in 0..{limit - 1}, got {low if low < 0 else high}")
