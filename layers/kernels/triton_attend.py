"""The loop that both attention kernels share: an online softmax over keys and values read through the request table.

Flash attention (Dao, 2023). Shape letters: M query rows of a program, D key width, E value width.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

# Exponentials are of base 2, which is what the hardware has: exp(x) = exp2(x * log2(e)).
LOG2_E = math.log2(math.e)


@triton.jit
def attend(
    acc,
    total,
    peak,
    q1,
    q2,
    k_head,
    v_head,
    table_row,
    position_m,
    start,
    end,
    stride_ks,
    stride_vs,
    scale_log2,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE_IS_D1: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go on with (acc [M, E], total [M], peak [M]) over positions start..end-1, and return them.

    The key is two blocks of widths D1 and D2, see `HeadWidths`; without D2 nothing is read from q2. peak is in powers
    of two. MASK: "none" where whole blocks of BLOCK_N are given and every row sees all of them, "end" where the last
    block may be cut, "causal" where besides a row sees no position after its own, position_m [M].
    """
    d1 = tl.arange(0, D1)
    e = tl.arange(0, BLOCK_E)
    for position in range(start, end, BLOCK_N):
        n = position + tl.arange(0, BLOCK_N)
        n_mask = n < end
        slot = tl.load(table_row + n, mask=n_mask, other=0).to(tl.int64)
        keys = k_head + slot[None, :] * stride_ks
        k1 = tl.load(keys + d1[:, None], mask=n_mask[None, :] & (d1[:, None] < D), other=0.0)
        scores = tl.dot(q1, k1.to(q1.dtype), input_precision=PRECISION)
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            k2 = tl.load(keys + d2[:, None], mask=n_mask[None, :] & (d2[:, None] < D), other=0.0)
            scores = tl.dot(q2, k2.to(q2.dtype), acc=scores, input_precision=PRECISION)
        scores = scores * scale_log2
        if MASK == "causal":
            scores = tl.where(n[None, :] <= position_m[:, None], scores, float("-inf"))
        if MASK == "end":
            scores = tl.where(n_mask[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * decay + tl.sum(weights, 1)
        if VALUE_IS_D1:
            values = tl.trans(k1)
        else:
            values = tl.load(
                v_head + slot[:, None] * stride_vs + e[None, :], mask=n_mask[:, None] & (e[None, :] < E), other=0.0
            )
        acc = tl.dot(weights.to(q1.dtype), values.to(q1.dtype), acc=acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak
