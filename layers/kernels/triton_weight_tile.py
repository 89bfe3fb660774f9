"""Tiles of weights for products of our own: as they lie, or block-fp8 and dequantised on the way to the product."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from layers.quantization import BlockScales

# The least inner width of a product on tensor cores.
_LEAST_INNER = 16


@triton.jit
def weight_tile(
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


def scale_arguments(weight_ENK: torch.Tensor, scales: BlockScales | None) -> tuple[torch.Tensor, int, int, int, int]:
    """(scales, their strides of experts and rows, rows and inner places that share one) for a kernel.

    Without scales the numbers are 0 and the tensor is one that the kernel does not read.
    """
    if scales is None:
        return weight_ENK, 0, 0, 0, 0
    return scales.values, scales.values.stride(0), scales.values.stride(1), *scales.block


def inner_width(block_k: int, scales: BlockScales | None) -> int:
    """block_k, or less where a tile of that inner width lies within one block of scales."""
    if scales is None:
        return block_k
    common = math.gcd(block_k, scales.block[1])
    return common if common >= _LEAST_INNER else block_k
