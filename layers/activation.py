"""Gated activations.

Shape letters: T token rows, I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from layers.kernels import cpu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * I] = [gate | up]; returns [..., I] in the same dtype."""
    if gate_up.is_cuda:
        from layers.kernels import triton_elementwise

        return triton_elementwise.silu_and_mul(gate_up)
    if cpu.usable(gate_up):
        return cpu.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
