"""Logical experts, which a router chooses, and the physical ones that ranks hold: copies of one or another of them.

Physical expert p lies on rank p // (P / ranks). Every logical expert has at least one copy.

Shape letters: E logical experts, P physical experts, X most copies of one expert, T token rows, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from layers.moe.router import Routing


class ExpertPlacement(nn.Module):
    """One layer's placement. Its tables change in place, so that a CUDA graph sees the new ones.

    choice: "static" sends all rows of a rank to the copy on that rank, or to one of the others where it has none;
        "dynamic" lets a token's row number choose, so that ranks with the same rows choose the same copy.
    load_E: int64, rows that this rank sent to each logical expert, if counts_load; padding rows do not count.
    """

    def __init__(
        self, num_experts: int, num_physical: int, rank: int, num_ranks: int, choice: str, counts_load: bool
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_physical = num_physical
        self.rank = rank
        self.num_ranks = num_ranks
        self.choice = choice
        self.counts_load = counts_load
        self.physical_to_logical: list[int] = []
        most = 1 + num_physical - num_experts
        self.copies_EX: torch.Tensor
        self.num_copies_E: torch.Tensor
        self.own_copy_E: torch.Tensor
        self.load_E: torch.Tensor
        self.register_buffer("copies_EX", torch.zeros(num_experts, most, dtype=torch.int32), persistent=False)
        self.register_buffer("num_copies_E", torch.ones(num_experts, dtype=torch.int32), persistent=False)
        self.register_buffer("own_copy_E", torch.zeros(num_experts, dtype=torch.int32), persistent=False)
        self.register_buffer("load_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.assign([physical % num_experts for physical in range(num_physical)])

    def assign(self, physical_to_logical: Sequence[int]) -> None:
        """Physical expert p becomes a copy of physical_to_logical[p]; ValueError when an expert has none."""
        copies: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, logical in enumerate(physical_to_logical):
            copies[logical].append(physical)
        if len(physical_to_logical) != self.num_physical or not all(copies):
            raise ValueError(
                f"a placement of {len(physical_to_logical)} physical experts with copies of "
                f"{sum(map(bool, copies))} logical ones; there are {self.num_physical} and {self.num_experts}"
            )
        self.physical_to_logical = list(physical_to_logical)
        most = self.copies_EX.shape[1]
        own = [self._own_copy(of_expert) for of_expert in copies]
        self.copies_EX.copy_(torch.tensor([row + row[:1] * (most - len(row)) for row in copies], device="cpu"))
        self.num_copies_E.copy_(torch.tensor([len(row) for row in copies], device="cpu"))
        self.own_copy_E.copy_(torch.tensor(own, device="cpu"))

    def _own_copy(self, copies: list[int]) -> int:
        """The copy on this rank; ranks without one take the copies in turn."""
        per_rank = self.num_physical // self.num_ranks
        holders = [copy // per_rank for copy in copies]
        if self.rank in holders:
            return copies[holders.index(self.rank)]
        without = [rank for rank in range(self.num_ranks) if rank not in holders]
        return copies[without.index(self.rank) % len(copies)]

    def admit(self, routing: Routing) -> Routing:
        """The routing of logical experts as one of physical experts; counts the rows of each on the way."""
        if self.counts_load:
            ids_R = routing.topk_ids.flatten()
            self.load_E.index_add_(0, ids_R.clamp(min=0), (ids_R >= 0).long())
        return Routing(self.to_physical(routing.topk_ids), routing.topk_weights)

    def to_physical(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Physical experts [T, K] int32 for logical ones; -1 stays -1."""
        # A table indexed with -1 would answer with its last entry.
        logical_TK = ids_TK.clamp(min=0)
        if self.choice == "static":
            physical_TK = self.own_copy_E[logical_TK]
        else:
            rows_T1 = torch.arange(ids_TK.shape[0], dtype=torch.int32, device=ids_TK.device)[:, None]
            turn_TK = rows_T1 % self.num_copies_E[logical_TK]
            physical_TK = self.copies_EX[logical_TK, turn_TK]
        return physical_TK.masked_fill(ids_TK < 0, -1)


def fake_choice(num_rows: int, top_k: int, num_experts: int, device: torch.device, data_rank: int = 0) -> torch.Tensor:
    """[T, K] int32: distinct experts, pseudo-random from the numbers of the row and of its data-parallel rank alone and
    evenly spread over both."""
    # The multipliers are two of xxHash (Collet, 2012) for the inputs, and a pair that Wellons's hash prospector (2018)
    # found to mix 32 bits well.
    rows_T1 = (data_rank << 16) + torch.arange(num_rows, device=device)[:, None]
    experts_E = torch.arange(num_experts, device=device)
    mixed_TE = (rows_T1 * 0x9E3779B1 + experts_E * 0x85EBCA77) & 0xFFFFFFFF
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed_TE = ((mixed_TE ^ (mixed_TE >> 15)) * factor) & 0xFFFFFFFF
    return (mixed_TE ^ (mixed_TE >> 15)).topk(top_k, dim=-1).indices.int()
