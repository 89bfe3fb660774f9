"""Block-fp8 tensors of a checkpoint: dequantised into a parameter, or kept in float8 with their scales beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layers.quantization import (
    FP8_DTYPE,
    SCALE_SUFFIX,
    cut_scales,
    dequantize_block_fp8,
    quantize_block_fp8,
    scale_shape,
)
from layers.weights import WeightPart
from models.checkpoint import Checkpoint
from models.errors import ModelError
from models.hf_config import HFConfig

_Spans = list[tuple[int, int]]


def read_dequantized(checkpoint: Checkpoint, part: WeightPart, scale: str, config: HFConfig) -> torch.Tensor:
    """The part's slice of a block-quantised matrix, float32 on its parameter's device.

    Scales belong to whole blocks, so the slice is widened to start on block boundaries and cut back afterwards.
    """
    block = _check(checkpoint, part, scale, config)
    lengths = _lengths(part, block)
    aligned = [(start // length * length, stop) for (start, stop), length in zip(part.source, lengths, strict=True)]
    # On the device of the parameter: a GPU converts far faster, and float8 is fewer bytes to move there.
    device = part.target.device
    weight = dequantize_block_fp8(
        checkpoint.read(part.name, aligned).to(device),
        checkpoint.read(scale, _blocks(part.source, lengths)).to(device),
        block,
    )
    cut = (slice(start - first, None) for (start, _), (first, _) in zip(part.source, aligned, strict=True))
    return weight[tuple(cut)]


def keep(checkpoint: Checkpoint, part: WeightPart, scale: str | None, config: HFConfig) -> None:
    """Fill a part that stays float8, and its scales. scale: their tensor, None where the checkpoint has none."""
    if scale is None:
        raise ModelError(
            f"{checkpoint.path(part.name)}: tensor {part.name} is {checkpoint.dtype(part.name)} without "
            f"{part.name}{SCALE_SUFFIX}, and --quantization fp8 keeps experts that are block-fp8: leave the flag out"
        )
    block = _check(checkpoint, part, scale, config)
    blocks = _blocks(part.source, _lengths(part, block))
    _fill(part, checkpoint.read(part.name, part.source), checkpoint.read(scale, blocks), block)


def keep_quantized(tensor: torch.Tensor, parts: Iterable[WeightPart], config: HFConfig) -> None:
    """Fill parts that stay float8 with their slices of a whole tensor of any float dtype, quantised as one."""
    assert config.fp8_block is not None
    codes, scale_inv = quantize_block_fp8(tensor, config.fp8_block)
    for part in parts:
        blocks = _blocks(part.source, _lengths(part, config.fp8_block))
        _fill(part, codes[_slices(part.source)], scale_inv[_slices(blocks)], config.fp8_block)


def _check(checkpoint: Checkpoint, part: WeightPart, scale: str, config: HFConfig) -> tuple[int, int]:
    """The block's size; ModelError where weight, scales and config do not fit together."""
    block = config.fp8_block
    if block is None or len(part.shape) < 2:
        raise ModelError(
            f"{checkpoint.path(scale)}: tensor {scale} needs a matrix and a quantization_config in {config.source}"
        )
    expected = scale_shape(part.shape, block)
    if checkpoint.shape(scale) != expected:
        raise ModelError(
            f"{checkpoint.path(scale)}: tensor {scale} has shape {list(checkpoint.shape(scale))}; blocks of "
            f"{list(block)} of {part.name} {list(part.shape)} need {list(expected)}"
        )
    stored = checkpoint.dtype(part.name)
    if stored != FP8_DTYPE:
        raise ModelError(
            f"{checkpoint.path(part.name)}: tensor {part.name} has scales but is {stored}, not {FP8_DTYPE}"
        )
    checkpoint.dtype(scale)
    return block


def _lengths(part: WeightPart, block: tuple[int, int]) -> tuple[int, ...]:
    """The block's size in every dimension: along a stack of matrices each index has scales of its own."""
    return (*(1 for _ in part.source[:-2]), *block)


def _blocks(source: Sequence[tuple[int, int]], lengths: Sequence[int]) -> _Spans:
    """(start, stop) of the blocks that a slice lies in, in each dimension."""
    return [(start // length, -(-stop // length)) for (start, stop), length in zip(source, lengths, strict=True)]


def _slices(spans: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in spans)


def _fill(part: WeightPart, codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> None:
    """codes: the part's own. scale_inv: of the blocks that it lies in."""
    assert part.scales is not None
    part.target.copy_(codes.reshape(part.target.shape))
    rows, columns = part.source[-2:]
    scales = cut_scales(scale_inv, block, rows, columns, part.scales.block)
    part.scales.target.copy_(scales.reshape(part.scales.target.shape))
