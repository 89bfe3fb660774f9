"""A mixture-of-experts layer: route -> dispatch -> experts -> combine.

Shape letters: T token rows, H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.moe.backend import MoEBackend
from layers.moe.experts import Experts
from layers.moe.router import GroupedSigmoidRouter, SoftmaxRouter


class MoE(nn.Module):
    """gate: chooses experts. shared_experts: an MLP that every token goes through besides; its output is added."""

    def __init__(
        self,
        gate: SoftmaxRouter | GroupedSigmoidRouter,
        experts: Experts,
        backend: MoEBackend,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.backend = backend
        self.shared_experts = shared_experts

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        dispatched = self.backend.dispatch(x_TH, self.gate(x_TH))
        y_RH = self.experts(dispatched.x_RH, dispatched.expert_ends_E)
        out_TH = self.backend.combine(y_RH, dispatched)
        return out_TH if self.shared_experts is None else out_TH + self.shared_experts(x_TH)
