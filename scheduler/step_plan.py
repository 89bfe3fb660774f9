"""What the ranks of an engine with data-parallel attention agree on before each step.

Every rank puts one row of integers into a table, and from the whole table each derives the same plan. Expert layers
exchange rows over all ranks, so a rank with nothing to do runs an idle pass whenever another has rows, and nothing that
chooses a collective may depend on anything but the plan.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from layers.forward_batch import ForwardMode, StepRows
from layers.parallel_layout import ParallelLayout
from scheduler.messages import RequestOutput
from scheduler.scheduler import Scheduler


class Desync(RuntimeError):
    """A rank is not where the others of its group are."""


class StepState(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal on all ranks when a step begins. tokens: a checksum of those the last step gave out."""

    live_requests: int = 0
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, outputs: Sequence[RequestOutput]) -> StepState:
        tokens = array("q", (token for output in outputs for token in output.token_ids))
        return cls(
            len(scheduler.requests),
            len(scheduler.waiting),
            len(scheduler.prefilling),
            len(scheduler.decoding),
            scheduler.memory.allocator.num_free,
            scheduler.memory.cache.num_evictable,
            zlib.crc32(tokens.tobytes()),
        )


class StepRow(NamedTuple):
    """One rank's contribution.

    step: how many plans this rank has made. mode: of its batch, a `ForwardMode`; IDLE without one.
    num_tokens, num_requests: of its batch. can_replay: whether it could run its batch, or an idle one, as a CUDA graph.
    results_pending: whether a step of it is under way. largest_graph: the most requests for which it has a CUDA graph.
    The others describe the scheduler, see `StepState`.
    """

    step: int
    mode: int
    num_tokens: int
    num_requests: int
    can_replay: int
    results_pending: int
    largest_graph: int
    live_requests: int
    waiting: int
    prefilling: int
    decoding: int
    free_pages: int
    evictable_pages: int
    tokens: int


@dataclass(frozen=True)
class StepPlan:
    """The same on every rank.

    num_tokens: rows of each data-parallel rank. extends: whether any rank computes prompt tokens.
    graph_size: requests of the CUDA graph that every rank replays; 0 when all run eagerly.
    any_live: whether any rank has a live request. any_pending: whether any has a step under way.
    """

    num_tokens: tuple[int, ...]
    extends: bool
    graph_size: int
    any_live: bool
    any_pending: bool

    @property
    def runs(self) -> bool:
        """Whether every rank makes a pass, an idle one where it has no rows."""
        return any(self.num_tokens)

    def rows(self) -> StepRows:
        if self.graph_size:
            return StepRows(self.num_tokens, "max", self.graph_size, self.extends)
        return StepRows(self.num_tokens, "sum", extends=self.extends)


def make_plan(table: Sequence[StepRow], layout: ParallelLayout, graph_sizes: Sequence[int]) -> StepPlan:
    """The plan of a table in rank order.

    graph_sizes: ascending numbers of requests for which every rank has a CUDA graph. Desync when ranks are at different
    steps or have different graphs, or ranks of one data-parallel group, which have the same requests, differ in
    anything. What passes is the same plan on every rank: all that it depends on is in the table.
    """
    _check(table, layout)
    leaders = [table[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
    return StepPlan(
        num_tokens=tuple(row.num_tokens for row in leaders),
        extends=any(row.mode == ForwardMode.EXTEND for row in leaders),
        graph_size=_graph_size(leaders, graph_sizes),
        any_live=any(row.live_requests for row in leaders),
        any_pending=any(row.results_pending for row in leaders),
    )


def _graph_size(leaders: Sequence[StepRow], graph_sizes: Sequence[int]) -> int:
    """The smallest graph that holds the largest batch: one rank that cannot replay makes all run eagerly."""
    largest = max(row.num_requests for row in leaders)
    if not all(row.can_replay for row in leaders) or not graph_sizes or largest > graph_sizes[-1]:
        return 0
    return graph_sizes[bisect_left(graph_sizes, max(1, largest))]


def _check(table: Sequence[StepRow], layout: ParallelLayout) -> None:
    for rank, row in enumerate(table):
        if row.step != table[0].step:
            raise Desync(f"rank 0 is at step {table[0].step}, rank {rank} at step {row.step}")
        if row.largest_graph != table[0].largest_graph:
            raise Desync(
                f"step {row.step}: largest_graph is {table[0].largest_graph} on rank 0 and {row.largest_graph} on rank "
                f"{rank}"
            )
        leader = layout.leader(layout.place(rank).dp_rank)
        if row != table[leader]:
            name, theirs, own = first_difference(table[leader], row)
            raise Desync(f"step {row.step}: {name} is {theirs} on rank {leader} and {own} on rank {rank}")


def first_difference(one: StepState | StepRow, other: StepState | StepRow) -> tuple[str, int, int]:
    """(field, one's value, other's value) of the first field in which two values of one type differ."""
    fields = StepRow._fields if isinstance(one, StepRow) else StepState.__struct_fields__
    differing = next(name for name in fields if getattr(one, name) != getattr(other, name))
    return differing, getattr(one, differing), getattr(other, differing)
