"""Building the groups of a `ParallelLayout` on torch.distributed, once, when a rank starts.

Tensors travel over NCCL between GPUs and over gloo between CPUs. What ranks agree on as plain integers goes over gloo
in groups of its own, so that it never waits for the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from layers.parallel import ParallelGroup, ParallelGroups
from layers.parallel_layout import ParallelLayout, RankPlace

# Through one of these ranks find each other.
Store: TypeAlias = dist.TCPStore | dist.PrefixStore

# Newer versions of torch warn about the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# gloo raises plain RuntimeErrors.
_PEER_LOSS = re.compile(
    r"Connection closed by peer \S+|Connection reset by peer|Broken pipe|Timed out waiting \S+ for \w+ operation[^\n]*"
    r"|Connection was likely closed|Application timeout[^\n]*|NCCL[^\n]*(?:remote|timeout|unhandled system)[^\n]*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class HostGroup:
    """Ranks that agree on integers; every rank makes the same calls in the same order.

    RuntimeError when a rank of the group is gone, or does not come within the time-out the groups were built with.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def min_reduce(self, values: Sequence[int]) -> list[int]:
        """The smallest of the ranks' values, place by place; lists of one length."""
        if self.size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.process_group)
        return tensor.tolist()

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in rank order; lists of one length."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.int64)
        table = torch.empty(self.size * own.shape[0], dtype=torch.int64)
        _all_gather(table, own, group=self.process_group)
        return table.view(self.size, -1).tolist()


@dataclass(frozen=True)
class RankGroups:
    """All groups of one rank. model: what layers get. attention, world: for the scheduler.

    local_rank, local_size: this rank's number among the ranks on its host, and how many those are.
    replica, num_replicas: which of several engines with requests of their own and nothing in common this is.
    """

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    replica: int = 0
    num_replicas: int = 1
    model: ParallelGroups = field(default_factory=ParallelGroups)
    attention: HostGroup = field(default_factory=HostGroup)
    world: HostGroup = field(default_factory=HostGroup)

    @property
    def place(self) -> RankPlace:
        return self.layout.place(self.rank)

    def of_replica(self, replica: int, num_replicas: int, local_size: int) -> RankGroups:
        """The same ranks as one of several replicas. local_size: ranks of all replicas on each host."""
        if num_replicas == 1:
            return self
        return replace(
            self,
            local_rank=(replica * self.layout.tp_size + self.rank) % local_size,
            local_size=local_size,
            replica=replica,
            num_replicas=num_replicas,
        )

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank that others see, among those of all replicas."""
        return self.replica * self.layout.dp_size + self.place.dp_rank

    @property
    def dp_size(self) -> int:
        return self.num_replicas * self.layout.dp_size


ALONE = RankGroups()


def open_store(host: str, port: int, *, listen_fd: int | None, timeout: float) -> Store:
    """Connects to the store of the engine's ranks.

    listen_fd: its listening socket, given to the one rank that it lives in. timeout: seconds to wait for it, and for
    keys in it. dist.DistError when it cannot be reached.
    """
    if listen_fd is None:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def prefixed(store: Store, prefix: str) -> Store:
    """The same store with keys of its own."""
    return dist.PrefixStore(prefix, store)


def build(
    layout: ParallelLayout,
    rank: int,
    store: Store,
    device: torch.device,
    timeout: float,
    local_size: int | None = None,
) -> RankGroups:
    """Rank `rank`'s groups; returns when every rank of the layout has called it.

    device: where the model is. timeout: seconds that a rank waits for the others, here and in every collective.
    local_size: ranks on each host, None when all are on one.
    """
    local_size = local_size or layout.tp_size
    if layout.tp_size == 1:
        return RankGroups(layout)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.tp_size, timeout=limit)
    backend = "nccl" if device.type == "cuda" else "gloo"
    made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def own_group(partition: list[list[int]], backend: str, purpose: str) -> tuple[int, int, dist.ProcessGroup | None]:
        """(rank in its list, length of the list, group); groups are made by all ranks of the world, in one order."""
        for ranks in partition:
            key = (f"{purpose} {backend}", tuple(ranks))
            if len(ranks) > 1 and key not in made:
                made[key] = dist.new_group(ranks, timeout=limit, backend=backend)
        ranks = next(ranks for ranks in partition if rank in ranks)
        return ranks.index(rank), len(ranks), made.get((f"{purpose} {backend}", tuple(ranks)))

    def model_group(partition: list[list[int]]) -> ParallelGroup:
        ranks = next(ranks for ranks in partition if rank in ranks)
        one_host = len({member // local_size for member in ranks}) == 1
        return ParallelGroup(*own_group(partition, backend, "model"), one_host)

    world = [list(range(layout.tp_size))]
    attention = model_group(layout.attention_groups())
    model = ParallelGroups(
        attention=attention,
        dense=model_group(layout.dense_groups()),
        experts=model_group(layout.expert_groups()),
        expert_columns=model_group(layout.expert_tp_groups()),
        data=model_group(layout.dp_groups()),
    )
    return RankGroups(
        layout,
        rank,
        local_rank=rank % local_size,
        local_size=local_size,
        model=model,
        attention=HostGroup(*own_group(layout.attention_groups(), "gloo", "host")),
        world=HostGroup(*own_group(world, "gloo", "host")),
    )


def peer_loss(error: BaseException) -> str | None:
    """What a collective says of a rank that is gone or late, in one line; None for any other error."""
    if not isinstance(error, (RuntimeError, dist.DistError)):
        return None
    found = _PEER_LOSS.search(str(error))
    return found and found.group(0)
