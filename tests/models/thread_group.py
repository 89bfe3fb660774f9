"""Ranks as threads of one process: collectives without sockets, for tests of sharded models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.parallel_layout import ParallelLayout

T = TypeVar("T")
_TIMEOUT_S = 120


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

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        sent = [x.shape[0] // self.size] * self.size if send_counts is None else list(send_counts)
        assert sum(sent) == x.shape[0]
        tables = self.exchange.gather(self.rank, torch.tensor(sent))
        parts = [
            part.split(table.tolist())[self.rank]
            for part, table in zip(self.exchange.gather(self.rank, x), tables, strict=True)
        ]
        assert receive_counts is None or [part.shape[0] for part in parts] == list(receive_counts)
        return torch.cat(parts)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange.gather(self.rank, x)).sum(0).chunk(self.size)[self.rank]


def run_ranks(size: int, work: Callable[[ParallelGroups], T]) -> list[T]:
    """`work` on every rank of one group that serves as all groups; results in rank order, the first error raised."""
    return run_layout(ParallelLayout(size), work)


def run_layout(layout: ParallelLayout, work: Callable[[ParallelGroups], T], moe: MoEOptions | None = None) -> list[T]:
    """`work` on every rank with the groups of the layout; results in rank order, the first error raised."""
    exchanges: dict[tuple[str, tuple[int, ...]], Exchange] = {}

    def group_of(rank: int, purpose: str, partition: list[list[int]]) -> ParallelGroup:
        ranks = next(ranks for ranks in partition if rank in ranks)
        if len(ranks) == 1:
            return ParallelGroup()
        exchange = exchanges.setdefault((purpose, tuple(ranks)), Exchange(len(ranks)))
        return ThreadGroup(ranks.index(rank), len(ranks), exchange=exchange)

    def groups_of(rank: int) -> ParallelGroups:
        return ParallelGroups(
            attention=group_of(rank, "attention", layout.attention_groups()),
            dense=group_of(rank, "dense", layout.dense_groups()),
            experts=group_of(rank, "experts", layout.expert_groups()),
            expert_columns=group_of(rank, "expert columns", layout.expert_tp_groups()),
            data=group_of(rank, "data", layout.dp_groups()),
            moe=moe or MoEOptions(),
        )

    def run(groups: ParallelGroups) -> T:
        try:
            return work(groups)
        except BaseException:
            for exchange in exchanges.values():
                exchange.abort()
            raise

    with ThreadPoolExecutor(layout.tp_size) as pool:
        return list(pool.map(run, [groups_of(rank) for rank in range(layout.tp_size)]))
