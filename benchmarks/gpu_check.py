"""Checks one CUDA host: tests and times of kernels, agreement of engine runs, throughput.

    python benchmarks/gpu_check.py [--sections tests,kernels,engine,throughput] [--models Qwen3-0.6B]

tests: those that have a device to gain. kernels: times against the hardware's ceilings. engine: tiny models must give
the same tokens in every setting. throughput: of the engine on models of known shapes, with random weights.

Prints one JSON object. Exit status 1 when a test fails or engine runs that must agree do not.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from benchmarks._workload import LengthRange, WorkItem, make_workload
from benchmarks.model_shapes import SHAPES, write_shape
from layers.attention.base import Attention
from layers.attention.triton_backend import TritonAttention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels import triton_elementwise
from layers.kv_cache import KVCache, KVSpec
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    "tests/layers/test_triton_attention.py",
    "tests/layers/test_triton_kernels.py",
    "tests/layers/test_triton_moe.py",
    "tests/layers/test_triton_sampling.py",
    "tests/layers/test_moe_experts.py",
    "tests/layers/test_moe_fp8.py",
    "tests/layers/test_moe_peers.py",
    "tests/layers/test_penalties.py",
    "tests/layers/test_sampling.py",
    "tests/scheduler/test_cuda_graph.py",
]
# (query heads, key heads, key width, value width, value inside the key)
ATTENTION_SHAPES = {
    "Qwen3-0.6B": (16, 8, 128, 128, False),
    "Qwen3-30B-A3B": (32, 4, 128, 128, False),
    "DeepSeek-V3 latent": (128, 1, 576, 512, True),
}
PRESETS = ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-deepseek-v3"]
PAGE = 16


def run_tests() -> dict[str, Any]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    return {
        "seconds": round(time.monotonic() - started, 1),
        "exit_status": done.returncode,
        **counts,
        "failures": "" if done.returncode == 0 else done.stdout[-6000:] + done.stderr[-2000:],
    }


def milliseconds(call: Callable[[], object], repeats: int = 20, calls: int = 10) -> float:
    """Median time of one call; a CUDA graph of several is replayed, so that launching costs nothing."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2] / calls


def ceilings() -> dict[str, float]:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: torch.neg(source, out=target), 5, 2)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: a @ b, 5, 2)
    return {"copy_TBps": round(2 * source.nbytes / copy / 1e9, 2), "bf16_TFLOPs": round(2 * 8192**3 / product / 1e9)}


