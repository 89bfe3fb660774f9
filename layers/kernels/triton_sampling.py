"""Greedy choice and sampling from the whole distribution in two launches, without writing probabilities out.

The first kernel reduces each chunk of a row to its maximum and its mass; the second finds the chunk that the row's
random number falls into and the token inside it. Each row depends on itself alone and chunks have a fixed size, so a
row's token does not depend on what else is in the batch.

Shape letters: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layers.kernels.triton_widths import power_of_two_above

_CHUNK = 2048


@triton.jit(do_not_specialize_on_alignment=["params_ptr"])
def _chunk_kernel(
    logits_ptr,
    params_ptr,
    peak_ptr,
    best_ptr,
    mass_ptr,
    stride_row,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk): its maximum (NaN if it has one), where that is, and the mass relative to it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride_row + i, mask=i < V, other=float("-inf"))
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(x, 0)
    best = tl.min(tl.where(x == peak, i, V), 0)
    temperature = tl.load(params_ptr + 2 * row).to(tl.float32)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    # An infinite peak would make NaN of the differences: a chunk of -inf has no mass, +inf is reported as invalid.
    usable = (peak > float("-inf")) & (peak < float("inf"))
    mass = tl.sum(tl.where(usable, tl.exp((x - tl.where(usable, peak, 0.0)) / temperature), 0.0), 0)
    at = row * C + chunk
    tl.store(peak_ptr + at, tl.where(is_nan, float("nan"), peak))
    tl.store(best_ptr + at, best)
    tl.store(mass_ptr + at, mass)


@triton.jit(do_not_specialize_on_alignment=["params_ptr"])
def _choose_kernel(
    logits_ptr,
    params_ptr,
    peak_ptr,
    best_ptr,
    mass_ptr,
    tokens_ptr,
    valid_ptr,
    stride_row,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GREEDY_TEMPERATURE: tl.constexpr,
):
    """Program (row). params: [B, 2] float64, temperature and random number."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    peaks = tl.load(peak_ptr + row * C + c, mask=c < C, other=float("-inf"))
    any_nan = tl.max((peaks != peaks).to(tl.int32), 0) > 0
    peak = tl.max(peaks, 0)
    valid = (peak > float("-inf")) & (peak < float("inf")) & (any_nan == 0)
    tl.store(valid_ptr + row, valid)
    best = tl.load(best_ptr + row * C + c, mask=c < C, other=V)
    token = tl.min(tl.where(peaks == peak, best, V), 0)
    token = tl.where(token < V, token, 0)
    temperature = tl.load(params_ptr + 2 * row).to(tl.float32)
    if valid & (temperature >= GREEDY_TEMPERATURE):
        mass = tl.load(mass_ptr + row * C + c, mask=c < C, other=0.0)
        mass = (mass * tl.exp((peaks - peak) / temperature)).to(tl.float64)
        cumulative = tl.cumsum(mass, 0)
        target = tl.load(params_ptr + 2 * row + 1) * tl.sum(mass, 0)
        # The first with cumulative mass above the target; rounding may leave none: then the last that has mass.
        last_chunk = tl.max(tl.where(mass > 0, c, 0), 0)
        chunk = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last_chunk)
        target -= tl.sum(tl.where(c < chunk, mass, 0.0), 0)
        i = tl.arange(0, CHUNK)
        column = chunk * CHUNK + i
        x = tl.load(logits_ptr + row * stride_row + column, mask=column < V, other=float("-inf"))
        weights = tl.exp((x - peak) / temperature).to(tl.float64)
        last = tl.max(tl.where(weights > 0, i, 0), 0)
        inside = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0), last)
        token = chunk * CHUNK + inside
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample_unfiltered(
    logits_BV: torch.Tensor, params_B2: torch.Tensor, greedy_temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B] int64, valid [B] bool); `valid` is False where a row's logits hold NaN or no finite maximum.

    logits_BV float32. params_B2 float64: temperature, below `greedy_temperature` meaning the maximum, and a number in
    [0, 1) that picks the token at that share of the row's probability in token order.
    """
    batch, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    chunks = triton.cdiv(vocab, _CHUNK)
    device = logits_BV.device
    peak_BC = torch.empty(batch, chunks, dtype=torch.float32, device=device)
    best_BC = torch.empty(batch, chunks, dtype=torch.int32, device=device)
    mass_BC = torch.empty(batch, chunks, dtype=torch.float32, device=device)
    tokens_B = torch.empty(batch, dtype=torch.int64, device=device)
    valid_B = torch.empty(batch, dtype=torch.bool, device=device)
    _chunk_kernel[(batch, chunks)](
        logits_BV,
        params_B2,
        peak_BC,
        best_BC,
        mass_BC,
        logits_BV.stride(0),
        V=vocab,
        C=chunks,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    _choose_kernel[(batch,)](
        logits_BV,
        params_B2,
        peak_BC,
        best_BC,
        mass_BC,
        tokens_B,
        valid_B,
        logits_BV.stride(0),
        V=vocab,
        C=chunks,
        CHUNK=_CHUNK,
        BLOCK_C=power_of_two_above(chunks),
        GREEDY_TEMPERATURE=greedy_temperature,
        num_warps=4,
    )
    return tokens_B, valid_B
