"""Normalisation and the gated activation against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from layers.activation import silu_and_mul
from layers.norm import fused_add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 4, 32), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact_rms_norm(x, weight, 1e-5), atol=TOLERANCE[dtype], rtol=1e-2)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(7, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype)
    total = x + residual
    normed, new_residual = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(normed.double(), exact_rms_norm(total, weight, 1e-6), atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up[:, :48].double(), gate_up[:, 48:].double()
    got = silu_and_mul(gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=1e-2)
