"""The experts of one rank applied to token rows: rows sorted by expert, run, and found again.

Shape letters: T token rows, K experts of a token, R rows sorted by expert, H hidden size, E experts of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from layers.moe.experts import Experts


class Grouped(NamedTuple):
    """y_RH: outputs in the order of the experts. places_TK [T, K] int64: the row with the output of a token's k-th
    expert; where that expert is not on this rank, a row of zeros."""

    y_RH: torch.Tensor
    places_TK: torch.Tensor


def local_ids(ids_TK: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Numbers of physical experts as numbers of this rank's own, [T, K] int32; the count of these for all others."""
    ids_TK = ids_TK - experts.first
    return ids_TK.masked_fill_((ids_TK < 0) | (ids_TK >= experts.num_local), experts.num_local)


def run_experts(
    x_TH: torch.Tensor,
    local_ids_TK: torch.Tensor,
    experts: Experts,
    weights_TK: torch.Tensor | None = None,
    all_local: bool = False,
) -> Grouped:
    """Every expert's output for each of its tokens. local_ids_TK: see `local_ids`.

    weights_TK: float32 factors of what goes into an expert's down projection.
    all_local: the caller knows that all experts chosen are on this rank.
    """
    num_tokens, top_k = local_ids_TK.shape
    num_local = experts.num_local
    if x_TH.is_cuda:
        from layers.kernels import triton_moe

        tokens_R, places_TK, expert_ends_E = triton_moe.sort_by_expert(local_ids_TK, num_local)
        weights_R = None
        if weights_TK is not None:
            weights_R = torch.empty_like(weights_TK).flatten().index_copy_(0, places_TK.flatten(), weights_TK.flatten())
        return Grouped(experts(x_TH.index_select(0, tokens_R), expert_ends_E, weights_R, not all_local), places_TK)
    # Stable, so that the rows of an expert are in token order whatever the device.
    sorted_R, order_R = local_ids_TK.flatten().sort(stable=True)
    bounds_E = torch.arange(1, num_local + 1, dtype=sorted_R.dtype)
    expert_ends_E = torch.searchsorted(sorted_R, bounds_E, out_int32=True)
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(order_R.shape[0])
    # Of the rows without an expert here one is kept: its zeros stand for all of them.
    own = int(expert_ends_E[-1])
    order_R = order_R[: own + 1]
    weights_R = None if weights_TK is None else weights_TK.flatten()[order_R]
    y_RH = experts(x_TH[order_R // top_k], expert_ends_E, weights_R)
    return Grouped(y_RH, places_R.clamp_(max=own).view(num_tokens, top_k))


def weighted_sum(grouped: Grouped, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, H] in `dtype`: each token's outputs times their weights (float32), added in the order of its experts."""
    if grouped.y_RH.is_cuda:
        from layers.kernels import triton_moe

        return triton_moe.weighted_sum(grouped.y_RH, grouped.places_TK, weights_TK, dtype)
    y_TKH = grouped.y_RH[grouped.places_TK].float()
    return (y_TKH * weights_TK[..., None]).sum(dim=1).to(dtype)
