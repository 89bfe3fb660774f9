"""Block-fp8 weights: float8_e4m3fn numbers with one scale for every block of rows and columns (DeepSeek-V3's format).

A weight is stored as `x.weight` [..., N, K] and `x.weight_scale_inv` [..., ceil(N / n), ceil(K / k)]; the value is
weight * scale_inv, despite the name. The last block of a dimension may be partial.

Shape letters: N rows, K columns, n and k the block's rows and columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Suffix that turns the name of a weight into the name of its scales.
SCALE_SUFFIX = "_scale_inv"

FP8_DTYPE = torch.float8_e4m3fn


class BlockScales(NamedTuple):
    """Scales of float8 weights [..., N, K], which stay as they are.

    values: float32 [..., ceil(N / n), ceil(K / k)]. block: (n, k), the rows and columns that share one.
    """

    values: torch.Tensor
    block: tuple[int, int]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight of `shape` [..., N, K]."""
    *batch, rows, columns = shape
    return (*batch, -(-rows // block[0]), -(-columns // block[1]))


def dequantize_block_fp8(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "the weight",
) -> torch.Tensor:
    """The weight [..., N, K] in `dtype`; the product is taken in float32.

    weight: float8_e4m3fn; of a larger weight it may be any rows and columns that begin on a block's edge.
    scale_inv: its scales; float32 or any other float dtype, float8_e8m0fnu (powers of two, "ue8m0") included.
    ValueError naming `name` and the expected shape when the scales are not of the weight's shape.
    """
    expected = scale_shape(tuple(weight.shape), block)
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"{name}{SCALE_SUFFIX} has shape {list(scale_inv.shape)}; expected {list(expected)}: "
            f"one scale for every {block[0]}x{block[1]} block"
        )
    if weight.dtype != FP8_DTYPE:
        raise ValueError(f"{name} has scales but is {weight.dtype}; expected {FP8_DTYPE}")
    rows, columns = block
    scale_of_columns = scale_inv.float().repeat_interleave(columns, dim=-1)[..., : weight.shape[-1]]
    values = weight.float()
    # Block row by block row: scales of full size would be one more matrix to write and read.
    for part, scale in zip(values.split(rows, dim=-2), scale_of_columns.split(1, dim=-2), strict=True):
        part.mul_(scale)
    return values.to(dtype)


def cut_scales(
    scale_inv: torch.Tensor,
    block: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    cut: tuple[int, int],
) -> torch.Tensor:
    """float32 [..., ceil(R / cut[0]), ceil(C / cut[1])]: scales of a part of a weight [R, C] for blocks of size `cut`.

    scale_inv: of the weight's own blocks, of size `block`, that the part lies in. rows, columns: where in the weight
    it begins and ends. ValueError unless cut divides block and both starts, so that no new block lies in two old ones.
    """
    for (start, stop), size, step, dim in zip((rows, columns), block, cut, (-2, -1), strict=True):
        if size % step or start % step:
            raise ValueError(f"blocks of {step} do not divide blocks of {size} in a part that begins at {start}")
        places = torch.arange(start, stop, step, device=scale_inv.device) // size - start // size
        scale_inv = scale_inv.float().index_select(dim, places)
    return scale_inv


def quantize_block_fp8(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight float8_e4m3fn [..., N, K], scale_inv [..., ceil(N / n), ceil(K / k)]) of a weight of any float dtype.

    A block's scale maps its largest magnitude to the largest float8 number; a block of zeros has scale 1.
    power_of_two: round scales up to powers of two and return them as float8_e8m0fnu instead of float32.
    """
    rows, columns = weight.shape[-2:]
    scale_rows, scale_columns = scale_shape(tuple(weight.shape), block)[-2:]
    padding = (0, scale_columns * block[1] - columns, 0, scale_rows * block[0] - rows)
    padded = torch.nn.functional.pad(weight.float(), padding)
    blocks = padded.unflatten(-1, (scale_columns, block[1])).unflatten(-3, (scale_rows, block[0]))
    largest = blocks.abs().amax(dim=(-3, -1))
    scale = torch.where(largest > 0, largest / torch.finfo(FP8_DTYPE).max, 1.0)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = (blocks / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    quantized = scaled[..., :rows, :columns].to(FP8_DTYPE)
    return quantized.contiguous(), scale.to(torch.float8_e8m0fnu) if power_of_two else scale
