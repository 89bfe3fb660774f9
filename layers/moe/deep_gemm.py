"""Backend `megamoe` by the fused float8 kernel of the DeepGEMM library, on Hopper GPUs of one host.

Needs the package sgl-deep-gemm (0.1.5 with apache-tvm-ffi 0.1.11 is what worked with torch 2.11), which compiles its
kernels when they are first used. Weights become float8 with a scale for every 128 x 128 block, or stay so where the
experts are (`--quantization fp8`); activations get a scale for every 128 numbers.

Shape letters: T token rows, K experts of a token, H hidden size, I intermediate size, E experts of this rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from layers.moe.experts import Experts
from layers.moe.library import load_library
from layers.moe.router import Routing, at_least_one_row
from layers.parallel import ParallelGroup
from layers.quantization import BlockScales, quantize_block_fp8

_FLAG, _PACKAGE = "--mega-moe-kernel deep_gemm", "the package sgl-deep-gemm (pip install lockstep[deep-gemm])"
_NAMES = (
    "get_symm_buffer_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "mega_moe_pre_dispatch_sm90",
    "fp8_mega_moe",
)
_BLOCK = 128
_SIZE_MULTIPLE = 512


class DeepGemmExperts:
    """One layer's experts. Takes their weights over: `experts` holds none afterwards.

    capacity: most rows of a rank; all ranks make theirs at the same time, outside of CUDA graphs. ValueError for a GPU,
    dtype or size that the kernel does not take, or where the library is missing.

    w13, w2, buffer: in the library's form.
    """

    def __init__(self, experts: Experts, group: ParallelGroup, capacity: int, top_k: int) -> None:
        _check(experts, group)
        self._library = load_library("deep_gemm", _FLAG, _PACKAGE, _NAMES)
        self._limit = experts.swiglu_limit
        self.buffer = _open_buffer(
            group, experts.num_physical, capacity, top_k, experts.hidden_size, experts.intermediate_size
        )
        w13 = _block_fp8(experts.w13_E2IH.data, experts.w13_scales)
        w2 = _block_fp8(experts.w2_EHI.data, experts.w2_scales)
        experts.drop_weights()
        self.w13, self.w2 = self._library.transform_weights_for_mega_moe_sm90(w13, w2)

    def run(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[T, H] bfloat16: combined rows. Ids int32, weights float32. Each call marks the rows beyond T as empty."""
        num_tokens = x_TH.shape[0]
        x_TH, (ids_TK, weights_TK) = at_least_one_row(x_TH, routing)
        buffer = self.buffer
        self._library.mega_moe_pre_dispatch_sm90(
            x_TH.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            x_TH.shape[0],
        )
        out_TH = torch.empty_like(x_TH)
        self._library.fp8_mega_moe(out_TH, self.w13, self.w2, buffer, activation_clamp=self._limit)
        return out_TH[:num_tokens]


def _block_fp8(weight_ENK: torch.Tensor, scales: BlockScales | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 [E, N, K] and scales [E, N / 128, K / 128] of a weight that may be so already."""
    if scales is not None:
        return weight_ENK, scales.values.data
    # One expert after another: a float32 copy of all would be twice the weights.
    parts = [quantize_block_fp8(weight_NK, (_BLOCK, _BLOCK)) for weight_NK in weight_ENK]
    return torch.stack([codes for codes, _ in parts]), torch.stack([scale for _, scale in parts])


def _check(experts: Experts, group: ParallelGroup) -> None:
    weight = experts.w2_EHI
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] != 9:
        raise ValueError(f"{_FLAG} needs a Hopper GPU: use --mega-moe-kernel triton")
    if not group.one_host or group.process_group is None:
        raise ValueError(f"{_FLAG} needs experts spread over several ranks of one host: use --mega-moe-kernel triton")
    if experts.dtype != torch.bfloat16:
        raise ValueError(f"{_FLAG} takes bfloat16 rows, and --dtype is {experts.dtype}")
    for what, size in (("hidden_size", experts.hidden_size), ("moe_intermediate_size", experts.intermediate_size)):
        if size % _SIZE_MULTIPLE:
            raise ValueError(
                f"{_FLAG} needs sizes that are multiples of {_SIZE_MULTIPLE}, and {what} is {size}: use "
                "--mega-moe-kernel triton"
            )
    for scales in (experts.w13_scales, experts.w2_scales):
        if scales is not None and scales.block != (_BLOCK, _BLOCK):
            raise ValueError(
                f"{_FLAG} needs a scale for each {_BLOCK} x {_BLOCK} block, and the experts kept by --quantization fp8 "
                f"have one for {scales.block[0]} x {scales.block[1]}: leave --quantization out"
            )


@lru_cache
def _open_buffer(
    group: ParallelGroup, num_experts: int, capacity: int, top_k: int, hidden_size: int, intermediate_size: int
) -> Any:
    """The symmetric buffer, one for all layers of a size; its room is rounded up by the library."""
    import deep_gemm

    return deep_gemm.get_symm_buffer_for_mega_moe(
        group.process_group, num_experts, capacity, top_k, hidden_size, intermediate_size
    )
