"""Moving experts between ranks while they serve: at a pass that all ranks count to, from loads that they add up.

Shape letters: L layers, E logical experts, P physical experts, N experts under way, B bytes of a slice of one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from layers.moe import eplb
from layers.moe.experts import Experts
from layers.moe.router import GroupedSigmoidRouter
from layers.parallel import ParallelGroup, ParallelGroups

logger = logging.getLogger(__name__)

# Copies that a rebalancing may hold beside the experts, on all ranks together.
_BYTES_UNDER_WAY = 256 * 2**20


class Rebalancer:
    """Counts forward passes; each `interval`th makes a new placement of every layer and moves the weights.

    Every rank makes the same passes in the same order, idle ones too, so all come here at the same pass. What a token
    gets does not change: copies of an expert are the same bits on whatever rank.

    num_hosts, num_groups: see `eplb.plan_hierarchical`.
    """

    def __init__(
        self, layers: Sequence[Experts], groups: ParallelGroups, num_hosts: int = 1, num_groups: int = 1
    ) -> None:
        self.layers = list(layers)
        self.groups = groups
        self.num_hosts = num_hosts
        self.num_groups = num_groups
        self.interval = groups.moe.eplb_rebalance_num_iterations
        self.passes = 0

    @classmethod
    def of(cls, model: nn.Module, groups: ParallelGroups, num_hosts: int = 1) -> Rebalancer | None:
        """For a model's layers of experts; None where rebalancing is off or there are none.

        num_hosts: that the ranks are on, equally many on each.
        """
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if not layers or not groups.moe.enable_eplb:
            return None
        routers = [module for module in model.modules() if isinstance(module, GroupedSigmoidRouter)]
        return cls(layers, groups, num_hosts, routers[0].num_groups if routers else 1)

    def after_pass(self) -> bool:
        """Whether experts were moved; called by every rank after each forward pass, idle ones included."""
        self.passes += 1
        if self.passes % self.interval:
            return False
        self.rebalance()
        return True

    @torch.inference_mode()
    def rebalance(self) -> None:
        group = self.groups.experts
        placements = [layer.placement for layer in self.layers if layer.placement is not None]
        loads_LE = torch.stack([placement.load_E for placement in placements])
        # Ranks of one attention group counted the same rows. They are added all the same: plans have to be equal even
        # if one of them had rounded a router's tie another way.
        loads = self.groups.attention.all_reduce(self.groups.data.all_reduce(loads_LE)).tolist()
        moved = 0
        for layer, placement, load_E in zip(self.layers, placements, loads, strict=True):
            placement.load_E.zero_()
            if not sum(load_E):
                continue
            old = placement.physical_to_logical
            new = eplb.plan_placement(load_E, layer.num_physical, group.size, self.num_hosts, self.num_groups)
            new = eplb.keep_in_place(old, new, group.size)
            moved += move_experts(layer, old, new, group)
            placement.assign(new)
        logger.info("moved %d experts of %d layers (pass %d)", moved, len(placements), self.passes)


def move_experts(experts: Experts, old: Sequence[int], new: Sequence[int], group: ParallelGroup) -> int:
    """Bring every physical expert's weights where `new` wants them; returns how many places changed on all ranks.

    All ranks call it with the same placements [P]. Of each expert only a slice is under way at a time: slices are read
    from all sources before any is written, so that a place can be source and target at once.
    """
    changes = eplb.moves(old, new, group.size)
    per_rank = experts.num_local
    mine = range(experts.first, experts.first + per_rank)
    # Both ends list moves in the order of `changes`, so the bytes need no labels.
    to_rank: list[list[int]] = [[] for _ in range(group.size)]
    from_rank: list[list[int]] = [[] for _ in range(group.size)]
    for source, target in changes:
        if source in mine:
            to_rank[target // per_rank].append(source - experts.first)
        if target in mine:
            from_rank[source // per_rank].append(target - experts.first)
    sources, targets = (sum(lists, []) for lists in (to_rank, from_rank))
    send_counts, receive_counts = ([len(places) for places in lists] for lists in (to_rank, from_rank))
    length = max(1, _BYTES_UNDER_WAY // max(1, len(changes)))
    for part in range(len(experts.storage(0))):
        flat = [experts.storage(local)[part].view(-1).view(torch.uint8) for local in range(per_rank)]
        for start in range(0, flat[0].shape[0], length):
            span = slice(start, start + length)
            sent_NB = torch.empty(len(sources), *flat[0][span].shape, dtype=torch.uint8, device=flat[0].device)
            for row_B, source in zip(sent_NB, sources, strict=True):
                row_B.copy_(flat[source][span])
            received_NB = group.all_to_all(sent_NB, send_counts, receive_counts)
            for row_B, target in zip(received_NB, targets, strict=True):
                flat[target][span] = row_B
    return len(changes)
