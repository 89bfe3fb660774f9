"""Prefix cache: a radix tree over whole pages of tokens.

An edge holds one or more pages; its key is the token ids of those pages, page by page. A path from the root spells a
prefix whose KV is in the pages along the way. A node is locked while a live request reads it; a locked node locks its
ancestors. Only unlocked leaves are evicted, least recently used first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import count

PageKey = bytes


def page_keys(token_ids: Sequence[int], page_size: int, limit: int | None = None) -> list[PageKey]:
    """Keys of the whole pages of `token_ids`, of its first `limit` tokens when given."""
    end = len(token_ids) if limit is None else min(limit, len(token_ids))
    packed = array("q", token_ids[: end // page_size * page_size]).tobytes()
    width = 8 * page_size
    return [packed[i : i + width] for i in range(0, len(packed), width)]


class RadixNode:
    """`keys[i]` are the tokens whose KV is in page `pages[i]`; `locks` counts live readers at or below this node."""

    __slots__ = ("children", "keys", "last_used", "locks", "pages", "parent")

    def __init__(self, keys: list[PageKey], pages: list[int], parent: RadixNode | None, last_used: int) -> None:
        self.keys = keys
        self.pages = pages
        self.parent = parent
        self.children: dict[PageKey, RadixNode] = {}
        self.locks = 0
        self.last_used = last_used


class RadixCache:
    """The tree owns the pages inserted into it until it evicts them."""

    def __init__(self) -> None:
        self._clock = count(1)
        self.root = RadixNode([], [], None, 0)
        self.root.locks = 1  # never evicted
        self.num_evictable = 0
        self.num_locked = 0

    @property
    def num_pages(self) -> int:
        return self.num_evictable + self.num_locked

    def match(self, keys: list[PageKey]) -> tuple[list[int], RadixNode]:
        """Pages of the longest cached prefix of `keys`, and the node where it ends (split there if need be).

        The caller locks the node before anything can evict it.
        """
        node, pages, position = self.root, [], 0
        now = next(self._clock)
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                break
            shared = self._shared_length(child, keys, position)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.last_used = now
            pages.extend(child.pages)
            position += shared
            node = child
        return pages, node

    def match_length(self, keys: list[PageKey]) -> int:
        """Pages that `match` would return, without touching the tree."""
        node, position = self.root, 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                break
            shared = self._shared_length(child, keys, position)
            position += shared
            if shared < len(child.keys):
                break
            node = child
        return position

    def insert(self, keys: list[PageKey], pages: list[int]) -> tuple[list[int], list[int], RadixNode]:
        """Give the tree `pages[i]` for `keys[i]`.

        Returns (kept, duplicates, node). kept: the tree's page for each key. duplicates: those of `pages` that the tree
        did not take because it holds another page for that key; they stay the caller's, who frees them. node: the end
        of the path.
        """
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        kept, node = self.match(keys)
        duplicates = [mine for mine, tree in zip(pages, kept, strict=False) if mine != tree]
        known = len(kept)
        if known < len(keys):
            child = RadixNode(keys[known:], pages[known:], node, next(self._clock))
            node.children[keys[known]] = child
            self.num_evictable += len(child.pages)
            kept = kept + pages[known:]
            node = child
        return kept, duplicates, node

    def lock(self, node: RadixNode) -> None:
        """Keep the node and its ancestors from eviction until the matching `unlock`."""
        walk: RadixNode | None = node
        while walk is not None and walk is not self.root:
            if walk.locks == 0:
                self.num_evictable -= len(walk.pages)
                self.num_locked += len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: RadixNode) -> None:
        walk: RadixNode | None = node
        while walk is not None and walk is not self.root:
            if walk.locks == 0:
                raise ValueError("radix node unlocked more often than locked")
            walk.locks -= 1
            if walk.locks == 0:
                self.num_evictable += len(walk.pages)
                self.num_locked -= len(walk.pages)
            walk = walk.parent

    def evict(self, wanted: int) -> list[int]:
        """Pages of least recently used unlocked leaves, at least `wanted` of them if there are as many."""
        if wanted <= 0 or self.num_evictable == 0:
            return []
        order = count()
        heap = [(node.last_used, next(order), node) for node in self._leaves() if node.locks == 0]
        heapq.heapify(heap)
        evicted: list[int] = []
        while heap and len(evicted) < wanted:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            # A long edge is cut from its end, so that a small want does not throw away a long prefix.
            surplus = max(0, len(node.pages) - (wanted - len(evicted)))
            evicted.extend(node.pages[surplus:])
            self.num_evictable -= len(node.pages) - surplus
            if surplus:
                del node.pages[surplus:], node.keys[surplus:]
                continue
            del parent.children[node.keys[0]]
            if not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.last_used, next(order), parent))
        return evicted

    def _leaves(self) -> list[RadixNode]:
        leaves, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves

    @staticmethod
    def _shared_length(child: RadixNode, keys: list[PageKey], position: int) -> int:
        limit = min(len(child.keys), len(keys) - position)
        shared = 1  # the first page is how the child was found
        while shared < limit and child.keys[shared] == keys[position + shared]:
            shared += 1
        return shared

    def _split(self, child: RadixNode, at: int) -> RadixNode:
        """Cut an edge after `at` pages; returns the new upper node. Readers keep pointing at the lower one."""
        parent = child.parent
        assert parent is not None
        upper = RadixNode(child.keys[:at], child.pages[:at], parent, child.last_used)
        upper.locks = child.locks
        upper.children[child.keys[at]] = child
        parent.children[child.keys[0]] = upper
        child.keys, child.pages, child.parent = child.keys[at:], child.pages[at:], upper
        return upper