def attention_call(
    shape: tuple[int, int, int, int, bool], lengths: list[tuple[int, int]]
) -> tuple[Callable[[], torch.Tensor], KVCache]:
    """A bfloat16 call of the Triton backend on (cached prefix, new rows) requests with shuffled pages."""
    heads, kv_heads, head_dim, v_head_dim, value_in_key = shape
    longest = max(prefix + extend for prefix, extend in lengths)
    pages_each = -(-longest // PAGE)
    pages = torch.randperm(len(lengths) * pages_each) + 1
    table = (pages[:, None] * PAGE + torch.arange(PAGE)).view(len(lengths), -1).to("cuda", torch.int32)
    spec = KVSpec(1, kv_heads, head_dim, v_head_dim, value_in_key)
    cache = KVCache(spec, (1 + len(pages)) * PAGE, torch.bfloat16, "cuda")
    cache.k(0).normal_()
    if not value_in_key:
        cache.v(0).normal_()
    seq_lens = [prefix + extend for prefix, extend in lengths]
    extend_lens = [extend for _, extend in lengths]
    starts = [0]
    for extend in extend_lens:
        starts.append(starts[-1] + extend)
    total = starts[-1]
    positions = torch.tensor([p + i for p, n in lengths for i in range(n)], device="cuda")
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(extend_lens)).cuda()
    attention = TritonAttention()
    batch = ForwardBatch(
        mode=ForwardMode.DECODE if all(extend == 1 for extend in extend_lens) else ForwardMode.EXTEND,
        input_ids=torch.zeros(total, dtype=torch.int64, device="cuda"),
        positions=positions,
        slots=table[rows, positions].long(),
        request_table=table,
        request_rows=torch.arange(len(lengths), device="cuda"),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        extend_lens=torch.tensor(extend_lens, dtype=torch.int32, device="cuda"),
        query_start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        kv_cache=cache,
        attention=attention,
    )
    layer = Attention(0, heads, kv_heads, head_dim, head_dim**-0.5, v_head_dim)
    q = torch.randn(total, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(total, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    v = None if value_in_key else torch.randn(total, kv_heads, v_head_dim, device="cuda", dtype=torch.bfloat16)
    attention.plan(batch)
    return lambda: layer(q, k, v, batch), cache


def time_attention() -> list[dict[str, Any]]:
    results = []
    for name, shape in ATTENTION_SHAPES.items():
        heads, _, head_dim, v_head_dim, _ = shape
        for batch, context in [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (8, 16384)]:
            call, cache = attention_call(shape, [(context - 1, 1)] * batch)
            ms = milliseconds(call)
            read = batch * context * cache.spec.bytes_per_token(torch.bfloat16)
            case = {"batch": batch, "context": context, "us": round(1000 * ms, 1), "TBps": round(read / ms / 1e9, 2)}
            results.append({"model": name, "kind": "decode", **case})
        for batch, prefix, extend in [(1, 0, 8192), (8, 0, 2048), (8, 2048, 512), (64, 1000, 24)]:
            call, _ = attention_call(shape, [(prefix, extend)] * batch)
            ms = milliseconds(call, 5, 1)
            pairs = batch * (extend * prefix + extend * (extend + 1) // 2)
            flops = 2 * pairs * heads * (head_dim + v_head_dim)
            case = {"batch": batch, "prefix": prefix, "extend": extend, "us": round(1000 * ms, 1)}
            results.append({"model": name, "kind": "prefill", **case, "TFLOPs": round(flops / ms / 1e9, 1)})
    return results


def time_elementwise() -> list[dict[str, Any]]:
    """Bandwidth on sizes well past the L2 cache, and the time of a decode step's few rows."""
    results = []
    weight = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    for rows in (32, 65536):
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn_like(x)
        gate_up = torch.randn(rows, 6144, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(rows, 4, 128, device="cuda", dtype=torch.bfloat16)
        cos_sin = torch.randn(rows, 128, device="cuda")
        head_weight = torch.randn(128, device="cuda", dtype=torch.bfloat16)
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "rms_norm": (lambda x=x: triton_elementwise.rms_norm(x, weight, 1e-6), 2 * x.nbytes),
            "fused_add_rms_norm": (
                lambda x=x, r=residual: triton_elementwise.fused_add_rms_norm(x, r, weight, 1e-6),
                4 * x.nbytes,
            ),
            "rms_norm of heads": (
                lambda q=q, w=head_weight: triton_elementwise.rms_norm(q, w, 1e-6),
                2 * q.nbytes,
            ),
            "silu_and_mul": (lambda g=gate_up: triton_elementwise.silu_and_mul(g), gate_up.nbytes * 3 // 2),
            "apply_rotary": (
                lambda q=q, k=k, c=cos_sin: triton_elementwise.apply_rotary(q, k, c),
                2 * (q.nbytes + k.nbytes) + cos_sin.nbytes,
            ),
        }
        for name, (call, moved) in cases.items():
            ms = milliseconds(call)
            results.append(
                {"kernel": name, "rows": rows, "us": round(1000 * ms, 1), "TBps": round(moved / ms / 1e9, 2)}
            )
    return results


def check_engines() -> dict[str, Any]:
    """Greedy tokens of each preset in float32: the CPU against the GPU with graphs and overlap each on and off."""
    rng = random.Random(7)
    stem = [rng.randrange(256) for _ in range(37)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 5, 16, 33, 70, 300)]
    prompts += [stem, [*stem, 3, 1, 4], [*stem[:20], 9], stem]
    params = [SamplingParams(32, seed=0, temperature=0.0, ignore_eos=True)] * len(prompts)
    variants: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu", "attention_backend": "torch"},
        "eager": {"device": "cuda", "disable_cuda_graph": True, "disable_overlap_schedule": True},
        "graph": {"device": "cuda", "disable_overlap_schedule": True},
        "overlap": {"device": "cuda", "disable_cuda_graph": True, "disable_overlap_schedule": False},
        "graph+overlap": {"device": "cuda", "disable_overlap_schedule": False},
        "small chunks": {"device": "cuda", "chunked_prefill_size": 13},
        "retraction": {
            "device": "cuda",
            "max_total_tokens": 480,
            "context_length": 360,
            "schedule_conservativeness": 0.0,
        },
    }
    results: dict[str, Any] = {}
    for preset in PRESETS:
        expected: list[list[int]] = []
        results[preset] = {}
        for name, settings in variants.items():
            base: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192, "cuda_graph_max_bs": 16}
            try:
                engine = Engine(EngineConfig(model_path=preset, **{**base, **settings}))
                tokens = [generation.token_ids for generation in engine.generate(prompts, params)]
            except Exception as error:  # one preset's failure must not hide the others' results
                results[preset][name] = f"{type(error).__name__}: {error}"
                continue
            expected = expected or tokens
            differing = sum(a != b for a, b in zip(tokens, expected, strict=True))
            results[preset][name] = "equal" if differing == 0 else f"{differing} of {len(prompts)} differ"
    return results


def workloads() -> dict[str, list[WorkItem]]:
    """name -> requests of token ids up to 10000."""
    fixed = {
        f"{count} x {given} in, {wanted} out": (count, LengthRange(given, given), LengthRange(wanted, wanted))
        for count, given, wanted in [(1, 1024, 256), (8, 1024, 256), (32, 1024, 256), (128, 1024, 256), (64, 2048, 1)]
    }
    cases = {"256 x 100:1024 in, 100:1024 out": (256, LengthRange(100, 1024), LengthRange(100, 1024)), **fixed}
    return {name: make_workload(*case, 10000, seed=0) for name, case in cases.items()}


def measure_throughput(name: str, repeats: int) -> dict[str, Any]:
    """Output tokens a second over whole calls, median of `repeats` after a warm-up; input tokens for one-token outputs.

    bfloat16 dummy weights, temperature 0.6, end-of-sequence ignored, no prefix cache, contexts up to 4096.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            EngineConfig(
                model_path=str(write_shape(name, Path(folder) / name)),
                load_format="dummy",
                context_length=4096,
                disable_radix_cache=True,
                max_running_requests=256,
            )
        )
    results: dict[str, Any] = {
        "start_seconds": round(time.monotonic() - started, 1),
        "load_seconds": round(engine.load_seconds, 1),
    }
    for case, items in workloads().items():
        params = [
            SamplingParams(item.output_len, seed=i, temperature=0.6, ignore_eos=True) for i, item in enumerate(items)
        ]
        prompts = [item.prompt_ids for item in items]
        rates = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            outputs = engine.generate(prompts, params)
            seconds = time.perf_counter() - started
            assert [len(output.token_ids) for output in outputs] == [item.output_len for item in items]
            counted = len(prompts[0]) * len(items) if items[0].output_len == 1 else sum(i.output_len for i in items)
            rates.append(counted / seconds)
        results[case] = round(sorted(rates[1:])[repeats // 2])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sections", default="tests,kernels,engine", help="comma-separated; default %(default)s")
    parser.add_argument(
        "--models", default="Qwen3-0.6B", help=f"for throughput, of {', '.join(SHAPES)}; default %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a workload; default %(default)s")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA device here", file=sys.stderr)
        return 2
    sections = options.sections.split(",")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    failed = False
    if "tests" in sections:
        result["tests"] = run_tests()
        failed |= result["tests"]["exit_status"] != 0
    if "kernels" in sections:
        result["ceilings"] = ceilings()
        result["attention"] = time_attention()
        result["elementwise"] = time_elementwise()
    if "engine" in sections:
        result["engine"] = check_engines()
        failed |= any(verdict != "equal" for preset in result["engine"].values() for verdict in preset.values())
    if "throughput" in sections:
        result["throughput"] = {name: measure_throughput(name, options.repeats) for name in options.models.split(",")}
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
