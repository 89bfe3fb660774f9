"""Root-mean-square normalisation.

Shape letters: T token rows, H normalised width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from layers.kernels import cpu
from layers.weights import empty_parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, in x's dtype."""
    if x.is_cuda:
        from layers.kernels import triton_elementwise

        return triton_elementwise.rms_norm(x, weight, eps)
    if cpu.usable(x) and weight.dtype == x.dtype:
        return cpu.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual) of residual + x; the sum is rounded to x's dtype first. The inputs may be overwritten."""
    if x.is_cuda:
        from layers.kernels import triton_elementwise

        return triton_elementwise.fused_add_rms_norm(x, residual, weight, eps)
    if cpu.usable(x) and weight.dtype == x.dtype:
        return cpu.fused_add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """rms_norm with a weight [H]; with a residual it adds that first and returns (normed, sum)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x_TH: torch.Tensor, residual_TH: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, new residual); without a residual so far, x becomes it."""
        if residual_TH is None:
            return rms_norm(x_TH, self.weight, self.eps), x_TH
        return fused_add_rms_norm(x_TH, residual_TH, self.weight, self.eps)
