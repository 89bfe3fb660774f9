"""Decode attention in Triton: one query row a request, its keys and values read through the request table.

Flash-decoding (Dao et al., 2023): a request's context is cut into splits that run side by side, and a second kernel
joins their partial softmaxes. How many splits there are depends on the batch size only and the lengths are read on the
device, so a captured CUDA graph stays valid while requests grow. The query heads that share a key head form the rows of
one matrix product, so that each key is read once.

Shape letters: B requests, N query heads, K key/value heads, G = N/K, D key width, E value width, S slots, P splits,
R rows and C columns of the request table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from layers.kernels.triton_attend import LOG2_E, attend
from layers.kernels.triton_widths import HeadWidths, dot_precision, has_large_shared_memory

MIN_SPLIT_TOKENS = 64
MAX_SPLITS = 64


@triton.jit
def _split_length(seq_len, num_splits, MIN_SPLIT: tl.constexpr):
    """Positions a split covers: an equal share, rounded up to whole blocks of MIN_SPLIT."""
    return tl.cdiv(tl.cdiv(seq_len, num_splits), MIN_SPLIT) * MIN_SPLIT


# Views into a packed transfer come at any alignment, and a kernel compiled for each combination would stall serving.
@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    stride_qb,
    stride_qn,
    stride_ks,
    stride_kk,
    stride_vs,
    stride_vk,
    stride_table,
    num_splits,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE_IS_D1: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (b, key head and block of its query heads, split). JOINED: the only split, written straight to `out`."""
    b = tl.program_id(0).to(tl.int64)
    head_blocks: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // head_blocks
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + b)
    length = _split_length(seq_len, num_splits, MIN_SPLIT)
    start = split * length
    end = tl.minimum(start + length, seq_len)
    if start >= end:
        return

    in_group = (tl.program_id(1) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + in_group
    head_mask = in_group < GROUP
    d1 = tl.arange(0, D1)
    e = tl.arange(0, BLOCK_E)
    q_rows = q_ptr + b * stride_qb + head[:, None] * stride_qn
    q1 = tl.load(q_rows + d1[None, :], mask=head_mask[:, None] & (d1[None, :] < D), other=0.0)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_rows + d2[None, :], mask=head_mask[:, None] & (d2[None, :] < D), other=0.0)

    row = tl.load(rows_ptr + b)
    table_row = table_ptr + row * stride_table
    k_head = k_ptr + kv_head * stride_kk
    v_head = v_ptr + kv_head * stride_vk
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    # fmt: off
    acc, total, peak = attend(
        acc, total, peak, q1, q2, k_head, v_head, table_row, 0, start, end, stride_ks, stride_vs, scale_log2,
        D, D1, D2, E, BLOCK_E, VALUE_IS_D1, BLOCK_N, "end", PRECISION,
    )
    # fmt: on

    result = acc / total[:, None]
    result_mask = head_mask[:, None] & (e[None, :] < E)
    if JOINED:
        out = out_ptr + (b * NUM_HEADS + head[:, None]) * E + e[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=result_mask)
    else:
        index = (b * NUM_HEADS + head) * num_splits + split
        tl.store(partial_ptr + index[:, None] * E + e[None, :], result, mask=result_mask)
        tl.store(lse_ptr + index, peak + tl.log2(total), mask=head_mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _join_kernel(
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Program (b, head): the splits' results weighted by their softmax masses."""
    b = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + b)
    used = tl.cdiv(seq_len, _split_length(seq_len, num_splits, MIN_SPLIT))
    e = tl.arange(0, BLOCK_E)
    row = b * NUM_HEADS + tl.program_id(1)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    for split in range(0, used):
        index = row * num_splits + split
        lse = tl.load(lse_ptr + index)
        partial = tl.load(partial_ptr + index * E + e, mask=e < E, other=0.0)
        new_peak = tl.maximum(peak, lse)
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(lse - new_peak)
        acc = acc * decay + partial * weight
        total = total * decay + weight
        peak = new_peak
    tl.store(out_ptr + row * E + e, (acc / total).to(out_ptr.dtype.element_ty), mask=e < E)


@dataclass
class DecodeWorkspace:
    """Partial results, kept over the layers of one pass: partial [B, N, P, E] and lse [B, N, P], float32."""

    partial: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def allocate(batch: int, heads: int, splits: int, v_head_dim: int, device: torch.device) -> DecodeWorkspace:
        return DecodeWorkspace(
            torch.empty(batch, heads, splits, v_head_dim, dtype=torch.float32, device=device),
            torch.empty(batch, heads, splits, dtype=torch.float32, device=device),
        )


def decode_blocks(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """(query heads of a program, programs along the head axis). A matrix product has at least 16 rows."""
    group = num_heads // num_kv_heads
    block_h = 16 if group <= 16 else 32 if group <= 32 else 64
    return block_h, num_kv_heads * triton.cdiv(group, block_h)


def loop_shape(exact: bool, width: int, block_h: int) -> tuple[int, int, int]:
    """(positions a step, warps, pipeline stages) for keys of `width`; `exact` means float32. Timed on an H200."""
    if exact:
        return (16 if width >= 256 else 32), (8 if width >= 256 and block_h > 16 else 4), 1
    if width >= 256:
        many = width >= 512 and block_h == 64 and has_large_shared_memory()
        return (64 if many else 32), (8 if block_h == 64 else 4), 2
    return 64, 2, 3


def choose_splits(batch: int, num_heads: int, num_kv_heads: int, max_context: int, num_sms: int) -> int:
    """Splits that give every multiprocessor about four programs; a function of shapes, never of lengths."""
    programs = batch * decode_blocks(num_heads, num_kv_heads)[1]
    wanted = triton.cdiv(4 * num_sms, programs)
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(max_context, MIN_SPLIT_TOKENS)))


