"""Prefill attention in Triton: several query rows a request after a cached prefix, keys and values read from the cache.

Flash attention (Dao, 2023) over the request table. The rows of a tile are pairs of a token and one of the query heads
that share a key head, so grouped heads read each key once and short extensions still fill a tile.

Shape letters: T token rows, B requests, N query heads, K key/value heads, G = N/K, D key width, E value width, S slots,
R rows and C columns of the request table, L tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from layers.kernels.triton_attend import LOG2_E, attend
from layers.kernels.triton_widths import HeadWidths, dot_precision, has_large_shared_memory


# Views into a packed transfer come at any alignment, and a kernel compiled for each combination would stall serving.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "query_start_ptr", "tiles_ptr"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    query_start_ptr,
    tiles_ptr,
    out_ptr,
    stride_qt,
    stride_qn,
    stride_ks,
    stride_kk,
    stride_vs,
    stride_vk,
    stride_table,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE_IS_D1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, key head and block of its query heads). Row m is token m // TILE_HEADS, head m % TILE_HEADS."""
    tile = tl.program_id(0)
    b = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    head_blocks: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // head_blocks
    query_start = tl.load(query_start_ptr + b)
    extend = tl.load(query_start_ptr + b + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + b)
    prefix = seq_len - extend

    m = tl.arange(0, BLOCK_M)
    token = first + m // TILE_HEADS
    in_group = (tl.program_id(1) % head_blocks) * TILE_HEADS + m % TILE_HEADS
    head = kv_head * GROUP + in_group
    m_mask = (m < TILE_HEADS * TILE_TOKENS) & (token < extend) & (in_group < GROUP)
    # Rows past the tile look at its first position, so that no softmax is empty; they are not stored.
    position_m = prefix + tl.where(m_mask, token, first)
    token_row = (query_start + token).to(tl.int64)

    d1 = tl.arange(0, D1)
    q_rows = q_ptr + token_row[:, None] * stride_qt + head[:, None] * stride_qn
    q1 = tl.load(q_rows + d1[None, :], mask=m_mask[:, None] & (d1[None, :] < D), other=0.0)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_rows + d2[None, :], mask=m_mask[:, None] & (d2[None, :] < D), other=0.0)

    row = tl.load(rows_ptr + b)
    table_row = table_ptr + row * stride_table
    k_head = k_ptr + kv_head * stride_kk
    v_head = v_ptr + kv_head * stride_vk
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    # Blocks that end at or before the first row's position need no mask.
    whole = (prefix + first + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(prefix + first + TILE_TOKENS, seq_len)
    # fmt: off
    acc, total, peak = attend(
        acc, total, peak, q1, q2, k_head, v_head, table_row, position_m, 0, whole, stride_ks, stride_vs, scale_log2,
        D, D1, D2, E, BLOCK_E, VALUE_IS_D1, BLOCK_N, "none", PRECISION,
    )
    acc, total, peak = attend(
        acc, total, peak, q1, q2, k_head, v_head, table_row, position_m, whole, end, stride_ks, stride_vs, scale_log2,
        D, D1, D2, E, BLOCK_E, VALUE_IS_D1, BLOCK_N, "causal", PRECISION,
    )
    # fmt: on
    e = tl.arange(0, BLOCK_E)
    out = out_ptr + (token_row[:, None] * NUM_HEADS + head[:, None]) * E + e[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & (e[None, :] < E))


@dataclass(frozen=True)
class TileShape:
    """Rows of one program: block_m >= heads * tokens. block_n: positions a step of its loop."""

    block_m: int
    block_n: int
    heads: int
    tokens: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, widths: HeadWidths, dtype: torch.dtype) -> TileShape:
        """Sizes that keep the tile's query, keys and accumulator within a multiprocessor; timed on an H200."""
        group = num_heads // num_kv_heads
        wide = max(widths.d1 + widths.d2, widths.block_e) > 256
        if dtype == torch.float32:
            block_m, block_n, num_warps, num_stages = (16, 16, 4, 1) if wide else (32, 32, 4, 1)
        elif wide:
            block_m, block_n, num_warps, num_stages = 64, (64 if has_large_shared_memory() else 32), 8, 2
        elif widths.d1 + widths.d2 > 128:
            block_m, block_n, num_warps, num_stages = 64, 64, 4, 2
        else:
            block_m, block_n, num_warps, num_stages = 128, 64, 4, 3
        heads = min(group, block_m)
        return TileShape(block_m, block_n, heads, block_m // heads, num_warps, num_stages)


def list_tiles(extend_lens: list[int], tile_tokens: int) -> list[tuple[int, int]]:
    """(request, first row of the tile in the request) of every tile, the latest rows first: they take longest."""
    tiles = [(b, first) for b, extend in enumerate(extend_lens) for first in range(0, extend, tile_tokens)]
    tiles.sort(key=lambda tile: -tile[1])
    return tiles


def prefill_attention(
    q_TND: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKE: torch.Tensor,
    request_table: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    tiles_L2: torch.Tensor,
    shape: TileShape,
    scale: float,
    value_in_key: bool = False,
) -> torch.Tensor:
    """[T, N, E] in q's dtype; row i of a request sees its positions 0..seq_len - extend_len + i.

    request_table [R, C] int32, request_rows [B] int64, seq_lens [B] int32, query_start [B+1] int32. tiles_L2 int32 is
    `list_tiles(extend_lens, shape.tokens)` on the device. The innermost dimension of q, k and v must be contiguous.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads, v_head_dim = v_SKE.shape[1], v_SKE.shape[2]
    group = num_heads // num_kv_heads
    widths = HeadWidths.of(head_dim, v_head_dim, value_in_key)
    out_TNE = q_TND.new_empty(num_tokens, num_heads, v_head_dim)
    _prefill_kernel[(tiles_L2.shape[0], num_kv_heads * triton.cdiv(group, shape.heads))](
        q_TND,
        k_SKD,
        v_SKE,
        request_table,
        request_rows,
        seq_lens,
        query_start,
        tiles_L2,
        out_TNE,
        q_TND.stride(0),
        q_TND.stride(1),
        k_SKD.stride(0),
        k_SKD.stride(1),
        v_SKE.stride(0),
        v_SKE.stride(1),
        request_table.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        GROUP=group,
        TILE_HEADS=shape.heads,
        TILE_TOKENS=shape.tokens,
        D=head_dim,
        D1=widths.d1,
        D2=widths.d2,
        E=v_head_dim,
        BLOCK_E=widths.block_e,
        VALUE_IS_D1=widths.value_is_d1,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        PRECISION=dot_precision(q_TND.dtype),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out_TNE
