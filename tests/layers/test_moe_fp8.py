"""Experts that stay block-fp8 give the bits of the same experts dequantised at load, wherever both take one path.

Kernels run on the GPU or in Triton's interpreter, and are compiled for a GPU whether there is one or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layers.kernels.cpu import PackedWeight
from layers.kernels.triton_grouped import grouped_matmul
from layers.linear import pack_weights
from layers.moe import Experts, deep_gemm
from layers.moe.deep_gemm import DeepGemmExperts
from layers.moe.grouping import weighted_sum
from layers.moe.peer_memory import BufferShape, PeerBuffer, PeerExchange
from layers.moe.rebalance import Rebalancer, move_experts
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.parallel_layout import ParallelLayout
from layers.quantization import FP8_DTYPE, BlockScales, dequantize_block_fp8, quantize_block_fp8, scale_shape
from tests.layers.moe_support import (
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    TOP_K,
    default_dtype,
    make_fp8_experts,
    make_routing,
    make_rows,
    run_step,
)
from tests.models.thread_group import run_layout

pytestmark = pytest.mark.timeout(240)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEEP = MoEOptions(quantization="fp8")
# A block that divides the widths, one that does not, and one whose scales a tile needs several rows of.
NARROW = (16, 16)
BLOCKS = [NARROW, (24, 128), (10, 6)]
# Without bfloat16 in the interpreter, which cuts numbers to it where a device and torch round them.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
# Of one block on a GPU of compute capability 9.0, in bytes.
SHARED_MEMORY = 227 * 1024


def both(groups: ParallelGroups, block: tuple[int, int], **options: Any) -> tuple[Experts, Experts]:
    """(kept, dequantised)."""
    kept = replace(groups, moe=replace(groups.moe, quantization="fp8"))
    return make_fp8_experts(kept, block, **options), make_fp8_experts(groups, block, **options)


def product(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], x: torch.Tensor) -> tuple[Any, Any]:
    """(of float8 weights, of the same dequantised to x's dtype), of experts with 3, 0 and 7 of 14 rows."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32, device=DEVICE)
    plain = dequantize_block_fp8(codes, scale, block, x.dtype)
    x, codes, scale, plain = (part.to(DEVICE) for part in (x, codes, scale, plain))
    return grouped_matmul(x, codes, ends, scales=BlockScales(scale, block)), grouped_matmul(x, plain, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "block"),
    [((40, 200), (128, 128)), ((36, 40), (16, 16)), ((33, 50), (10, 6)), ((48, 64), (1, 64)), ((20, 36), (128, 1))],
    ids=str,
)
def test_grouped_product(sizes: tuple[int, int], block: tuple[int, int], dtype: torch.dtype) -> None:
    """Numbers whose sums are exact in float32, so that narrower tiles do not change them either."""
    columns, width = sizes
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 9, (3, columns, width), generator=generator).to(FP8_DTYPE)
    shape = scale_shape(tuple(codes.shape), block)
    scale = torch.exp2(torch.randint(-3, 4, shape, generator=generator).float())
    x = torch.randint(-4, 5, (14, width), generator=generator).to(dtype)
    out, expected = product(codes, scale, block, x)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert out[:10].abs().amax(dim=1).min() > 0
    assert torch.equal(out[10:], torch.zeros_like(out[10:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (10, 6)], ids=str)
def test_weights_are_rounded_as_at_load(block: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(3, 40, 136, generator=generator) * torch.logspace(-2, 2, 40)[:, None]
    out, expected = product(
        *quantize_block_fp8(weight, block), block, torch.randn(14, 136, generator=generator).to(dtype)
    )
    if DEVICE.type == "cuda" and dtype == torch.float16:
        # Tensor cores may add up the products of an instruction otherwise where a weight comes from a register.
        torch.testing.assert_close(out, expected, rtol=2**-10, atol=0)
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("block", "limit"), [((24, 128), 0.5), ((10, 6), None)], ids=str)
def test_one_rank(block: tuple[int, int], limit: float | None) -> None:
    kept, plain = both(ParallelGroups(), block, limit=limit)
    assert (kept.w13_E2IH.dtype, plain.w13_E2IH.dtype) == (FP8_DTYPE, torch.float32)
    assert (kept.dtype, plain.dtype) == (torch.float32, torch.float32)
    x, ends = make_rows(20), torch.tensor([0, 3, 3, 9, 9, 12, 12, 18], dtype=torch.int32)
    weights = torch.rand(20, generator=torch.Generator().manual_seed(2))
    for factors in (None, weights):
        assert torch.equal(kept.run_looped(x, ends, factors), plain.run_looped(x, ends, factors))
    kept, plain, x, ends, weights = (part.to(DEVICE) for part in (kept, plain, x, ends, weights))
    assert torch.equal(kept.run_triton(x, ends, weights), plain.run_triton(x, ends, weights))
    assert torch.equal(kept(x, ends), plain(x, ends))


def test_weights_take_half_the_memory_and_scales_little() -> None:
    experts, plain = (
        Experts(2, 512, 384, ParallelGroups(moe=moe), fp8_block=(128, 128)) for moe in (KEEP, MoEOptions())
    )
    kept_bytes, plain_bytes = (
        sum(parameter.nbytes for parameter in module.parameters()) for module in (experts, plain.bfloat16())
    )
    assert experts.w13_block == experts.w2_block == (128, 128)
    assert kept_bytes == plain_bytes // 2 * (1 + 4 / 128**2)


def test_without_the_option_or_the_format_weights_have_the_default_dtype() -> None:
    for groups, block in ((ParallelGroups(), (16, 16)), (ParallelGroups(moe=KEEP), None)):
        experts = Experts(4, HIDDEN, INTERMEDIATE, groups, fp8_block=block)
        assert not experts.is_fp8
        assert [parameter.dtype for parameter in experts.parameters()] == [torch.float32] * 2


def test_packed_weights_of_the_cpu() -> None:
    """Where the CPU's kernel takes dequantised experts, kept ones go through it too, and give its bits."""
    codes, scale = quantize_block_fp8(torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(3)), (32, 32))
    with default_dtype(torch.bfloat16):
        kept, plain = (Experts(4, 64, 32, ParallelGroups(moe=moe), fp8_block=(32, 32)) for moe in (KEEP, MoEOptions()))
    if not PackedWeight.accepts(plain.w13_E2IH[0]):
        pytest.skip("needs the matrix kernel")
    for experts, parts in ((kept, (codes, scale)), (plain, (dequantize_block_fp8(codes, scale, (32, 32)),))):
        for parameter, part in zip(experts.parameters(), (*parts, *parts), strict=True):
            parameter.copy_(part[(slice(None), *(slice(size) for size in parameter.shape[1:]))])
        pack_weights(torch.nn.Sequential(experts))
    assert (kept.w13_E2IH.numel(), plain.w13_E2IH.numel()) == (4 * 64 * 64, 0)
    generator = torch.Generator().manual_seed(4)
    x, ends = torch.randn(8, 64, generator=generator).bfloat16(), torch.tensor([1, 1, 4, 8], dtype=torch.int32)
    assert torch.equal(kept(x, ends), plain(x, ends))


