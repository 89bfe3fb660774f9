"""Ranks as threads of one process: collectives without sockets, for tests of sharded models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from layers.parallel import ParallelGroup, ParallelGroups

T = TypeVar("T")
_TIMEOUT_S = 60


class Exchange:
    """What the ranks of a group meet at."""

    def __init__(self, size: int) -> None:
        self._slots: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)

    def gather(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = x.clone()
        self._barrier.wait()
        parts = [part for part in self._slots if part is not None]
        self._barrier.wait()
        return parts

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadGroup(ParallelGroup):
    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange.gather(self.rank, x)).sum(0))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.exchange.gather(self.rank, x), dim=dim)


def run_ranks(size: int, work: Callable[[ParallelGroups], T]) -> list[T]:
    """`work` on every rank of one group that serves as all groups; results in rank order, the first error raised."""
    exchange = Exchange(size)

    def run(rank: int) -> T:
        group = ThreadGroup(rank, size, None, exchange)
        try:
            return work(ParallelGroups(group, group, group))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
