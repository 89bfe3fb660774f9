"""Expert layers over the memory of other GPUs of the host: rows pushed to the owners of their experts, outputs pushed
back into the places that the rows' ranks keep for them. Nothing here waits or signals; callers put a barrier between.

Where peers' buffers begin is read from a table of addresses on the device, and every launch grid depends on row counts
that all ranks know, so a CUDA graph can hold all of it. `layers.moe.peer_memory` says what lies where in a buffer.

Shape letters: T token rows of this rank, K experts of a token, R ranks, M rows a rank has in a step at most (padding
included), C rows a buffer has room for, N = R * M rows received, P = N * K (row, expert) pairs, E experts of this rank,
H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import power_of_two_above


@triton.jit(do_not_specialize=["rank", "num_tokens", "capacity", "num_local"])
def _push_kernel(
    x_ptr,
    ids_ptr,
    factors_ptr,
    bases_ptr,
    x_offset,
    ids_offset,
    factors_offset,
    rank,
    num_tokens,
    capacity,
    num_local,
    stride_x,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    """Program (row, peer, block of the hidden size): the row to a peer that has one of its experts, its ids to all."""
    t = tl.program_id(0)
    peer = tl.program_id(1)
    block = tl.program_id(2)
    base = tl.load(bases_ptr + peer)
    k = tl.arange(0, BLOCK_K)
    real = (k < TOP_K) & (t < num_tokens)
    ids = tl.load(ids_ptr + t.to(tl.int64) * TOP_K + k, mask=real, other=-1)
    local = ids - peer * num_local
    local = tl.where((local >= 0) & (local < num_local) & real, local, num_local)
    place = (rank * capacity + t).to(tl.int64)
    if block == 0:
        ids_out = (base + ids_offset).to(tl.pointer_type(tl.int32))
        tl.store(ids_out + place * TOP_K + k, local, mask=k < TOP_K)
        if HAS_FACTORS:
            factors = tl.load(factors_ptr + t.to(tl.int64) * TOP_K + k, mask=real, other=0.0)
            factors_out = (base + factors_offset).to(tl.pointer_type(tl.float32))
            tl.store(factors_out + place * TOP_K + k, factors, mask=k < TOP_K)
    if tl.min(local, 0) < num_local:
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        row = tl.load(x_ptr + t.to(tl.int64) * stride_x + h, mask=h < H)
        x_out = (base + x_offset).to(tl.pointer_type(x_ptr.dtype.element_ty))
        tl.store(x_out + place * H + h, row, mask=h < H)


def push_rows(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    factors_TK: torch.Tensor | None,
    bases_R: torch.Tensor,
    offsets: tuple[int, int, int],
    rank: int,
    rows: int,
    capacity: int,
    num_local: int,
) -> None:
    """Write this rank's rows into every peer's buffer, row t at place rank * C + t, and mark places T to M as empty.

    ids_TK: int32, physical experts, -1 for none. bases_R: [R] int64, addresses of the buffers; offsets: of rows, ids
    and factors in them, in bytes. A peer gets the ids as numbers of its own experts, num_local for all others.
    """
    num_tokens, top_k = ids_TK.shape
    width = x_TH.shape[1]
    block = min(2048, power_of_two_above(width))
    _push_kernel[(rows, bases_R.shape[0], triton.cdiv(width, block))](
        x_TH,
        ids_TK,
        factors_TK if factors_TK is not None else ids_TK,
        bases_R,
        *offsets,
        rank,
        num_tokens,
        capacity,
        num_local,
        x_TH.stride(0),
        H=width,
        TOP_K=top_k,
        BLOCK_H=block,
        BLOCK_K=power_of_two_above(top_k, 1),
        HAS_FACTORS=factors_TK is not None,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "capacity", "E"])
def _gather_kernel(
    x_ptr, pairs_ptr, ends_ptr, out_ptr, rows, capacity, E, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Program (sorted row, block): rows that belong to no expert here are left as they are."""
    r = tl.program_id(0)
    if r >= tl.load(ends_ptr + E - 1):
        return
    n = tl.load(pairs_ptr + r) // TOP_K
    place = (n // rows).to(tl.int64) * capacity + n % rows
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.load(x_ptr + place * H + h, mask=h < H)
    tl.store(out_ptr + r.to(tl.int64) * H + h, row, mask=h < H)


def gather_rows(
    x_RCH: torch.Tensor, pairs_P: torch.Tensor, ends_E: torch.Tensor, rows: int, top_k: int
) -> torch.Tensor:
    """[P, H]: the received row of each pair in the order of the experts; unwritten from the last expert's end on.

    pairs_P: int32, rank * M * K + row * K + k of each sorted row.
    """
    width = x_RCH.shape[2]
    out_PH = x_RCH.new_empty(pairs_P.shape[0], width)
    block = min(2048, power_of_two_above(width))
    _gather_kernel[(pairs_P.shape[0], triton.cdiv(width, block))](
        x_RCH,
        pairs_P,
        ends_E,
        out_PH,
        rows,
        x_RCH.shape[1],
        ends_E.shape[0],
        H=width,
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=4,
    )
    return out_PH


@triton.jit(do_not_specialize=["rows", "E"])
def _push_back_kernel(
    y_ptr,
    pairs_ptr,
    ends_ptr,
    bases_ptr,
    out_offset,
    rows,
    E,
    stride_y,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (sorted row, block): the output to place (row, k) of the rank that the row came from."""
    r = tl.program_id(0)
    if r >= tl.load(ends_ptr + E - 1):
        return
    pair = tl.load(pairs_ptr + r)
    peer = pair // (rows * TOP_K)
    place = (pair - peer * rows * TOP_K).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.load(y_ptr + r.to(tl.int64) * stride_y + h, mask=h < H)
    out = (tl.load(bases_ptr + peer) + out_offset).to(tl.pointer_type(y_ptr.dtype.element_ty))
    tl.store(out + place * H + h, row, mask=h < H)


def push_back(
    y_PH: torch.Tensor,
    pairs_P: torch.Tensor,
    ends_E: torch.Tensor,
    bases_R: torch.Tensor,
    out_offset: int,
    rows: int,
    top_k: int,
) -> None:
    """Write each output into the buffer of the rank that its row came from, at place row * K + k from out_offset on."""
    width = y_PH.shape[1]
    block = min(2048, power_of_two_above(width))
    _push_back_kernel[(y_PH.shape[0], triton.cdiv(width, block))](
        y_PH,
        pairs_P,
        ends_E,
        bases_R,
        out_offset,
        rows,
        ends_E.shape[0],
        y_PH.stride(0),
        H=width,
        TOP_K=top_k,
        BLOCK_H=block,
        num_warps=4,
    )
