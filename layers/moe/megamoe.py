"""Backend `megamoe`: one call of fixed buffers, rows in, combined rows out.

On GPUs of one host it is a few kernels over peers' memory, elsewhere a reference over collectives. Both keep to this:
the routing weight multiplies what goes into the down projection, in float32 before it is rounded; the outputs of a
token's experts are rounded to the rows' dtype and added unweighted, in the order of its experts, in float32, and
rounded once. DeepGEMM's kernel (`layers.moe.deep_gemm`) rounds to float8 where this says the rows' dtype.

Shape letters: T token rows, H hidden size.
"""

from __future__ import annotations

import torch

from layers.moe.deep_gemm import DeepGemmExperts
from layers.moe.exchange import CollectiveExchange, RowExchange
from layers.moe.experts import Experts
from layers.moe.grouping import weighted_sum
from layers.moe.peer_memory import PeerExchange, open_exchange
from layers.moe.router import Routing
from layers.moe.row_split import RowSplitBackend
from layers.parallel import ParallelGroups

CAP_FLAG = "--mega-moe-max-tokens-per-rank"


class MegaMoEBackend(RowSplitBackend):
    """Takes up to mega_moe_max_tokens_per_rank rows a rank in a step; there is no other path for more.

    cap: that many; None, until `reserve`, where the setting is left to it.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.cap = groups.moe.mega_moe_max_tokens_per_rank
        self._collective = CollectiveExchange(groups.experts)
        self._peers: PeerExchange | None = None
        self._deep_gemm: DeepGemmExperts | None = None

    def reserve(self, rows: int, experts: Experts, top_k: int) -> None:
        most = self._most_rows(rows)
        self._check(most)
        if self.cap is None:
            self.cap = most
        if self.groups.moe.mega_moe_kernel == "deep_gemm":
            self._deep_gemm = DeepGemmExperts(experts, self.groups.experts, self.cap, top_k)
            return
        self._peers = open_exchange(self.groups.experts, self.cap, experts, top_k, fused=True)

    def _check(self, most: int) -> None:
        if self.cap is not None and most > self.cap:
            raise ValueError(
                f"{most} rows a rank are more than {CAP_FLAG} {self.cap}: raise it, or lower --chunked-prefill-size "
                "or --max-running-requests"
            )

    def _send(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, most: int, extends: bool) -> torch.Tensor:
        self._check(most)
        if self._deep_gemm is not None:
            return self._deep_gemm.run(x_TH, routing)
        exchange: RowExchange = self._peers or self._collective
        fixed_rows = None if extends and self._peers is None else most
        grouped = exchange.run(x_TH, routing.topk_ids, experts, fixed_rows, routing.topk_weights)
        return weighted_sum(grouped, torch.ones_like(routing.topk_weights), x_TH.dtype)
