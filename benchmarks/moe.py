"""Time of one layer of routed experts for each backend, against the least that memory, arithmetic and links allow.

    python benchmarks/moe.py [--shapes Qwen3-30B-A3B] [--backends none,deepep,megamoe] [--tokens 1,8,128]
    python benchmarks/moe.py --quantization fp8
    torchrun --nproc-per-node=2 benchmarks/moe.py --backends none,deepep,megamoe,deep_gemm

Experts are spread over all ranks (EP) and every rank has its own rows (data-parallel attention). On GPUs a layer is
timed in a CUDA graph, on CPUs eagerly, in float32 and at a sixteenth of the widths. --check compares outputs instead.
Backend "exchange" is deepep's low-latency layout with nothing done between dispatch and combine, "deep_gemm_calls" are
the two calls of the DeepGEMM library with nothing of ours around them. --quantization fp8
keeps weights in float8, with scales of 128 x 128 blocks; --check then compares with the same weights dequantised.
Rows are spread evenly over the experts. Rank 0 prints one JSON line a case: microseconds a layer (median over launches,
slowest rank) and the three floors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from layers.forward_batch import StepRows
from layers.moe import Experts, MoEBackend, Routing, make_backend
from layers.moe.deep_gemm import DeepGemmExperts
from layers.moe.placement import fake_choice
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.quantization import BlockScales, dequantize_block_fp8, quantize_block_fp8

# Of one H200 (docs/benchmarks_gpu.md): bytes a second of memory and of the link to a peer, bf16 operations a second.
MEMORY, LINK, ARITHMETIC = 4.2e12, 365e9, 780e12


@dataclass(frozen=True)
class Shape:
    """Widths of a model's expert layers."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "DeepSeek-V4-Flash": Shape(4096, 2048, 256, 6),
}
SMALL = Shape(512, 512, 16, 4)
FP8_BLOCK = (128, 128)


def floors(shape: Shape, tokens: int, ranks: int, weight_bytes: int) -> dict[str, float]:
    """Microseconds a rank needs at least to read weights, to compute, and to send its rows and outputs."""
    rows = tokens * ranks
    hit = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** rows)
    weights = 3 * shape.hidden_size * shape.intermediate_size
    away = 1 - 1 / ranks
    to_ranks = (ranks - 1) * (1 - (1 - 1 / ranks) ** shape.top_k)
    sent = tokens * shape.hidden_size * 2 * (to_ranks + shape.top_k * away)
    return {
        "memory_us": hit / ranks * weights * weight_bytes / MEMORY * 1e6,
        "arithmetic_us": tokens * shape.top_k * 2 * weights / ARITHMETIC * 1e6,
        "link_us": sent / LINK * 1e6,
    }


