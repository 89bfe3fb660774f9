"""Parallel groups, built once from the layout and passed into layers. Nothing reads a global rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelGroup:
    """The ranks that share one sharded dimension.

    rank: this process's index in the group, 0 <= rank < size.
    size: number of ranks; with 1 every collective is the identity and `process_group` is None.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

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


@dataclass(frozen=True)
class ParallelGroups:
    """Every group a model needs.

    attention: ranks that split one token's attention heads.
    dense: ranks that split the columns of a dense MLP, the embedding and the LM head.
    experts: ranks that share the routed experts.
    """

    attention: ParallelGroup = field(default_factory=ParallelGroup)
    dense: ParallelGroup = field(default_factory=ParallelGroup)
    experts: ParallelGroup = field(default_factory=ParallelGroup)


SINGLE = ParallelGroups()
