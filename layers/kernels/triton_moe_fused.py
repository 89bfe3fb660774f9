"""The two grouped products of gated experts over peers' memory, without rows being copied in between.

The first reads received rows where peers put them and ends in the gate; the second ends by writing its outputs into the
buffers of the ranks that the rows came from. See `layers.kernels.triton_moe_peers` for the letters and the places.
Weights have the rows' dtype: with float8 ones these products were no faster than copies of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import dot_precision, power_of_two_above


@triton.jit
def _tile(ends_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, row after the expert's last) of a tile; expert E when there are no more tiles."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum(((tiles_up_to <= tile) & (e < E)).to(tl.int32), 0)
    own = e == expert
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first_row = tl.sum(tl.where(own, start, 0), 0) + (tile - first_tile) * BLOCK_M
    return expert, first_row, tl.sum(tl.where(own, end, 0), 0)


@triton.jit(do_not_specialize=["rows", "capacity"])
def _gate_up_kernel(
    x_ptr,
    factors_ptr,
    pairs_ptr,
    w13_ptr,
    ends_ptr,
    out_ptr,
    rows,
    capacity,
    stride_we,
    stride_wn,
    limit,
    E: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of one expert's rows, block of intermediate columns): silu(gate) * up * factor."""
    expert, first_row, last_row = _tile(ends_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    row_mask = row < last_row
    pair = tl.load(pairs_ptr + row, mask=row_mask, other=0)
    n = pair // TOP_K
    place = (n // rows).to(tl.int64) * capacity + n % rows
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < WIDTH
    x_rows = x_ptr + place[:, None] * H
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate_columns = w13_ptr + expert.to(tl.int64) * stride_we + column.to(tl.int64) * stride_wn
    up_columns = gate_columns + tl.full([1], WIDTH, tl.int64) * stride_wn
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, H, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & (k[None, :] < H), other=0.0)
        mask = column_mask[None, :] & (k[:, None] < H)
        weight = tl.load(gate_columns[None, :] + k[:, None], mask=mask, other=0.0)
        gate = tl.dot(x, weight, gate, PRECISION)
        weight = tl.load(up_columns[None, :] + k[:, None], mask=mask, other=0.0)
        up = tl.dot(x, weight, up, PRECISION)
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    factor = tl.load(factors_ptr + place * TOP_K + pair % TOP_K, mask=row_mask, other=0.0)
    hidden = gate / (1.0 + tl.exp(-gate)) * up * factor[:, None]
    out = out_ptr + row[:, None].to(tl.int64) * WIDTH + column[None, :]
    tl.store(out, hidden.to(dtype), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    x_ptr,
    pairs_ptr,
    w2_ptr,
    ends_ptr,
    bases_ptr,
    out_offset,
    rows,
    stride_we,
    stride_wn,
    E: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of one expert's rows, block of hidden columns): the output to the rank that the row came from."""
    expert, first_row, last_row = _tile(ends_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if expert >= E:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    row_mask = row < last_row
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + row[:, None].to(tl.int64) * WIDTH
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = w2_ptr + expert.to(tl.int64) * stride_we + column.to(tl.int64) * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, WIDTH, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & (k[None, :] < WIDTH), other=0.0)
        mask = (column < H)[None, :] & (k[:, None] < WIDTH)
        weight = tl.load(columns[None, :] + k[:, None], mask=mask, other=0.0)
        acc = tl.dot(x, weight, acc, PRECISION)
    pair = tl.load(pairs_ptr + row, mask=row_mask, other=0)
    peer = pair // (rows * TOP_K)
    place = (pair - peer * rows * TOP_K).to(tl.int64)
    base = tl.load(bases_ptr + peer, mask=row_mask, other=0) + out_offset
    out = base.to(tl.pointer_type(dtype))[:, None] + place[:, None] * H + column[None, :]
    tl.store(out, acc.to(dtype), mask=row_mask[:, None] & (column[None, :] < H))


# (rows, columns, inner width of a tile, warps), the fastest of eight timed on an H200 with the widths of
# DeepSeek-V4-Flash and Qwen3-30B-A3B at 1 to 96 rows an expert. The first product keeps two sums.
_FLOAT32_BLOCKS = (16, 32, 32, 4)


def _gate_up_blocks(rows_per_expert: float, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if dtype == torch.float32:
        return _FLOAT32_BLOCKS
    return (32, 64, 128, 4) if rows_per_expert <= 32 else (64, 64, 64, 4)


def _down_blocks(rows_per_expert: float, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if dtype == torch.float32:
        return _FLOAT32_BLOCKS
    return (16, 128, 128, 4) if rows_per_expert <= 16 else (32, 128, 128, 4)


def gate_up(
    x_RCH: torch.Tensor,
    factors_RCK: torch.Tensor,
    pairs_P: torch.Tensor,
    w13_E2IH: torch.Tensor,
    ends_E: torch.Tensor,
    rows: int,
    limit: float | None,
) -> torch.Tensor:
    """[P, I] in x's dtype, unwritten from the last expert's end on: silu(gate) * up * factor of the received rows.

    Gate and up are rounded to x's dtype first, as a product by itself would be. limit: see `layers.moe.Experts`.
    """
    num_experts, double, hidden = w13_E2IH.shape
    num_pairs, top_k = pairs_P.shape[0], factors_RCK.shape[2]
    out_PI = x_RCH.new_empty(num_pairs, double // 2)
    block_m, block_n, block_k, num_warps = _gate_up_blocks(num_pairs / x_RCH.shape[0] / num_experts, x_RCH.dtype)
    grid = (_tiles(num_pairs, num_experts, block_m), triton.cdiv(double // 2, block_n))
    _gate_up_kernel[grid](
        x_RCH,
        factors_RCK,
        pairs_P,
        w13_E2IH,
        ends_E,
        out_PI,
        rows,
        x_RCH.shape[1],
        w13_E2IH.stride(0),
        w13_E2IH.stride(1),
        0.0 if limit is None else limit,
        E=num_experts,
        H=hidden,
        WIDTH=double // 2,
        TOP_K=top_k,
        BLOCK_E=power_of_two_above(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_LIMIT=limit is not None,
        PRECISION=dot_precision(x_RCH.dtype),
        num_warps=num_warps,
        num_stages=3,
    )
    return out_PI


def down(
    hidden_PI: torch.Tensor,
    pairs_P: torch.Tensor,
    w2_EHI: torch.Tensor,
    ends_E: torch.Tensor,
    bases_R: torch.Tensor,
    out_offset: int,
    rows: int,
    top_k: int,
) -> None:
    """hidden @ w2.T of each row's expert, written to place row * K + k of the rank that the row came from."""
    num_experts, columns, width = w2_EHI.shape
    num_pairs = pairs_P.shape[0]
    block_m, block_n, block_k, num_warps = _down_blocks(num_pairs / bases_R.shape[0] / num_experts, hidden_PI.dtype)
    _down_kernel[(_tiles(num_pairs, num_experts, block_m), triton.cdiv(columns, block_n))](
        hidden_PI,
        pairs_P,
        w2_EHI,
        ends_E,
        bases_R,
        out_offset,
        rows,
        w2_EHI.stride(0),
        w2_EHI.stride(1),
        E=num_experts,
        H=columns,
        WIDTH=width,
        TOP_K=top_k,
        BLOCK_E=power_of_two_above(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION=dot_precision(hidden_PI.dtype),
        num_warps=num_warps,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["limit"])
def _weighted_gate_kernel(
    gate_up_ptr,
    factors_ptr,
    out_ptr,
    stride_row,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + r * stride_row + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + r * stride_row + WIDTH + column, mask=mask).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    if HAS_FACTORS:
        hidden *= tl.load(factors_ptr + r)
    tl.store(out_ptr + r * WIDTH + column, hidden.to(out_ptr.dtype.element_ty), mask=mask)


def weighted_gate(gate_up_R2I: torch.Tensor, factors_R: torch.Tensor | None, limit: float | None) -> torch.Tensor:
    """[R, I] in the argument's dtype: silu(gate) * up * factor in float32; see `layers.moe.Experts` for the limit."""
    num_rows, double = gate_up_R2I.shape
    out_RI = gate_up_R2I.new_empty(num_rows, double // 2)
    block = min(1024, power_of_two_above(double // 2))
    if num_rows:
        _weighted_gate_kernel[(num_rows, triton.cdiv(double // 2, block))](
            gate_up_R2I,
            gate_up_R2I if factors_R is None else factors_R,
            out_RI,
            gate_up_R2I.stride(0),
            0.0 if limit is None else limit,
            WIDTH=double // 2,
            BLOCK=block,
            HAS_FACTORS=factors_R is not None,
            HAS_LIMIT=limit is not None,
            num_warps=4,
        )
    return out_RI


def _tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Enough for any split of the pairs: each expert may fill its last tile in part."""
    return triton.cdiv(num_pairs, block_m) + min(num_experts, num_pairs)
