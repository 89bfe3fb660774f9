"""Rows to the ranks that own their experts and the experts' outputs back, by collectives of torch.distributed.

Serves gloo on CPUs and NCCL on GPUs, across hosts too. The outputs travel unsummed, one row for each expert of a token,
so that a token's sum is formed on its own rank in one order: the same bits however the experts are spread.

Shape letters: T token rows of this rank, N rows received, K experts of a token, P (token, expert) pairs, R ranks,
H hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from layers.moe.experts import Experts
from layers.moe.grouping import Grouped, local_ids, run_experts
from layers.moe.packing import pack_rows, unpack_rows
from layers.parallel import ParallelGroup


class RowExchange(Protocol):
    """Every rank of the group makes the same call, with zero rows too."""

    def run(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        experts: Experts,
        fixed_rows: int | None,
        weights_TK: torch.Tensor | None = None,
    ) -> Grouped:
        """The outputs of each row's experts, wherever these are; zeros for an id of -1.

        ids_TK: int32, physical experts. weights_TK: see `run_experts`.
        fixed_rows: None exchanges counts first, which waits for the device. A number, the same on all ranks and at
            least T of each, fixes every shape, so that nothing waits and a CUDA graph can hold it.
        """


class CollectiveExchange:
    """See RowExchange."""

    def __init__(self, group: ParallelGroup) -> None:
        self.group = group

    def run(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        experts: Experts,
        fixed_rows: int | None,
        weights_TK: torch.Tensor | None = None,
    ) -> Grouped:
        factors = () if weights_TK is None else (weights_TK,)
        if fixed_rows is None:
            return self._counted(x_TH, ids_TK, factors, experts)
        return self._fixed(x_TH, ids_TK, factors, experts, fixed_rows)

    def _counted(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, factors: tuple[torch.Tensor, ...], experts: Experts
    ) -> Grouped:
        """A row goes once to each rank that owns one of its experts."""
        group, device = self.group, x_TH.device
        owner_TK = ids_TK.div(experts.num_local, rounding_mode="floor")
        owned_TKR = owner_TK[..., None] == torch.arange(group.size, device=device)
        goes_TR = owned_TKR.any(dim=1)
        pairs_to = owned_TKR.sum(dim=(0, 1)).tolist()
        rows_to_R = goes_TR.sum(dim=0)
        rows_to, rows_from = rows_to_R.tolist(), group.all_to_all(rows_to_R).tolist()

        tokens_N = goes_TR.T.nonzero()[:, 1]
        packed = pack_rows(*(part[tokens_N] for part in (ids_TK, *factors, x_TH)))
        packed = group.all_to_all(packed, rows_to, rows_from)
        ids_NK, *factors_NK, x_NH = unpack_rows(packed, (ids_TK, *factors, x_TH))

        local_NK = local_ids(ids_NK, experts)
        grouped = run_experts(x_NH, local_NK, experts, *factors_NK)
        here_NK = local_NK < experts.num_local
        pairs_from = [int(part.sum()) for part in here_NK.split(rows_from)]
        y_PH = group.all_to_all(grouped.y_RH[grouped.places_TK[here_NK]], pairs_from, pairs_to)
        # Pairs come back by rank, and of one rank in the order they went: that of tokens, then of a token's experts.
        order_P = owner_TK.flatten().argsort(stable=True)[owner_TK.numel() - y_PH.shape[0] :]
        places_P = torch.full((owner_TK.numel(),), y_PH.shape[0], device=device)
        places_P[order_P] = torch.arange(y_PH.shape[0], device=device)
        return Grouped(torch.cat((y_PH, y_PH.new_zeros(1, y_PH.shape[1]))), places_P.view(owner_TK.shape))

    def _fixed(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        factors: tuple[torch.Tensor, ...],
        experts: Experts,
        rows: int,
    ) -> Grouped:
        """Every rank gets all rows, which with this few is no more than each rank's share filled up to one size."""
        (num_tokens, top_k), hidden = ids_TK.shape, x_TH.shape[1]
        parts = (ids_TK, *factors, x_TH)
        filled = [part.new_zeros(rows, part.shape[1]) for part in parts]
        filled[0].fill_(-1)
        for whole, part in zip(filled, parts, strict=True):
            whole[:num_tokens] = part
        packed = self.group.all_gather(pack_rows(*filled), dim=0)
        ids_NK, *factors_NK, x_NH = unpack_rows(packed, parts)
        grouped = run_experts(x_NH, local_ids(ids_NK, experts), experts, *factors_NK)
        # One rank has a pair's output and the others zeros, so this sum rounds nothing.
        y_NKH = grouped.y_RH[grouped.places_TK]
        y_PH = self.group.reduce_scatter(y_NKH).view(rows * top_k, hidden)
        places_TK = torch.arange(num_tokens * top_k, device=x_TH.device).view(num_tokens, top_k)
        return Grouped(y_PH, places_TK)
