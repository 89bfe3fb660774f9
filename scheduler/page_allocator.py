"""Which KV pages are free. A page is `page_size` consecutive slots; page 0 is padding and is never given out."""

from __future__ import annotations


class PageAllocator:
    """A stack of free page ids, with a mark a page so that a double free is an error and not a corruption."""

    def __init__(self, num_pages: int) -> None:
        """num_pages: pages to give out, ids 1..num_pages."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least one KV page is needed")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._is_free = bytearray([0]) + bytearray([1]) * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids. MemoryError when fewer are free; the caller evicts or retracts beforehand."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. ValueError on a page that is already free or was never given out."""
        for page in pages:
            if not 1 <= page <= self.num_pages or self._is_free[page]:
                raise ValueError(f"KV page {page} freed twice or out of range 1..{self.num_pages}")
            self._is_free[page] = 1
        self._free.extend(pages)
