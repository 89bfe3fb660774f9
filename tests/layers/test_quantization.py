"""Block-fp8 weights: round trips at odd shapes, slices, scale formats and refusals."""

from __future__ import annotations

import pytest
import torch

from layers.quantization import cut_scales, dequantize_block_fp8, quantize_block_fp8, scale_shape

SHAPES = [(128, 128), (192, 576), (576, 320), (64, 576), (129, 127), (1, 1), (3, 192, 320)]


def naive_dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out = weight.float().clone()
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[..., rows, columns] *= scale[..., i, j, None, None].float()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_round_trip(shape: tuple[int, ...], power_of_two: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    # Rows of very different size, so that a scale of the wrong block would show.
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[-2])[:, None]
    quantized, scale = quantize_block_fp8(weight, power_of_two=power_of_two)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.dtype == (torch.float8_e8m0fnu if power_of_two else torch.float32)
    assert tuple(scale.shape) == scale_shape(shape, (128, 128))
    restored = dequantize_block_fp8(quantized, scale)
    assert torch.equal(restored, naive_dequantize(quantized, scale, (128, 128)))
    # Three mantissa bits: half a step is 1/16 of the number, and what lies below the smallest normal one is absolute.
    largest = naive_dequantize(torch.full(shape, 448.0).to(torch.float8_e4m3fn), scale, (128, 128))
    assert ((restored - weight).abs() <= weight.abs() / 16 + largest / 448 * 2**-10).all()


def test_known_values() -> None:
    weight = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.5]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    expected = torch.tensor([[1.0, 2.0, 40.0], [800.0, 1600.0, 500.0]])
    assert torch.equal(dequantize_block_fp8(weight, scale, (1, 2)), expected)


def test_ue8m0_scale_is_a_power_of_two() -> None:
    scale = torch.tensor([[126, 127, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = torch.ones(1, 3).to(torch.float8_e4m3fn)
    assert dequantize_block_fp8(weight, scale, (1, 1)).tolist() == [[0.5, 1.0, 8.0]]


def test_rows_and_columns_from_a_block_edge_on() -> None:
    weight, scale = quantize_block_fp8(torch.randn(320, 576, generator=torch.Generator().manual_seed(2)))
    part = dequantize_block_fp8(weight[128:300, 256:], scale[1:3, 2:])
    assert torch.equal(part, dequantize_block_fp8(weight, scale)[128:300, 256:])


@pytest.mark.parametrize(
    ("rows", "columns", "cut"),
    [
        ((0, 320), (0, 576), (128, 128)),
        ((192, 320), (0, 576), (64, 128)),
        ((128, 320), (96, 192), (64, 96 // 3)),
        ((5, 17), (576 - 7, 576), (1, 1)),
    ],
)
def test_scales_of_smaller_blocks(rows: tuple[int, int], columns: tuple[int, int], cut: tuple[int, int]) -> None:
    """A part that does not begin on a block's edge, with the scales of blocks of its own, is the same part."""
    weight, scale = quantize_block_fp8(torch.randn(320, 576, generator=torch.Generator().manual_seed(4)))
    own = scale[rows[0] // 128 : -(-rows[1] // 128), columns[0] // 128 : -(-columns[1] // 128)]
    part = weight[slice(*rows), slice(*columns)]
    parts_scale = cut_scales(own, (128, 128), rows, columns, cut)
    assert tuple(parts_scale.shape) == scale_shape(tuple(part.shape), cut)
    expected = dequantize_block_fp8(weight, scale)[slice(*rows), slice(*columns)]
    assert torch.equal(dequantize_block_fp8(part, parts_scale, cut), expected)


@pytest.mark.parametrize(("cut", "start"), [((96, 128), 0), ((128, 128), 64)])
def test_blocks_that_would_lie_in_two_others_are_refused(cut: tuple[int, int], start: int) -> None:
    with pytest.raises(ValueError, match=rf"blocks of {cut[0]} do not divide blocks of 128 .* begins at {start}"):
        cut_scales(torch.ones(3, 1), (128, 128), (start, 256), (0, 128), cut)


def test_target_dtype() -> None:
    weight, scale = quantize_block_fp8(torch.randn(130, 130, generator=torch.Generator().manual_seed(3)))
    restored = dequantize_block_fp8(weight, scale, dtype=torch.bfloat16)
    assert torch.equal(restored, dequantize_block_fp8(weight, scale).bfloat16())


def test_zero_block_stays_zero() -> None:
    weight, scale = quantize_block_fp8(torch.zeros(4, 4))
    assert torch.equal(dequantize_block_fp8(weight, scale), torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (2, 5, 1), (3, 5)])
def test_wrong_scale_shape_names_the_expected_one(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(192, 576).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"layer\.up_proj\.weight_scale_inv has shape .*expected \[2, 5\].*128x128"):
        dequantize_block_fp8(weight, torch.ones(shape), name="layer.up_proj.weight")


def test_weight_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w has scales but is torch\.float16"):
        dequantize_block_fp8(torch.zeros(4, 4, dtype=torch.float16), torch.ones(1, 1), name="w")