LAYOUTS = [
    ((2, 2, 2), "none"),
    ((4, 1, 2), "none"),
    ((4, 2, 1), "none"),
    ((4, 2, 4), "deepep"),
    ((4, 4, 4), "megamoe"),
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("layout", "backend"), LAYOUTS)
def test_every_backend_and_split(layout: tuple[int, int, int], backend: str, block: tuple[int, int]) -> None:
    """Whole experts on ranks or columns of them, which may begin within a block: outputs to the last bit."""

    def work(groups: ParallelGroups) -> list[tuple[torch.Tensor, torch.Tensor]]:
        counts = [5, 0, 7, 1][: groups.data.size]
        kept, plain = both(groups, block)
        results = []
        for extends in (True, False):
            out, other = (run_step(groups, experts, counts, extends=extends)[0] for experts in (kept, plain))
            results.append((out, other))
        return results

    for results in run_layout(ParallelLayout(*layout), work, MoEOptions(backend)):
        for out, other in results:
            assert torch.equal(out, other)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_columns_of_ranks_are_those_of_the_whole(block: tuple[int, int]) -> None:
    whole, _ = both(ParallelGroups(), block)
    w13, w2 = (values(*parts) for parts in ((whole.w13_E2IH, whole.w13_scales), (whole.w2_EHI, whole.w2_scales)))
    for rank in range(4):
        part, _ = both(ParallelGroups(expert_columns=ParallelGroup(rank, 4)), block)
        share = INTERMEDIATE // 4
        own = slice(rank * share, (rank + 1) * share)
        gate, up = values(part.w13_E2IH, part.w13_scales).chunk(2, dim=1)
        assert torch.equal(gate, w13[:, :INTERMEDIATE][:, own])
        assert torch.equal(up, w13[:, INTERMEDIATE:][:, own])
        assert torch.equal(values(part.w2_EHI, part.w2_scales), w2[:, :, own])