class NoWork(torch.nn.Module):
    """In place of experts, with their weights' shapes: rows come back as they are, which leaves the exchange."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.num_local, self.num_physical, self.first = experts.num_local, experts.num_physical, experts.first
        self.placement = None

    def forward(self, x_RH: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return x_RH


def deep_gemm_calls(held: DeepGemmExperts, x_TH: torch.Tensor, routing: Routing) -> None:
    import deep_gemm

    buffer = held.buffer
    places = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(x_TH, *routing, *places, x_TH.shape[0])
    deep_gemm.fp8_mega_moe(torch.empty_like(x_TH), held.w13, held.w2, buffer)


def options_of(name: str, tokens: int) -> MoEOptions:
    if name == "exchange":
        name = "deepep"
    if name == "deep_gemm":
        return MoEOptions("megamoe", mega_moe_max_tokens_per_rank=tokens, mega_moe_kernel="deep_gemm")
    return MoEOptions(name, deepep_max_tokens_per_rank=tokens, mega_moe_max_tokens_per_rank=tokens)


def matrices(experts: Experts) -> tuple[tuple[torch.nn.Parameter, BlockScales | None], ...]:
    return (experts.w13_E2IH, experts.w13_scales), (experts.w2_EHI, experts.w2_scales)


def make_layer(
    name: str, shape: Shape, tokens: int, groups: ParallelGroups, device: torch.device, quantization: str | None = None
) -> tuple[MoEBackend, Experts]:
    """tokens: most rows of a rank in any of the steps that follow."""
    groups = replace(groups, moe=replace(options_of(name, tokens), quantization=quantization))
    with torch.device(device):
        experts = Experts(shape.num_experts, shape.hidden_size, shape.intermediate_size, groups, fp8_block=FP8_BLOCK)
    generator = torch.Generator(device).manual_seed(groups.experts.rank)
    for weight, scales in matrices(experts):
        for local, stored in enumerate(weight.data):
            values = torch.empty(stored.shape, device=device)
            values.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
            if scales is not None:
                values, scales.values.data[local] = quantize_block_fp8(values, scales.block)
            stored.copy_(values)
    backend = make_backend(groups)
    backend.reserve(tokens, experts, shape.top_k)
    return backend, NoWork(experts) if name == "exchange" else experts  # type: ignore[return-value]


def time_layer(layer: Callable[[], Any], device: torch.device, group: ParallelGroup) -> float:
    """Median microseconds of a call."""
    if device.type == "cpu":
        layer()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            layer()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # weights and rows are made there
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer()
    stream.synchronize()
    if group.size > 1:
        dist.barrier(group=group.process_group)
    graph, repeats = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            layer()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times[2:])


def time_backend(
    name: str,
    shape: Shape,
    all_tokens: list[int],
    groups: ParallelGroups,
    device: torch.device,
    quantization: str | None,
) -> list[float]:
    """Microseconds a layer on the slowest rank, for each number of rows a rank."""
    group, most = groups.experts, max(all_tokens)
    is_library = name == "deep_gemm_calls"
    backend, experts = make_layer("none" if is_library else name, shape, most, groups, device, quantization)
    held = DeepGemmExperts(experts, group, most, shape.top_k) if is_library else None
    results = []
    for tokens in all_tokens:
        x_TH = torch.randn(tokens, shape.hidden_size, device=device)
        rows = tokens * (group.rank + 1)
        ids_TK = fake_choice(rows, shape.top_k, shape.num_experts, device)[-tokens:].contiguous()
        routing = Routing(ids_TK, torch.full_like(ids_TK, 1 / shape.top_k, dtype=torch.float32))
        step = StepRows((tokens,) * group.size, extends=False)
        layer = partial(backend.forward, x_TH, routing, experts, step)
        if held is not None:
            layer = partial(deep_gemm_calls, held, x_TH, routing)
        slowest = torch.tensor([time_layer(layer, device, group)], dtype=torch.float64, device=device)
        if group.size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results.append(slowest.item())
    return results


def check_backend(name: str, groups: ParallelGroups, device: torch.device, quantization: str | None) -> float:
    """Largest difference from one rank with all experts, relative to its largest output, over steps in which
    ranks have different numbers of rows, some none, and every rank's tensors are filled up.
    """
    group, most = groups.experts, 24
    backend, experts = make_layer(name, SMALL, most, groups, device, quantization)
    # Made again: a backend may hold its weights in another form by now.
    plain = make_layer("none", SMALL, most, groups, device, quantization)[1]
    whole = make_layer("none", SMALL, most, ParallelGroups(), device)[1]
    for parameter, (part, scales) in zip(whole.parameters(), matrices(plain), strict=True):
        values = part.data
        if scales is not None:
            values = dequantize_block_fp8(values, scales.values, scales.block, parameter.dtype)
        parameter.data = group.all_gather(values, dim=0)
        if name == "deep_gemm" and scales is None:
            parameter.data = dequantize_block_fp8(*quantize_block_fp8(parameter.data), dtype=parameter.dtype)
    alone = make_backend(ParallelGroups())
    worst = torch.zeros(1, device=device)
    for step, base in enumerate((most, 5, 0, 1, most, 2)):
        ranks = range(group.size)
        counts = tuple(max(0, base - rank) if step % 2 else base * (rank + 1) // group.size for rank in ranks)
        rows = StepRows(counts, "max", most, extends=step == 1)
        own = counts[group.rank]
        x_TH = torch.randn(most, SMALL.hidden_size, device=device)
        ids_TK = fake_choice(most * (step + 1), SMALL.top_k, SMALL.num_experts, device)[-most:].contiguous()
        routing = Routing(ids_TK, torch.rand(most, SMALL.top_k, device=device, dtype=torch.float32))
        out_TH = backend.forward(x_TH, routing, experts, rows)[:own].float()
        real = Routing(ids_TK[:own], routing.topk_weights[:own])
        wanted_TH = alone.forward(x_TH[:own], real, whole, StepRows((own,))).float()
        if own:
            worst = torch.maximum(worst, (out_TH - wanted_TH).abs().max() / wanted_TH.abs().max())
    if group.size > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--backends", default="none,deepep,megamoe")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,4096", help="rows of a rank")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quantization", choices=("fp8",), help="keep weights in float8 (default: they are bfloat16)")
    parser.add_argument("--check", action="store_true", help="compare a small layer with one rank's instead of timing")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    group = ParallelGroup()
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = ParallelGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    all_tokens = [int(count) for count in arguments.tokens.split(",")]
    groups = ParallelGroups(experts=group, data=group)
    if arguments.check:
        for name in arguments.backends.split(","):
            error = check_backend(name, groups, device, arguments.quantization)
            if group.rank == 0:
                print(json.dumps({"backend": name, "ranks": group.size, "relative_error": round(error, 5)}), flush=True)
        return
    weight_bytes = 2 if arguments.quantization is None else 1
    for shape_name in arguments.shapes.split(","):
        shape = SHAPES[shape_name]
        if device.type == "cpu":
            narrow = (shape.hidden_size // 16, shape.intermediate_size // 16)
            shape = Shape(*narrow, shape.num_experts, shape.top_k)
        for name in arguments.backends.split(","):
            times = time_backend(name, shape, all_tokens, groups, device, arguments.quantization)
            for tokens, microseconds in zip(all_tokens, times, strict=True):
                line = {"shape": shape_name, "backend": name, "ranks": group.size, "tokens": tokens}
                line["quantization"] = arguments.quantization
                line["us"] = round(microseconds, 1)
                line |= {key: round(value, 1) for key, value in floors(shape, tokens, group.size, weight_bytes).items()}
                if group.rank == 0:
                    print(json.dumps(line), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
