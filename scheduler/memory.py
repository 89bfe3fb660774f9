"""KV memory of one rank: pages, the prefix cache and the request table, behind the few transitions that move them.

Freed pages may be handed out while a launched forward pass still reads them: everything a later pass does is ordered
after it on the one stream, so nothing is overwritten early.
"""

from __future__ import annotations

import numpy as np
import torch

from scheduler.page_allocator import PageAllocator
from scheduler.radix_cache import PageKey, RadixCache
from scheduler.request import Request, Residence


class MemoryLeak(RuntimeError):
    """Pages or rows that nobody accounts for, or that are counted twice."""


class KVMemory:
    """Owner of every page and row.

    table [1 + max_requests, context_length] int32 on the device: the KV slot of each position; row 0 is padding.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        context_length: int,
        device: torch.device,
        *,
        use_prefix_cache: bool = True,
    ) -> None:
        self.page_size = page_size
        self.use_prefix_cache = use_prefix_cache
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache()
        self.table = torch.zeros(1 + max_requests, context_length, dtype=torch.int32, device=device)
        self.max_requests = max_requests
        self._free_rows = list(range(max_requests, 0, -1))
        self._page_offsets = np.arange(page_size, dtype=np.int32)

    @property
    def total_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def available_pages(self) -> int:
        """Pages that an allocation can have: free ones and those the cache would give up."""
        return self.allocator.num_free + self.cache.num_evictable

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # Transitions

    def admit(self, request: Request, keys: list[PageKey]) -> Residence | None:
        """Room for all of the request's tokens, starting from what the cache has of `keys`; None if it does not fit.

        keys: whole pages that may come from the cache; the caller leaves at least one token to compute.
        """
        if not self._free_rows:
            return None
        shared, node = self.cache.match(keys)
        # Locked before eviction, which must not take what was just matched.
        self.cache.lock(node)
        wanted = self.pages_for(request.num_tokens) - len(shared)
        if wanted > self.available_pages:
            self.cache.unlock(node)
            return None
        own = self._allocate(wanted)
        row = self._free_rows.pop()
        residence = Residence(row, shared + own, len(shared), node, len(shared) * self.page_size)
        if shared:
            self._write_table(row, 0, shared)
        return residence

    def map(self, residence: Residence) -> None:
        """Enter all pages into the request table, for a request whose KV no step of this rank will compute."""
        self._write_table(residence.row, 0, residence.pages)

    def grow(self, residence: Residence) -> None:
        """One more page of its own; MemoryError when none is available."""
        residence.pages.extend(self._allocate(1))

    def share(self, residence: Residence, keys: list[PageKey]) -> None:
        """Give the computed whole pages of a resident request to the cache and keep reading them from there.

        keys: the request's page keys, whole pages with all their KV computed.
        """
        if not self.use_prefix_cache or len(keys) <= residence.shared_pages:
            return
        kept, duplicates, node = self.cache.insert(keys, residence.pages[: len(keys)])
        self.cache.lock(node)
        self.cache.unlock(residence.node)
        if duplicates:
            # Someone else computed the same tokens meanwhile: read theirs, give ours back.
            self._write_table(residence.row, residence.shared_pages, kept[residence.shared_pages :])
            self.allocator.free(duplicates)
        residence.pages[: len(keys)] = kept
        residence.shared_pages = len(keys)
        residence.node = node

    def release(self, residence: Residence, keys: list[PageKey] | None = None) -> None:
        """End of a residence. keys: whole computed pages worth keeping in the cache, None to keep only what it has."""
        if keys is not None:
            self.share(residence, keys)
        self.cache.unlock(residence.node)
        self.allocator.free(residence.pages[residence.shared_pages :])
        self._free_rows.append(residence.row)
        residence.pages = []

    def flush_cache(self) -> None:
        """Forget every cached prefix that no live request reads."""
        self.allocator.free(self.cache.evict(self.cache.num_evictable))

    def check(self, residences: list[Residence]) -> None:
        """MemoryLeak unless free, evictable, locked and privately owned pages add up, and rows too."""
        private = sum(len(residence.pages) - residence.shared_pages for residence in residences)
        free, evictable, locked = self.allocator.num_free, self.cache.num_evictable, self.cache.num_locked
        total = self.allocator.num_pages
        if free + evictable + locked + private != total or (not residences and locked):
            raise MemoryLeak(
                f"KV pages: free {free} + evictable {evictable} + locked {locked} + private {private} of "
                f"{len(residences)} requests is not the total {total}"
            )
        if len(self._free_rows) + len(residences) != self.max_requests:
            rows = len(self._free_rows)
            raise MemoryLeak(f"request rows: free {rows} + used {len(residences)} is not the total {self.max_requests}")

    def slot(self, residence: Residence, position: int) -> int:
        return residence.pages[position // self.page_size] * self.page_size + position % self.page_size

    def slots(self, residence: Residence, start: int, end: int) -> np.ndarray:
        """KV slots of positions start..end-1, int64."""
        first = start // self.page_size
        pages = np.asarray(residence.pages[first : self.pages_for(end)], dtype=np.int64)
        flat = (pages[:, None] * self.page_size + self._page_offsets).reshape(-1)
        return flat[start - first * self.page_size : end - first * self.page_size]

    def _allocate(self, count: int) -> list[int]:
        short = count - self.allocator.num_free
        if short > 0:
            self.allocator.free(self.cache.evict(short))
        return self.allocator.allocate(count)

    def _write_table(self, row: int, first_page: int, pages: list[int]) -> None:
        flat = (np.asarray(pages, dtype=np.int32)[:, None] * self.page_size + self._page_offsets).reshape(-1)
        start = first_page * self.page_size
        slots = torch.from_numpy(flat)
        if self.table.is_cuda:
            slots = slots.pin_memory()  # a copy from pageable memory would wait for every launched step
        self.table[row, start : start + flat.size].copy_(slots, non_blocking=True)
