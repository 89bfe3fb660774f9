"""Normalisation, gated activation and rotary embedding in Triton: each one pass over its rows, computed in float32.

They take the arguments of the functions of the same name in `layers.norm`, `layers.activation` and `layers.rotary`,
which call them for CUDA tensors.

Shape letters: T token rows, N heads, H normalised width, I intermediate size, D rotated width of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import power_of_two_above

# Elements a program handles: enough that narrow rows (one head) do not each cost a program.
_BLOCK = 4096


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    INNER: tl.constexpr,
    H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ADD: tl.constexpr,
):
    """Row r of x is at (r // INNER) * stride_outer + (r % INNER) * stride_inner; residual and out are contiguous."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = (row[:, None] < num_rows) & (h[None, :] < H)
    source = x_ptr + (row // INNER * stride_outer + row % INNER * stride_inner)[:, None] + h[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    flat = row[:, None] * H + h[None, :]
    if ADD:
        x += tl.load(residual_ptr + flat, mask=mask, other=0.0).to(tl.float32)
        # The sum is what later layers see, so it is rounded before it is normalised.
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + flat, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + flat, normed.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[0]
    num_rows = x.numel() // width
    if num_rows == 0:
        return out
    if x.dim() == 3:
        inner, stride_outer, stride_inner = x.shape[1], x.stride(0), x.stride(1)
    else:
        inner, stride_outer, stride_inner = 1, x.stride(0) if x.dim() == 2 else width, 0
    block_h = power_of_two_above(width)
    block_rows = max(1, _BLOCK // block_h) if inner > 1 else 1
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_rows,
        stride_outer,
        stride_inner,
        eps,
        INNER=inner,
        H=width,
        BLOCK_ROWS=block_rows,
        BLOCK_H=block_h,
        ADD=residual is not None,
        num_warps=8 if block_h >= 4096 else 4,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension [H], in x's dtype. x may be a strided view."""
    return _launch_rms_norm(x, None, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual) of residual + x, both of one dtype; a contiguous `residual` is updated in place."""
    residual = residual.contiguous()
    return _launch_rms_norm(x, residual, weight, eps), residual


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, stride_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * stride_row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_row + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    # Rounded between the two steps as the unfused form does, so that both give the same number.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + i, (silu * up).to(out_ptr.dtype.element_ty), mask=i < SIZE)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * I] = [gate | up]; returns [..., I] in the same dtype."""
    size = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.dim() == 2 and gate_up.stride(1) == 1 else gate_up.reshape(-1, 2 * size).contiguous()
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(1024, power_of_two_above(size))
    _silu_and_mul_kernel[(rows.shape[0], triton.cdiv(size, block))](
        rows, out, rows.stride(0), SIZE=size, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kn,
    stride_cs,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program (token, block of the heads of q and then of k)."""
    t = tl.program_id(0).to(tl.int64)
    q_blocks: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    block = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_sin_ptr + t * stride_cs + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + t * stride_cs + HALF + i, mask=i < HALF, other=0.0)[None, :]
    if INTERLEAVED:
        a_at, b_at = 2 * i, 2 * i + 1
    else:
        a_at, b_at = i, HALF + i
    if block < q_blocks:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (head[:, None] < Q_HEADS) & (i[None, :] < HALF)
        source = q_ptr + t * stride_qt + head[:, None] * stride_qn
        target = q_out_ptr + (t * Q_HEADS + head[:, None]) * (2 * HALF)
        a = tl.load(source + a_at[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + b_at[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(target + a_at[None, :], (a * cos - b * sin).to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + b_at[None, :], (b * cos + a * sin).to(q_out_ptr.dtype.element_ty), mask=mask)
    else:
        head = (block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (head[:, None] < K_HEADS) & (i[None, :] < HALF)
        source = k_ptr + t * stride_kt + head[:, None] * stride_kn
        target = k_out_ptr + (t * K_HEADS + head[:, None]) * (2 * HALF)
        a = tl.load(source + a_at[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + b_at[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(target + a_at[None, :], (a * cos - b * sin).to(k_out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + b_at[None, :], (b * cos + a * sin).to(k_out_ptr.dtype.element_ty), mask=mask)


def apply_rotary(
    q_TND: torch.Tensor, k_TND: torch.Tensor, cos_sin_TD: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q and k (head counts may differ), in their dtype; cos_sin_TD float32 is [cosines | sines], each D / 2."""
    if q_TND.stride(-1) != 1:
        q_TND = q_TND.contiguous()
    if k_TND.stride(-1) != 1:
        k_TND = k_TND.contiguous()
    q_out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    k_out = torch.empty(k_TND.shape, dtype=k_TND.dtype, device=k_TND.device)
    num_tokens, q_heads, width = q_TND.shape
    if num_tokens == 0:
        return q_out, k_out
    k_heads = k_TND.shape[1]
    block_half = power_of_two_above(width // 2)
    block_heads = max(1, min(1024 // block_half, power_of_two_above(max(q_heads, k_heads), 1)))
    blocks = triton.cdiv(q_heads, block_heads) + triton.cdiv(k_heads, block_heads)
    _rotary_kernel[(num_tokens, blocks)](
        q_TND,
        k_TND,
        cos_sin_TD,
        q_out,
        k_out,
        q_TND.stride(0),
        q_TND.stride(1),
        k_TND.stride(0),
        k_TND.stride(1),
        cos_sin_TD.stride(0),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=width // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        INTERLEAVED=interleaved,
        num_warps=4,
    )
    return q_out, k_out