def values(weight: torch.Tensor, scales: BlockScales | None) -> torch.Tensor:
    assert scales is not None
    return dequantize_block_fp8(weight, scales.values, scales.block)


@pytest.mark.parametrize("block", [NARROW, (10, 6)], ids=str)
def test_rows_over_the_memory_of_peers(block: tuple[int, int]) -> None:
    x, routing = [make_rows(count, count) for count in (5, 7)], [make_routing(count, seed=count) for count in (5, 7)]
    outs = []
    for kept in (True, False):
        shape = BufferShape(2, 8, HIDDEN, TOP_K, torch.float32)
        memory = [torch.zeros(shape.offsets[-1], dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        bases = [buffer.data_ptr() for buffer in memory]
        exchanges = [
            PeerExchange(PeerBuffer(shape, rank, memory[rank], bases, lambda: None), fused=True) for rank in range(2)
        ]
        groups = [ParallelGroups(experts=ParallelGroup(rank, 2)) for rank in range(2)]
        experts = [both(own, block)[0 if kept else 1].to(DEVICE) for own in groups]
        ids = [part.topk_ids.int().to(DEVICE) for part in routing]
        weights = [part.topk_weights.to(DEVICE) for part in routing]
        for rank, exchange in enumerate(exchanges):
            exchange.send(x[rank].to(DEVICE), ids[rank], weights[rank], 7, experts[rank].num_local)
        for exchange, own in zip(exchanges, experts, strict=True):
            exchange.compute(own, 7, weighted=True)
        outs.append(
            [
                weighted_sum(exchange.result(ids[rank]), torch.ones_like(weights[rank]), torch.float32)
                for rank, exchange in enumerate(exchanges)
            ]
        )
    for out, other in zip(*outs, strict=True):
        assert out.abs().max() > 0.1
        # The fused products of plain weights add up in another order.
        torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_move_with_the_weights(block: tuple[int, int]) -> None:
    old = [place % NUM_EXPERTS for place in range(NUM_EXPERTS + 4)]
    new = old[5:] + old[:5]
    whole, _ = both(ParallelGroups(), block)

    def work(groups: ParallelGroups) -> None:
        experts = make_fp8_experts(groups, block)
        move_experts(experts, old, new, groups.experts)
        for local in range(experts.num_local):
            moved, expected = experts.storage(local), whole.storage(new[experts.first + local])
            assert [part.dtype for part in moved] == [FP8_DTYPE, torch.float32] * 2
            for part, other in zip(moved, expected, strict=True):
                assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))

    run_layout(ParallelLayout(4, 4), work, replace(KEEP, num_redundant_experts=4))


def test_outputs_do_not_change_when_experts_move() -> None:
    options = MoEOptions(num_redundant_experts=4, enable_eplb=True, eplb_rebalance_num_iterations=2)

    def work(groups: ParallelGroups) -> list[list[int]]:
        pair = both(groups, (10, 6))
        rebalancers = [Rebalancer.of(torch.nn.Sequential(experts), groups) for experts in pair]
        plans = []
        for seed, counts in enumerate(([5, 0], [9, 1], [2, 2], [0, 7])):
            out, other = (run_step(groups, experts, counts, kind="skewed", seed=seed)[0] for experts in pair)
            assert torch.equal(out, other)
            for rebalancer in rebalancers:
                assert rebalancer is not None
                rebalancer.after_pass()
            assert pair[0].placement is not None
            plans.append(list(pair[0].placement.physical_to_logical))
        return plans

    plans = run_layout(ParallelLayout(2, 2, 2), work, options)[0]
    assert plans[0] != plans[1]


