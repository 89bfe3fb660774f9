"""How rows get to the ranks that hold their experts and back: dispatch and combine.

Shape letters: T token rows, K experts of a token, R rows sorted by expert, H hidden size, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from layers.moe.router import Routing
from layers.parallel import ParallelGroup


@dataclass(frozen=True)
class Dispatched:
    """The rows this rank's experts work on, and what brings the results home.

    x_RH: one row for every (token, expert) pair, sorted by expert; rows of experts elsewhere, if any, come last.
    expert_ends_E: [E] int32, where the rows of each expert of this rank end.
    metadata: the backend's own, for `combine`.
    """

    x_RH: torch.Tensor
    expert_ends_E: torch.Tensor
    metadata: Any


class MoEBackend(Protocol):
    """Both calls are made by every rank of the group in every MoE layer of a pass, with zero rows too."""

    def dispatch(self, x_TH: torch.Tensor, routing: Routing) -> Dispatched:
        """Send each row to its experts. ValueError unless routing is int32 ids and float32 weights."""

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """[T, H] in y's dtype: each token's weighted sum of its experts' outputs, accumulated in float32."""


@dataclass(frozen=True)
class LocalMetadata:
    """places_TK [T, K] int64: row of R with the result of a token's k-th expert. topk_weights_TK: float32."""

    places_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


class NoneBackend:
    """No exchange of rows: every rank of the group has all tokens, runs its own experts, and the results are summed."""

    def __init__(self, num_experts: int, group: ParallelGroup) -> None:
        self.group = group
        self.num_local = group.shard(num_experts, "the number of experts")
        self.first = group.rank * self.num_local

    def dispatch(self, x_TH: torch.Tensor, routing: Routing) -> Dispatched:
        check_routing(routing)
        top_k = routing.topk_ids.shape[1]
        local_R = routing.topk_ids.flatten()
        if self.group.size > 1:
            local_R = local_R - self.first
            # Experts of other ranks get the number after the last own one, which sorts them behind.
            foreign_R = (local_R < 0) | (local_R >= self.num_local)
            local_R = local_R.masked_fill(foreign_R, self.num_local)
        if x_TH.is_cuda:
            from layers.kernels import triton_moe

            ids_TK = local_R.view(-1, top_k)
            tokens_R, places_TK, expert_ends_E = triton_moe.sort_by_expert(ids_TK, self.num_local)
            metadata = LocalMetadata(places_TK, routing.topk_weights)
            return Dispatched(x_TH.index_select(0, tokens_R), expert_ends_E, metadata)
        # Stable, so that the rows of an expert are in token order whatever the device.
        sorted_R, order_R = local_R.sort(stable=True)
        bounds_E = torch.arange(1, self.num_local + 1, dtype=sorted_R.dtype, device=sorted_R.device)
        expert_ends_E = torch.searchsorted(sorted_R, bounds_E, out_int32=True)
        places_R = torch.empty_like(order_R)
        places_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
        metadata = LocalMetadata(places_R.view(-1, top_k), routing.topk_weights)
        return Dispatched(x_TH[order_R // top_k], expert_ends_E, metadata)

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        metadata: LocalMetadata = dispatched.metadata
        if y_RH.is_cuda:
            from layers.kernels import triton_moe

            # Ranks add their float32 sums before rounding; alone there is nothing to add.
            dtype = torch.float32 if self.group.size > 1 else y_RH.dtype
            summed_TH = triton_moe.weighted_sum(y_RH, metadata.places_TK, metadata.topk_weights_TK, dtype)
            return self.group.all_reduce(summed_TH).to(y_RH.dtype)
        # Gathered in the router's order, so that a token's sum does not depend on where its rows were sorted to.
        y_TKH = y_RH[metadata.places_TK].float()
        out_TH = (y_TKH * metadata.topk_weights_TK[..., None]).sum(dim=1)
        return self.group.all_reduce(out_TH).to(y_RH.dtype)


def check_routing(routing: Routing) -> None:
    """The contract at a backend's door; ids of another width would be read as garbage further on."""
    if routing.topk_ids.dtype != torch.int32 or routing.topk_weights.dtype != torch.float32:
        raise ValueError(
            f"routing has ids of {routing.topk_ids.dtype} and weights of {routing.topk_weights.dtype}; "
            "expected torch.int32 and torch.float32"
        )
