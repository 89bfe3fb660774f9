"""A mixture-of-experts layer: route, then whatever the backend does to run the experts on the ranks that hold them.

Shape letters: T token rows, H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.forward_batch import ForwardBatch
from layers.moe.backend import RecordingLimit
from layers.moe.experts import Experts
from layers.moe.placement import fake_choice
from layers.moe.registry import make_backend
from layers.moe.router import GroupedSigmoidRouter, Routing, SoftmaxRouter
from layers.parallel import ParallelGroups


class MoE(nn.Module):
    """gate: chooses experts. shared_experts: an MLP that every token goes through besides; its output is added."""

    def __init__(
        self,
        gate: SoftmaxRouter | GroupedSigmoidRouter,
        experts: Experts,
        groups: ParallelGroups,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.backend = make_backend(groups)
        self.shared_experts = shared_experts
        self._data_rank = groups.data.rank
        self._fake = groups.moe.replica_choice == "fake"

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        routing = self.gate(x_TH)
        if self._fake:
            shape = routing.topk_ids.shape
            ids_TK = fake_choice(*shape, self.experts.num_experts, x_TH.device, self._data_rank)
            routing = Routing(ids_TK, routing.topk_weights)
        out_TH = self.backend.forward(x_TH, routing, self.experts, batch.step_rows)
        return out_TH if self.shared_experts is None else out_TH + self.shared_experts(x_TH)


def reserve_rows(model: nn.Module, rows: int) -> None:
    """Tell a model's backends the most rows that a data-parallel rank can have in a step, see `MoEBackend.reserve`."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.backend.reserve(rows, module.experts, module.gate.top_k)


def recording_limit(model: nn.Module) -> RecordingLimit | None:
    """The lowest of its layers, see `MoEBackend.recording_limit`."""
    limits = [module.backend.recording_limit for module in model.modules() if isinstance(module, MoE)]
    return min((limit for limit in limits if limit is not None), default=None)
