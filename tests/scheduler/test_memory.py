"""Property tests of the page allocator, the radix cache and the transitions of KVMemory against plain models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.memory import KVMemory, MemoryLeak
from scheduler.messages import GenerateRequest, SamplingParams
from scheduler.page_allocator import PageAllocator
from scheduler.radix_cache import RadixCache, RadixNode, page_keys
from scheduler.request import Request

PAGE = 2


@given(st.lists(st.integers(-6, 6), max_size=60))
def test_allocator_gives_each_page_once(operations: list[int]) -> None:
    allocator, held = PageAllocator(20), []
    for operation in operations:
        if operation >= 0:
            if operation > allocator.num_free:
                with pytest.raises(MemoryError):
                    allocator.allocate(operation)
                continue
            pages = allocator.allocate(operation)
            assert len(pages) == operation
            assert not set(pages) & set(held)
            held += pages
        else:
            back, held = held[:-operation], held[-operation:]
            allocator.free(back)
        assert allocator.num_free + len(held) == 20
        assert 0 not in held


@pytest.mark.parametrize("page", [0, 3, 21, -1])
def test_allocator_refuses_what_it_did_not_give(page: int) -> None:
    allocator = PageAllocator(20)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=f"KV page {page} freed twice or out of range"):
        allocator.free([page])


def walk(cache: RadixCache) -> list[RadixNode]:
    nodes, stack = [], list(cache.root.children.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += node.children.values()
    return nodes


def check_tree(cache: RadixCache) -> None:
    evictable = locked = 0
    for node in walk(cache):
        assert node.keys
        assert len(node.keys) == len(node.pages)
        assert node.parent is not None
        assert node.parent.children[node.keys[0]] is node
        if node.parent is not cache.root:
            assert node.parent.locks >= node.locks
        if node.locks:
            locked += len(node.pages)
        else:
            evictable += len(node.pages)
    assert (cache.num_evictable, cache.num_locked) == (evictable, locked)


SEQUENCES = st.lists(st.integers(0, 1), min_size=0, max_size=14)


@given(st.lists(st.tuples(st.sampled_from(["insert", "match", "lock", "unlock", "evict"]), SEQUENCES), max_size=40))
@settings(max_examples=300)
def test_radix_cache_against_a_dictionary(operations: list[tuple[str, list[int]]]) -> None:
    cache = RadixCache()
    model: dict[tuple[bytes, ...], int] = {}  # every cached prefix -> its last page
    locks: list[tuple[RadixNode, tuple[bytes, ...]]] = []
    next_page = 1
    for kind, tokens in operations:
        keys = page_keys(tokens, PAGE)
        prefixes = [tuple(keys[: i + 1]) for i in range(len(keys))]
        if kind == "insert":
            pages = list(range(next_page, next_page + len(keys)))
            next_page += len(keys)
            kept, duplicates, _ = cache.insert(keys, pages)
            known = [prefix for prefix in prefixes if prefix in model]
            assert duplicates == pages[: len(known)]
            for prefix, page in zip(prefixes, pages, strict=True):
                model.setdefault(prefix, page)
            assert kept == [model[prefix] for prefix in prefixes]
        elif kind in ("match", "lock"):
            expected = [model[prefix] for prefix in prefixes if prefix in model]
            assert cache.match_length(keys) == len(expected)
            pages, node = cache.match(keys)
            assert pages == expected
            if kind == "lock":
                cache.lock(node)
                locks.append((node, tuple(keys[: len(pages)])))
        elif kind == "unlock" and locks:
            cache.unlock(locks.pop()[0])
        elif kind == "evict":
            wanted, before = len(tokens), cache.num_evictable
            evicted = cache.evict(wanted)
            assert len(evicted) == min(wanted, before)
            gone = {prefix for prefix, page in model.items() if page in evicted}
            for prefix in gone:
                del model[prefix]
            for _, held in locks:  # nothing that is read was taken
                assert all(held[: i + 1] in model for i in range(len(held)))
            for prefix in model:  # what is left is still reachable
                assert prefix[:-1] in model or len(prefix) == 1
        check_tree(cache)
        assert cache.num_pages == len(model)


def test_eviction_is_least_recently_used_first() -> None:
    cache = RadixCache()
    for first in (1, 2, 3):
        cache.insert(page_keys([first, first], PAGE), [first])
    cache.match(page_keys([1, 1], PAGE))
    assert cache.evict(2) == [2, 3]


def test_unlock_without_lock_is_an_error() -> None:
    cache = RadixCache()
    _, _, node = cache.insert(page_keys([1, 1], PAGE), [1])
    with pytest.raises(ValueError, match="unlocked more often"):
        cache.unlock(node)


def make_request(rid: str, tokens: list[int]) -> Request:
    return Request(GenerateRequest(rid, tokens, SamplingParams(4, 0)))


def make_memory(pages: int = 8, rows: int = 4) -> KVMemory:
    return KVMemory(pages, PAGE, rows, 16, torch.device("cpu"))


def test_admit_uses_the_cached_prefix_and_writes_its_slots() -> None:
    memory = make_memory()
    first = memory.admit(make_request("a", [1, 2, 3, 4, 5]), [])
    assert first is not None
    memory.release(first, page_keys([1, 2, 3, 4], PAGE))
    second = memory.admit(make_request("b", [1, 2, 3, 4, 6]), page_keys([1, 2, 3, 4], PAGE))
    assert second is not None
    assert (second.computed, second.shared_pages) == (4, 2)
    expected = [page * PAGE + offset for page in second.pages[:2] for offset in range(PAGE)]
    assert memory.table[second.row, :4].tolist() == expected
    assert memory.slots(second, 1, 5).tolist() == [memory.slot(second, position) for position in range(1, 5)]
    memory.check([second])


def test_equal_tokens_computed_twice_end_on_the_same_pages() -> None:
    memory = make_memory()
    a, b = (memory.admit(make_request(rid, [1, 2, 3, 4, 5]), []) for rid in "ab")
    assert a is not None
    assert b is not None
    keys = page_keys([1, 2, 3, 4], PAGE)
    memory.share(a, keys)
    free = memory.allocator.num_free
    memory.share(b, keys)
    assert b.pages[:2] == a.pages[:2]
    assert memory.allocator.num_free == free + 2
    assert memory.table[b.row, :4].tolist() == memory.slots(a, 0, 4).tolist()
    memory.check([a, b])
    memory.release(a)
    memory.release(b)
    memory.check([])
    assert memory.cache.num_evictable == 2


def test_admit_does_not_evict_what_it_matched() -> None:
    memory = make_memory(pages=3)
    first = memory.admit(make_request("a", [1, 2, 3, 4]), [])
    assert first is not None
    keys = page_keys([1, 2, 3, 4], PAGE)
    memory.release(first, keys)
    request = make_request("b", [1, 2, 3, 4, 5, 6, 7])
    assert memory.admit(request, keys) is None  # needs two pages beside the two cached, one is free
    memory.check([])
    assert memory.cache.num_evictable == 2


def test_leaks_are_reported_with_the_sums() -> None:
    memory = make_memory()
    residence = memory.admit(make_request("a", [1, 2, 3]), [])
    assert residence is not None
    with pytest.raises(MemoryLeak, match=r"free 6 .* is not the total 8"):
        memory.check([])
