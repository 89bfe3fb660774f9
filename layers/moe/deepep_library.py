"""Backend `deepep` by the DeepEP library (package deep_ep, class Buffer), for GPUs of one or several hosts.

Its normal layout wants the experts' rank to apply the weights and adds up what ranks send; its low-latency layout
applies them on the rows' own rank. Either way they are applied once. Written after the library's published interface
and tested against a stand-in for it; it has not run with the library itself.

Shape letters: T token rows, N rows received, K experts of a token, E experts of this rank, C rows of an expert's place
in the low-latency layout (ranks times cap), H hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from layers.moe.experts import Experts
from layers.moe.grouping import run_experts, weighted_sum
from layers.moe.library import load_library
from layers.moe.router import Routing, at_least_one_row
from layers.parallel import ParallelGroup


class Connection:
    """One for all layers of a process: the library has one buffer, which both layouts use in turn."""

    def __init__(self, group: ParallelGroup, hidden_size: int, num_experts: int, cap: int) -> None:
        import deep_ep

        size, queues = group.size, num_experts // group.size
        hints = [config.get_nvl_buffer_size_hint(2 * hidden_size, size) for config in _configs(deep_ep, size)]
        remote = [config.get_rdma_buffer_size_hint(2 * hidden_size, size) for config in _configs(deep_ep, size)]
        remote.append(deep_ep.Buffer.get_low_latency_rdma_size_hint(cap, hidden_size, size, num_experts))
        self.buffer = deep_ep.Buffer(
            group.process_group, max(hints), max(remote), low_latency_mode=True, num_qps_per_rank=queues
        )
        self._clean_arguments = (cap, hidden_size, num_experts)
        self._needs_cleaning = False

    def before(self, low_latency: bool) -> None:
        """The normal layout leaves numbers where the other one signals."""
        if low_latency and self._needs_cleaning:
            self.buffer.clean_low_latency_buffer(*self._clean_arguments)
        self._needs_cleaning = not low_latency


class DeepEPLibrary:
    """cap: most rows a rank may send in the low-latency layout. ValueError where the library is missing."""

    def __init__(self, experts: Experts, group: ParallelGroup, cap: int) -> None:
        load_library("deep_ep", "--deepep-transport library", "the package deep_ep", ["Buffer"])
        if experts.dtype != torch.bfloat16:
            raise ValueError(f"--deepep-transport library takes bfloat16 rows, and --dtype is {experts.dtype}")
        self.cap = cap
        self._connection = _connect(group, experts.hidden_size, experts.num_physical, cap)

    def run(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, low_latency: bool) -> torch.Tensor:
        """[T, H]: combined rows. routing: physical experts, -1 for none."""
        num_tokens = x_TH.shape[0]
        x_TH, (ids_TK, weights_TK) = at_least_one_row(x_TH, routing)
        self._connection.before(low_latency)
        layout = self._low_latency if low_latency else self._normal
        return layout(x_TH, ids_TK.long(), weights_TK, experts)[:num_tokens]

    def _normal(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        buffer = self._connection.buffer
        per_rank, per_host, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids_TK, experts.num_physical)
        x_NH, ids_NK, weights_NK, _, handle, _ = buffer.dispatch(
            x_TH,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        local_NK = ids_NK.masked_fill(ids_NK < 0, experts.num_local).int()
        y_NH = weighted_sum(run_experts(x_NH, local_NK, experts), weights_NK, x_NH.dtype)
        out_TH, _, _ = buffer.combine(y_NH, handle)
        return out_TH

    def _low_latency(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        buffer = self._connection.buffer
        x_ECH, _, handle, _, _ = buffer.low_latency_dispatch(
            x_TH, ids_TK, self.cap, experts.num_physical, use_fp8=False
        )
        # Places without a row are computed too, from whatever they hold, and never read: shapes stay fixed.
        num_experts, places, hidden = x_ECH.shape
        ends_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=x_TH.device) * places
        y_ECH = experts(x_ECH.flatten(0, 1), ends_E, zero_rest=False).view(num_experts, places, hidden)
        out_TH, _, _ = buffer.low_latency_combine(y_ECH, ids_TK, weights_TK, handle)
        return out_TH


@lru_cache
def _connect(group: ParallelGroup, hidden_size: int, num_experts: int, cap: int) -> Connection:
    return Connection(group, hidden_size, num_experts, cap)


def _configs(deep_ep: Any, size: int) -> tuple[Any, Any]:
    return deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size)
