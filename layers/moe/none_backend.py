"""Backend `none`: all rows on all ranks.

Shape letters: T token rows, K experts of a token, H hidden size.
"""

from __future__ import annotations

import torch

from layers.forward_batch import StepRows
from layers.moe.backend import MoEBackend
from layers.moe.experts import Experts
from layers.moe.grouping import local_ids, run_experts, weighted_sum
from layers.moe.packing import pack_rows, unpack_rows
from layers.moe.router import Routing


class NoneBackend(MoEBackend):
    """No exchange of single rows: every rank gets the rows of all data-parallel ranks, runs its own experts or columns
    of them on all, and what the ranks have for a row is summed on the way back."""

    def _run(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, rows: StepRows) -> torch.Tensor:
        attention, data = self.groups.attention, self.groups.data
        alone = attention.size * data.size == 1
        dtype = x_TH.dtype
        if data.size > 1:
            x_TH, routing = self._gather(x_TH, routing, rows)
        all_local = alone and rows.layout == "sum"
        ids_TK = routing.topk_ids if all_local else local_ids(routing.topk_ids, experts)
        grouped = run_experts(x_TH, ids_TK, experts, all_local=all_local)
        # Ranks add their float32 sums before rounding; alone there is nothing to add.
        out_TH = weighted_sum(grouped, routing.topk_weights, dtype if alone else torch.float32)
        out_TH = data.reduce_scatter_rows(out_TH, rows.counts)
        return attention.all_reduce(out_TH).to(dtype)

    def _gather(self, x_TH: torch.Tensor, routing: Routing, rows: StepRows) -> tuple[torch.Tensor, Routing]:
        """Rows and routing of all data-parallel ranks in one collective.

        Ranks of one attention group have the same rows, so this is over one rank of each. Routing travels too, so that
        all ranks send a row to the same experts however each would have rounded its logits.
        """
        packed = pack_rows(*routing, x_TH)
        packed = self.groups.data.gather_rows(packed, rows.counts)
        ids_TK, weights_TK, x_TH = unpack_rows(packed, (*routing, x_TH))
        return x_TH, Routing(ids_TK, weights_TK)
