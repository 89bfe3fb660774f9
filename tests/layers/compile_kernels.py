"""Compiles the expert kernels for compute capability 9.0 at the shapes given; run as a process of its own.

    python -m tests.layers.compile_kernels '<JSON list of cases>'

No device is needed: the program's own launching functions run on CPU tensors, with a driver that only says what the
target is, and each launch ends where its binary is made. Triton has to be imported without its interpreter, which the
tests use, hence the process. Prints one JSON line a launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from layers.kernels import triton_moe_fused
from layers.kernels.triton_grouped import grouped_matmul
from layers.quantization import FP8_DTYPE, BlockScales, scale_shape

TOP_K = 8


class Hopper:
    """In place of a device's driver: what compilation asks of one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def weights(*shape: int, block: tuple[int, int] | None, dtype: torch.dtype) -> tuple[torch.Tensor, BlockScales | None]:
    if block is None:
        return torch.empty(*shape, dtype=dtype), None
    return torch.empty(*shape, dtype=FP8_DTYPE), BlockScales(torch.empty(scale_shape(shape, block)), block)


def launch(kernel: str, rows: int, sizes: tuple[int, int, int], block: tuple[int, int] | None, dtype: str) -> None:
    """kernel: "grouped", or "fused", which takes no scales. sizes: experts, hidden, intermediate.

    block: rows and columns that share a scale; None without scales.
    """
    num_experts, hidden, inner = sizes
    row_dtype = getattr(torch, dtype)
    ends = torch.zeros(num_experts, dtype=torch.int32)
    w13, w13_scales = weights(num_experts, 2 * inner, hidden, block=block, dtype=row_dtype)
    w2, w2_scales = weights(num_experts, hidden, inner, block=block, dtype=row_dtype)
    if kernel == "grouped":
        grouped_matmul(torch.empty(rows, hidden, dtype=row_dtype), w13, ends, num_experts, w13_scales)
        grouped_matmul(torch.empty(rows, inner, dtype=row_dtype), w2, ends, num_experts, w2_scales)
        return
    tokens = rows // TOP_K
    x, factors = torch.empty(1, tokens, hidden, dtype=row_dtype), torch.empty(1, tokens, TOP_K)
    pairs = torch.empty(rows, dtype=torch.int32)
    gated = triton_moe_fused.gate_up(x, factors, pairs, w13, ends, tokens, None)
    bases = torch.empty(1, dtype=torch.int64)
    triton_moe_fused.down(gated, pairs, w2, ends, bases, 1024, tokens, TOP_K)


def spilled_bytes(cubin: bytes) -> int:
    """Local memory of a thread, where registers go that do not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(count) for count in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def main(cases: list[dict[str, Any]]) -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        line = {
            "name": kernel.metadata.name,
            "dtype": str(args[0].dtype),
            "shared": kernel.metadata.shared,
            "binary": len(kernel.asm["cubin"]),
        }
        line |= {key.lower(): value for key, value in kwargs.items() if key.startswith(("BLOCK", "SCALE"))}
        ptx = kernel.asm["ptx"]
        line["target"] = next(line for line in ptx.splitlines() if line.startswith(".target")).split()[1]
        line["products"] = ptx.count("mma.sync") + ptx.count("wgmma.mma_async")
        line["conversions"] = ptx.count("e4m3")
        line["spilled"] = spilled_bytes(kernel.asm["cubin"])
        print(json.dumps(line), flush=True)

    JITFunction.run = compile_only  # type: ignore[method-assign, assignment]
    for case in cases:
        launch(**case)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
