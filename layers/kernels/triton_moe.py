"""Routing, sorting by expert and weighted summation of a mixture-of-experts layer, one launch each.

Shape letters: T token rows, E experts, K experts of a token, R = T * K rows sorted by expert, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import power_of_two_above


@triton.jit
def _softmax_topk_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    stride_row,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Program (token): the largest of the row again and again, the lower id of two equal ones first."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + t * stride_row + e, mask=e < E, other=float("-inf")).to(tl.float32)
    probs = tl.exp(logits - tl.max(logits, 0))
    probs = probs / tl.sum(probs, 0)
    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    # NaN logits choose ids in range all the same: no comparison holds for them, so the minimum over none is clamped.
    left = tl.where(e < E, probs, -1.0)
    for i in tl.static_range(TOP_K):
        largest = tl.max(left, 0)
        chosen = tl.minimum(tl.min(tl.where(left == largest, e, BLOCK_E), 0), E - 1)
        ids = tl.where(k == i, chosen, ids)
        weights = tl.where(k == i, largest, weights)
        left = tl.where(e == chosen, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + t * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weights_ptr + t * TOP_K + k, weights, mask=k < TOP_K)


def softmax_topk(logits_TE: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [T, K] int32, weights [T, K] float32); see `layers.moe.router.softmax_topk`."""
    num_tokens, num_experts = logits_TE.shape
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        _softmax_topk_kernel[(num_tokens,)](
            logits_TE,
            ids_TK,
            weights_TK,
            logits_TE.stride(0),
            E=num_experts,
            TOP_K=top_k,
            BLOCK_E=power_of_two_above(num_experts),
            BLOCK_K=power_of_two_above(top_k, 1),
            RENORMALIZE=renormalize,
            num_warps=1 if num_experts <= 256 else 4,
        )
    return ids_TK, weights_TK


@triton.jit(do_not_specialize=["num_rows"])
def _sort_kernel(
    ids_ptr, tokens_ptr, places_ptr, ends_ptr, num_rows, E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (expert): counts the rows of lower experts, then hands out places to its own in row order."""
    expert = tl.program_id(0)
    place = 0
    own = 0
    for at in range(0, num_rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + row, mask=row < num_rows, other=E + 1)
        place += tl.sum((ids < expert).to(tl.int32), 0)
        own += tl.sum((ids == expert).to(tl.int32), 0)
    if expert < E:
        tl.store(ends_ptr + expert, place + own)
    for at in range(0, num_rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + row, mask=row < num_rows, other=E + 1)
        mine = (ids == expert).to(tl.int32)
        target = place + tl.cumsum(mine, 0) - mine
        tl.store(places_ptr + row, target.to(tl.int64), mask=mine > 0)
        tl.store(tokens_ptr + target, row // TOP_K, mask=mine > 0)
        place += tl.sum(mine, 0)


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stable sort of the (token, k) pairs by expert: (tokens [R] int32, places [T, K] int64, ends [E] int32).

    tokens: of each sorted row. places: the sorted row of each pair. ends: where each expert's rows end. ids are int32
    in [0, num_experts]; rows of `num_experts` (experts elsewhere) come last.
    """
    num_tokens, top_k = ids_TK.shape
    num_rows = num_tokens * top_k
    tokens_R = torch.empty(num_rows, dtype=torch.int32, device=ids_TK.device)
    places_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=ids_TK.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device)
    _sort_kernel[(num_experts + 1,)](
        ids_TK,
        tokens_R,
        places_TK,
        ends_E,
        num_rows,
        E=num_experts,
        TOP_K=top_k,
        BLOCK=1024 if num_rows <= 4096 else 4096,
        num_warps=4,
    )
    return tokens_R, places_TK, ends_E


@triton.jit
def _weighted_sum_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, stride_y, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    # In the router's order, so that a token's sum does not depend on where its rows were sorted to.
    for k in tl.static_range(TOP_K):
        place = tl.load(places_ptr + t * TOP_K + k)
        weight = tl.load(weights_ptr + t * TOP_K + k)
        total += weight * tl.load(y_ptr + place * stride_y + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


def weighted_sum(
    y_RH: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[T, H] in `dtype`: the sum of each token's rows times their weights (float32), accumulated in float32."""
    num_tokens, top_k = places_TK.shape
    width = y_RH.shape[1]
    out_TH = torch.empty(num_tokens, width, dtype=dtype, device=y_RH.device)
    block = min(1024, power_of_two_above(width))
    if num_tokens:
        _weighted_sum_kernel[(num_tokens, triton.cdiv(width, block))](
            y_RH, places_TK, weights_TK, out_TH, y_RH.stride(0), H=width, TOP_K=top_k, BLOCK_H=block, num_warps=4
        )
    return out_TH
