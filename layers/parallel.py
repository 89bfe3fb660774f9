"""Parallel groups, built once from the layout and passed into layers. Nothing reads a global rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from layers.moe_options import MoEOptions

# Newer versions of torch warn about the older name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share one sharded dimension.

    rank: this process's index in the group, 0 <= rank < size.
    size: number of ranks; with 1 every collective is the identity and `process_group` is None.
    one_host: whether all its ranks run on one host.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    one_host: bool = True

    def shard(self, total: int, what: str) -> int:
        """Length of one rank's equal share of `total`; ValueError naming `what` when it does not divide."""
        if total % self.size:
            raise ValueError(f"{what} is {total}, which does not divide into {self.size} ranks")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, in place; same shape and dtype."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' equal-shaped tensors concatenated along `dim` in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=dim)

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The rows the ranks sent to this one, in rank order; `x` has the rows for rank 0, then those for rank 1, ...

        send_counts, receive_counts: rows for and from each rank; without them every rank gets an equal share.
        """
        if self.size == 1:
            return x
        rows = x.shape[0] if receive_counts is None else sum(receive_counts)
        out = x.new_empty(rows, *x.shape[1:])
        splits = [None if counts is None else list(counts) for counts in (receive_counts, send_counts)]
        dist.all_to_all_single(out, x.contiguous(), *splits, group=self.process_group)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's equal share of the rows of the ranks' sum."""
        if self.size == 1:
            return x
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _reduce_scatter(out, x.contiguous(), group=self.process_group)
        return out

    def gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The ranks' rows one after another; `counts` are the rows of each rank, the same list on every rank."""
        if min(counts) == max(counts):
            return self.all_gather(x, dim=0)
        repeated = x.repeat(self.size, *(1 for _ in x.shape[1:]))
        return self.all_to_all(repeated, [x.shape[0]] * self.size, counts)

    def reduce_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The way back from `gather_rows`: the sum of what the ranks have for this rank's rows."""
        if min(counts) == max(counts):
            return self.reduce_scatter(x)
        own = counts[self.rank]
        parts = self.all_to_all(x, counts, [own] * self.size)
        return parts.view(self.size, own, *x.shape[1:]).sum(dim=0)


@dataclass(frozen=True)
class ParallelGroups:
    """Every group a model needs.

    attention: ranks that split one token's attention heads.
    dense: ranks that split the columns of a dense MLP, the embedding and the LM head.
    experts: ranks that share the routed experts, each with whole experts or the same columns of them.
    expert_columns: ranks that split the columns of the same experts.
    data: ranks with the same heads and requests of their own (data-parallel attention).
    moe: how rows reach the ranks that hold their experts.
    """

    attention: ParallelGroup = field(default_factory=ParallelGroup)
    dense: ParallelGroup = field(default_factory=ParallelGroup)
    experts: ParallelGroup = field(default_factory=ParallelGroup)
    expert_columns: ParallelGroup = field(default_factory=ParallelGroup)
    data: ParallelGroup = field(default_factory=ParallelGroup)
    moe: MoEOptions = field(default_factory=MoEOptions)


SINGLE = ParallelGroups()