def test_deep_gemm_gets_float8_experts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised again, blocks whose largest number is not the largest float8 one would change."""
    handed: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]] = []

    def transform(*weights: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, str]:
        handed.append(weights)
        return "w13", "w2"

    library = SimpleNamespace(transform_weights_for_mega_moe_sm90=transform)
    monkeypatch.setattr(deep_gemm, "load_library", lambda *_: library)
    monkeypatch.setattr(deep_gemm, "_check", lambda *_: None)
    monkeypatch.setattr(deep_gemm, "_open_buffer", lambda *_: None)
    experts = Experts(2, 256, 128, ParallelGroups(moe=KEEP), fp8_block=(128, 128))
    kept = []
    for weight, scale in ((experts.w13_E2IH, experts.w13_scale_EAB), (experts.w2_EHI, experts.w2_scale_EAB)):
        codes, values = quantize_block_fp8(torch.randn(weight.shape), power_of_two=True)
        weight.data, scale.data = codes, values.float()
        kept.append((codes.clone(), values.float()))
    DeepGemmExperts(experts, ParallelGroup(), 8, 2)
    for (codes, scales), (own_codes, own_scales) in zip(handed[0], kept, strict=True):
        assert torch.equal(codes.view(torch.uint8), own_codes.view(torch.uint8))
        assert torch.equal(scales, own_scales)
    assert all(parameter.numel() == 0 for parameter in experts.parameters())


def compile_for_hopper(*cases: tuple[str, int, tuple[int, int, int], tuple[int, int] | None, str]) -> list[Any]:
    """One line of `compile_kernels` for each launch of the cases."""
    names = ("kernel", "rows", "sizes", "block", "dtype")
    words = json.dumps([dict(zip(names, case, strict=True)) for case in cases])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.compile_kernels", words],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_compiled(lines: list[Any], is_fp8: bool) -> None:
    for line in lines:
        assert line["target"] == "sm_90a"
        # Tensor cores would round float32.
        assert (line["products"] > 0) == (line["dtype"] != "torch.float32")
        assert line["shared"] <= SHARED_MEMORY
        # With a matrix of scales for each tile registers are short, and no known checkpoint comes with such blocks.
        assert line["spilled"] == 0 or 0 < line["scale_k"] < 16
        assert (line["conversions"] > 0) == is_fp8


DEEPSEEK_V3, QWEN3_30B = (32, 7168, 2048), (128, 2048, 768)


@pytest.mark.timeout(300)
def test_kernels_compile_for_hopper() -> None:
    """No device is needed; launches are those of a decode step of Qwen3-30B-A3B on one rank."""
    lines = compile_for_hopper(("grouped", 64, QWEN3_30B, (128, 128), "bfloat16"))
    assert [line["name"] for line in lines] == ["_grouped_kernel"] * 2
    assert {line["scale_k"] for line in lines} == {128}
    check_compiled(lines, is_fp8=True)


@pytest.mark.sweep
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kernel", "block"), [("grouped", (128, 128)), ("grouped", None), ("fused", None)], ids=str)
def test_kernels_compile_for_hopper_at_every_tile(kernel: str, block: tuple[int, int] | None) -> None:
    """Every number of rows an expert that has tiles of its own, sharded columns and odd blocks, and all dtypes."""
    cases = [
        (kernel, rows * sizes[0], sizes, block, "bfloat16")
        for sizes in (DEEPSEEK_V3, QWEN3_30B)
        for rows in (1, 24, 48, 200)
    ]
    cases += [(kernel, 64, QWEN3_30B, block, dtype) for dtype in ("float16", "float32")]
    if block is not None:
        # Columns of Qwen3-30B-A3B over four and eight ranks, of odd widths, and blocks of another size.
        cases += [
            (kernel, 64, (128, 2048, 192), (64, 128), "bfloat16"),
            (kernel, 64, (128, 2048, 96), (32, 128), "bfloat16"),
        ]
        cases += [(kernel, 64, (8, 576, 100), (4, 128), "bfloat16"), (kernel, 64, (8, 576, 100), (128, 4), "bfloat16")]
    lines = compile_for_hopper(*cases)
    assert len(lines) == 2 * len(cases)
    check_compiled(lines, is_fp8=block is not None)
