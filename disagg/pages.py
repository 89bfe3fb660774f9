"""Page lists to memory addresses, without a Python step per page.

Shape letters: N pages of a list, M runs of adjacent pages, R memory regions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from disagg.base import Indices

Addresses = npt.NDArray[np.uint64]


def page_count(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens take from a page-aligned start."""
    return -(-num_tokens // page_size)


def slots_to_pages(slots: npt.NDArray[np.int64], page_size: int) -> Indices:
    """Pages of token slots that start on a page: every page_size-th slot, divided by page_size."""
    if len(slots) and slots[0] % page_size:
        raise ValueError(f"slots must start on a page of {page_size}, the first is {int(slots[0])}")
    pages: Indices = slots[::page_size] // page_size
    return pages


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


def address_list(ptrs: Sequence[int], item_lens: Sequence[int], pages_N: Indices) -> tuple[Addresses, Addresses]:
    """Addresses and byte lengths, [R * M] each, of `pages_N` in every region, region by region."""
    (starts_M,), lengths_M = contiguous_runs(pages_N)
    ptrs_R1 = np.asarray(ptrs, dtype=np.uint64)[:, None]
    items_R1 = np.asarray(item_lens, dtype=np.uint64)[:, None]
    addresses = ptrs_R1 + items_R1 * starts_M.astype(np.uint64)[None, :]
    lengths = items_R1 * lengths_M.astype(np.uint64)[None, :]
    return addresses.ravel(), lengths.ravel()


def check_pages(what: str, pages_N: Indices, data_lens: Sequence[int], item_lens: Sequence[int]) -> None:
    """Raise ValueError if an index lies outside the regions; an address made from it would be someone else's memory."""
    if not len(pages_N):
        return
    limit = min((length // item for length, item in zip(data_lens, item_lens, strict=True)), default=0)
    low, high = int(pages_N.min()), int(pages_N.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} indices must lie in 0..{limit - 1}, got {low if low < 0 else high}")
