"""The fused elementwise kernels and the cache store against plain torch, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from layers.kernels import triton_elementwise as kernels
from layers.kernels.triton_cache import store_kv
from layers.kernels.triton_grouped import grouped_matmul
from layers.moe import Experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of the narrow types: both sides round a float32 result that may differ in its last bits.
# The interpreter cuts bfloat16 instead of rounding it, which costs another.
RELATIVE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 1.6e-2}


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[expected.dtype], atol=RELATIVE[expected.dtype] / 4)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 576), (3, 1024), (2, 5000)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    assert_near(kernels.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads_inside_a_packed_projection(dtype: torch.dtype) -> None:
    packed = normal(7, 1000, dtype=dtype)
    heads = packed[:, 200:776].view(7, 6, 96)
    weight = normal(96, dtype=dtype, seed=1)
    assert_near(kernels.rms_norm(heads, weight, 1e-5), exact_rms_norm(heads, weight, 1e-5))
    columns = packed[:, 40:340]
    weight = normal(300, dtype=dtype, seed=2)
    assert_near(kernels.rms_norm(columns, weight, 1e-5), exact_rms_norm(columns, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 576), (2, 5000)])
def test_fused_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    total = x + residual
    normed, summed = kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert summed is residual
    assert_near(summed, total)
    assert_near(normed, exact_rms_norm(summed, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (3, 2 * 1536), (2, 2, 200)])
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = 3 * normal(*shape, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = kernels.silu_and_mul(gate_up)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    assert_near(out, (F.silu(gate).to(dtype).float() * up).to(dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_and_mul_of_extreme_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 0.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert kernels.silu_and_mul(gate_up).tolist() == [[0.0, 0.0, 400.0, 0.0]]


def exact_rotary(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Multiplication of the pairs by cos + i sin."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    turn = torch.complex(cos, sin)[:, None]
    wide = x.double()
    pairs = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, dim=-1)
    turned = torch.complex(*pairs) * turn
    if interleaved:
        return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "k_heads", "width"), [(9, 3, 64), (16, 1, 64), (4, 4, 96), (40, 8, 128)])
def test_apply_rotary(q_heads: int, k_heads: int, width: int, dtype: torch.dtype, interleaved: bool) -> None:
    tokens = 3
    packed = normal(tokens, (q_heads + k_heads) * width, dtype=dtype)
    q = packed[:, : q_heads * width].view(tokens, q_heads, width)
    k = packed[:, q_heads * width :].view(tokens, k_heads, width)
    angles = normal(tokens, width // 2, dtype=torch.float32, seed=1) * 5
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    before = packed.clone()
    q_out, k_out = kernels.apply_rotary(q, k, cos_sin, interleaved)
    assert_near(q_out, exact_rotary(q, cos_sin, interleaved))
    assert_near(k_out, exact_rotary(k, cos_sin, interleaved))
    assert torch.equal(packed, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_writes_the_rows_and_nothing_else(dtype: torch.dtype) -> None:
    packed = normal(5, 3 * 96 + 3 * 40, dtype=dtype)
    k, v = packed[:, : 3 * 96].view(5, 3, 96), packed[:, 3 * 96 :].view(5, 3, 40)
    slots = torch.tensor([7, 0, 31, 16, 2], device=DEVICE)
    k_cache, v_cache = normal(32, 3, 96, dtype=dtype, seed=1), normal(32, 3, 40, dtype=dtype, seed=2)
    expected_k, expected_v = k_cache.index_copy(0, slots, k), v_cache.index_copy(0, slots, v)
    store_kv(k, v, slots, k_cache, v_cache)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_store_of_keys_that_hold_their_values_converts_to_the_cache_dtype() -> None:
    k = normal(4, 1, 48, dtype=torch.float32)
    cache = torch.zeros(16, 1, 48, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([3, 9, 1, 12], device=DEVICE)
    store_kv(k, None, slots, cache, None)
    assert torch.equal(cache, torch.zeros_like(cache).index_copy(0, slots, k.half()))


def test_empty_inputs_give_empty_outputs() -> None:
    weight = torch.ones(64, device=DEVICE)
    assert kernels.rms_norm(torch.empty(0, 64, device=DEVICE), weight, 1e-6).shape == (0, 64)
    assert kernels.silu_and_mul(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)
    q, k = torch.empty(0, 4, 32, device=DEVICE), torch.empty(0, 2, 32, device=DEVICE)
    q_out, k_out = kernels.apply_rotary(q, k, torch.empty(0, 32, device=DEVICE))
    assert (q_out.shape, k_out.shape) == (q.shape, k.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("ends", [[0, 0, 0], [3, 3, 20], [1, 19, 37], [0, 40, 40], [40, 40, 40]], ids=str)
def test_grouped_matmul_gives_each_row_its_expert_and_foreign_rows_zero(ends: list[int], dtype: torch.dtype) -> None:
    x, weight = normal(40, 72, dtype=dtype), normal(3, 100, 72, dtype=dtype, seed=1) / 8
    out = grouped_matmul(x, weight, torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    expected = torch.zeros(40, 100, dtype=torch.float64, device=DEVICE)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected[start:end] = x[start:end].double() @ weight[expert].double().t()
    torch.testing.assert_close(out.double(), expected, rtol=RELATIVE[dtype], atol=2 * RELATIVE[dtype])
    assert torch.equal(out[ends[-1] :], torch.zeros_like(out[ends[-1] :]))


def test_triton_experts_equal_the_loop_over_experts() -> None:
    experts = Experts(5, 48, 40)
    experts.w13_E2IH.data = normal(5, 80, 48, dtype=torch.float32, seed=1) / 7
    experts.w2_EHI.data = normal(5, 48, 40, dtype=torch.float32, seed=2) / 6
    x = normal(33, 48, dtype=torch.float32)
    ends = torch.tensor([2, 2, 20, 29, 31], dtype=torch.int32, device=DEVICE)
    for factors in (None, normal(33, dtype=torch.float32, seed=3)):
        torch.testing.assert_close(
            experts.run_triton(x, ends, factors), experts.run_looped(x, ends, factors), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("rows", [150, 600])
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])], ids=str)
def test_grouped_matmul_of_many_rows_an_expert(rows: int, dtype: torch.dtype) -> None:
    x, weight = normal(rows, 72, dtype=dtype), normal(3, 140, 72, dtype=dtype, seed=1) / 8
    ends = [rows // 7, rows // 2 + 1, rows - 3]
    out = grouped_matmul(x, weight, torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected = x[start:end].double() @ weight[expert].double().t()
        torch.testing.assert_close(out[start:end].double(), expected, rtol=RELATIVE[dtype], atol=2 * RELATIVE[dtype])
    assert not out[ends[-1] :].any()
