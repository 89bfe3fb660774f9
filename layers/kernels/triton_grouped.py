"""Matrix product of rows sorted by expert, each with its own expert's weights, of any float dtype or block-fp8.

Where an expert's rows lie is read on the device and the launch grid depends on the number of rows only, so a CUDA graph
can hold it.

Shape letters: R rows sorted by expert, E experts, N output width, K input width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import dot_precision, power_of_two_above
from layers.quantization import BlockScales

# The least inner width of a product on tensor cores.
_LEAST_INNER = 16


@triton.jit
def _weight_tile(
    columns_N,
    scale_columns_N,
    column_mask_N,
    at,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_K: tl.constexpr,
):
    """[BLOCK_K, N]: inner places `at` to `at + BLOCK_K` of the matrix columns at these addresses, zeros beyond K.

    SCALE_K: inner places that share a scale, or 0 for weights as they lie. The product with the scale is taken in
    float32 and rounded to DTYPE, as dequantisation at load does, so the tile has the same bits.
    """
    k = at + tl.arange(0, BLOCK_K)
    mask = column_mask_N[None, :] & (k[:, None] < K)
    tile = tl.load(columns_N[None, :] + k[:, None], mask=mask, other=0.0)
    if SCALE_K > 0:
        if SCALE_K % BLOCK_K == 0:
            scale = tl.load(scale_columns_N + at // SCALE_K, mask=column_mask_N, other=0.0)[None, :]
        else:
            scale = tl.load(scale_columns_N[None, :] + (k // SCALE_K)[:, None], mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * scale).to(DTYPE)
    return tile


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ends_ptr"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    ends_ptr,
    out_ptr,
    num_rows,
    stride_x,
    stride_we,
    stride_wn,
    stride_se,
    stride_sn,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of one expert's rows, block of columns). Rows after the last expert's count as expert E: zeros."""
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=num_rows)
    start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    start = tl.where(e > E, num_rows, start)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    if expert > E:
        return
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first_row = tl.sum(tl.where(e == expert, start, 0), 0) + (tile - first_tile) * BLOCK_M
    last_row = tl.sum(tl.where(e == expert, end, 0), 0)

    row = first_row + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < last_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if expert < E:
        x_rows = x_ptr + row[:, None].to(tl.int64) * stride_x
        columns = weight_ptr + expert.to(tl.int64) * stride_we + n.to(tl.int64) * stride_wn
        scale_columns = scale_ptr
        if SCALE_N > 0:
            scale_columns += expert.to(tl.int64) * stride_se + n // SCALE_N * stride_sn
        for at in range(0, K, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & (k[None, :] < K), other=0.0)
            weight = _weight_tile(columns, scale_columns, n < N, at, x_ptr.dtype.element_ty, K, BLOCK_K, SCALE_K)
            acc = tl.dot(x, weight, acc=acc, input_precision=PRECISION)
    out = out_ptr + row[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (n[None, :] < N))


def _scale_arguments(weight_ENK: torch.Tensor, scales: BlockScales | None) -> tuple[torch.Tensor, int, int, int, int]:
    """(scales, their strides of experts and rows, rows and inner places that share one) for a kernel.

    Without scales the numbers are 0 and the tensor is one that the kernel does not read.
    """
    if scales is None:
        return weight_ENK, 0, 0, 0, 0
    return scales.values, scales.values.stride(0), scales.values.stride(1), *scales.block


def _inner_width(block_k: int, scales: BlockScales | None) -> int:
    """block_k, or less where a tile of that inner width lies within one block of scales."""
    if scales is None:
        return block_k
    common = math.gcd(block_k, scales.block[1])
    return common if common >= _LEAST_INNER else block_k


def _blocks(rows_per_expert: float, dtype: torch.dtype, is_fp8: bool) -> tuple[int, int, int, int]:
    """(rows, columns, inner width of a tile, warps), the fastest of those timed on an H200 with 64 to 128 experts."""
    if dtype == torch.float32:
        return 16, 32, 32, 4
    if rows_per_expert <= 16:
        return 16, 128, 128, 4
    if rows_per_expert <= 32:
        return 32, 128, 128, 4
    if rows_per_expert <= 64:
        return (64, 128, 128, 4) if is_fp8 else (64, 128, 64, 8)
    return 128, 128, 64, 4 if is_fp8 else 8


def grouped_matmul(
    x_RK: torch.Tensor,
    weight_ENK: torch.Tensor,
    ends_E: torch.Tensor,
    all_experts: int | None = None,
    scales: BlockScales | None = None,
) -> torch.Tensor:
    """[R, N] in x's dtype: row r times the transposed matrix of the expert e with ends[e - 1] <= r < ends[e].

    ends_E [E] int32, ascending, the last at most R; rows from there on give 0. Inner dimensions must be contiguous.
    all_experts: how many the rows are spread over, those whose rows come after the last end included; None for E.
    scales: of float8_e4m3fn weights; without them weights have x's dtype.
    """
    num_rows, width = x_RK.shape
    num_experts, columns, _ = weight_ENK.shape
    out_RN = x_RK.new_empty(num_rows, columns)
    block_m, block_n, block_k, num_warps = _blocks(
        num_rows / (all_experts or num_experts), x_RK.dtype, scales is not None
    )
    scale, stride_se, stride_sn, scale_n, scale_k = _scale_arguments(weight_ENK, scales)
    grid = (triton.cdiv(num_rows, block_m) + min(num_experts, num_rows) + 1, triton.cdiv(columns, block_n))
    _grouped_kernel[grid](
        x_RK,
        weight_ENK,
        scale,
        ends_E,
        out_RN,
        num_rows,
        x_RK.stride(0),
        weight_ENK.stride(0),
        weight_ENK.stride(1),
        stride_se,
        stride_sn,
        SCALE_N=scale_n,
        SCALE_K=scale_k,
        E=num_experts,
        N=columns,
        K=width,
        BLOCK_E=power_of_two_above(num_experts + 1),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=_inner_width(block_k, scales),
        PRECISION=dot_precision(x_RK.dtype),
        num_warps=num_warps,
        num_stages=3,
    )
    return out_RN