def decode_attention(
    q_BND: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKE: torch.Tensor,
    request_table: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    num_splits: int,
    value_in_key: bool = False,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """[B, N, E] in q's dtype: attention of one row a request to its positions 0..seq_len-1.

    request_table [R, C] int32, request_rows [B] int64, seq_lens [B] int32, each length at least 1. The innermost
    dimension of q, k and v must be contiguous. `workspace` is needed for num_splits > 1 and made where not given.
    """
    batch, num_heads, head_dim = q_BND.shape
    num_kv_heads, v_head_dim = v_SKE.shape[1], v_SKE.shape[2]
    widths = HeadWidths.of(head_dim, v_head_dim, value_in_key)
    block_h, head_programs = decode_blocks(num_heads, num_kv_heads)
    exact = q_BND.dtype == torch.float32
    block_n, num_warps, num_stages = loop_shape(exact, widths.d1, block_h)
    out_BNE = q_BND.new_empty(batch, num_heads, v_head_dim)
    if workspace is None and num_splits > 1:
        workspace = DecodeWorkspace.allocate(batch, num_heads, num_splits, v_head_dim, q_BND.device)
    partial = out_BNE if workspace is None else workspace.partial
    lse = out_BNE if workspace is None else workspace.lse
    _decode_kernel[(batch, head_programs, num_splits)](
        q_BND,
        k_SKD,
        v_SKE,
        request_table,
        request_rows,
        seq_lens,
        out_BNE,
        partial,
        lse,
        q_BND.stride(0),
        q_BND.stride(1),
        k_SKD.stride(0),
        k_SKD.stride(1),
        v_SKE.stride(0),
        v_SKE.stride(1),
        request_table.stride(0),
        num_splits,
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        D1=widths.d1,
        D2=widths.d2,
        E=v_head_dim,
        BLOCK_E=widths.block_e,
        VALUE_IS_D1=widths.value_is_d1,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        MIN_SPLIT=MIN_SPLIT_TOKENS,
        JOINED=num_splits == 1,
        PRECISION=dot_precision(q_BND.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        _join_kernel[(batch, num_heads)](
            partial,
            lse,
            seq_lens,
            out_BNE,
            num_splits,
            NUM_HEADS=num_heads,
            E=v_head_dim,
            BLOCK_E=widths.block_e,
            MIN_SPLIT=MIN_SPLIT_TOKENS,
            num_warps=4,
        )
    return out_BNE
