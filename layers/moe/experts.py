"""The routed experts of one rank: gated MLPs whose weights lie in two tensors, run on rows sorted by expert.

Shape letters: R rows sorted by expert, H hidden size, I intermediate size of an expert on this rank, E experts of this
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from layers.activation import silu_and_mul
from layers.kernels.cpu import PackedWeight
from layers.moe.placement import ExpertPlacement
from layers.parallel import SINGLE, ParallelGroups
from layers.quantization import FP8_DTYPE, BlockScales, dequantize_block_fp8, scale_shape
from layers.weights import KeptScales, StoredAs, WeightPart, block_sibling, empty_parameter

# Rows an expert from which torch's grouped product beats ours: between 32 and 128 on an H200.
_GROUPED_MM_ROWS = 64


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) with each row's own expert.

    Every rank of groups.experts holds a run of whole experts, and every rank of groups.expert_columns a share of the
    columns of the same ones. With redundant experts or rebalancing these are physical experts, copies of the model's
    own (`placement`).

    w13_E2IH: [gate | up] of every expert; w2_EHI: down.
    names, block: the checkpoint's names of gate, up and down, and of the MoE layer. Experts are stored one by one as
        `<block>.experts.<number>.<name>.weight`, or all together as `<path of this module>.gate_up_proj` [E, 2I, H] and
        `.down_proj` [E, H, I].
    swiglu_limit: gate is limited to it from above, up from both sides, both before silu.
    fp8_block: rows and columns that share a scale in a block-fp8 checkpoint; None for others. With groups.moe's
        quantization "fp8" its experts stay float8 here, with float32 scales for blocks of the sizes w13_block and
        w2_block: w13_scale_EAB [E, 2I / rows, ceil(H / columns)], w2_scale_EAB [E, ceil(H / rows), I / columns]. Rows
        meet the same weights as if these had been dequantised at load.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        groups: ParallelGroups = SINGLE,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        block: str = "mlp",
        swiglu_limit: float | None = None,
        fp8_block: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        redundant = groups.moe.num_redundant_experts
        group = groups.experts
        self.num_experts = num_experts
        self.num_physical = num_experts + redundant
        what = "the number of experts" + (f" with --ep-num-redundant-experts {redundant}" if redundant else "")
        self.num_local = group.shard(self.num_physical, what)
        self.first = group.rank * self.num_local
        self.full_intermediate_size = intermediate_size
        self.intermediate_size = groups.expert_columns.shard(intermediate_size, "moe_intermediate_size")
        self.first_column = groups.expert_columns.rank * self.intermediate_size
        self.hidden_size = hidden_size
        self.names = names
        self.block = block
        self.swiglu_limit = swiglu_limit
        self.placement: ExpertPlacement | None = None
        if redundant or groups.moe.enable_eplb:
            self.placement = ExpertPlacement(
                num_experts,
                self.num_physical,
                group.rank,
                group.size,
                "static" if groups.moe.replica_choice == "static" else "dynamic",
                groups.moe.enable_eplb,
            )
        self.w13_block: tuple[int, int] | None = None
        self.w2_block: tuple[int, int] | None = None
        if groups.moe.quantization == "fp8" and fp8_block is not None:
            # Where the intermediate size of a rank is no multiple of the block's, some of its blocks are parts of one.
            self.w13_block = (math.gcd(fp8_block[0], self.intermediate_size), fp8_block[1])
            self.w2_block = (fp8_block[0], math.gcd(fp8_block[1], self.intermediate_size))
        self.w13_E2IH, self.w13_scale_EAB = _empty_weight(
            self.w13_block, self.num_local, 2 * self.intermediate_size, hidden_size
        )
        self.w2_EHI, self.w2_scale_EAB = _empty_weight(
            self.w2_block, self.num_local, hidden_size, self.intermediate_size
        )
        self._dtype = torch.get_default_dtype()
        self._packed: list[tuple[PackedWeight, PackedWeight]] = []

    def forward(
        self,
        x_RH: torch.Tensor,
        expert_ends_E: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        zero_rest: bool = True,
    ) -> torch.Tensor:
        """[R, H] in x's dtype. expert_ends_E [E] int32: expert e has rows expert_ends[e - 1] to expert_ends[e].

        Rows from the last end on belong to no expert of this rank; what is returned for them is 0, or anything where
        the caller does not read it and says so with zero_rest.
        weights_R: float32 factors of the rows between the two projections.
        """
        if x_RH.shape[0] == 0:
            return x_RH
        if self._packed:
            return self.run_packed(x_RH, expert_ends_E, weights_R)
        if not x_RH.is_cuda:
            return self.run_looped(x_RH, expert_ends_E, weights_R)
        if self._grouped_mm_fits(x_RH):
            return self.run_grouped(x_RH, expert_ends_E, weights_R, zero_rest)
        return self.run_triton(x_RH, expert_ends_E, weights_R)

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are float8 with scales."""
        return self.w13_block is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of rows and outputs, and of weights that are not float8."""
        return self._dtype if self.is_fp8 else self.w2_EHI.dtype

    @property
    def w13_scales(self) -> BlockScales | None:
        return None if self.w13_block is None else BlockScales(self.w13_scale_EAB, self.w13_block)

    @property
    def w2_scales(self) -> BlockScales | None:
        return None if self.w2_block is None else BlockScales(self.w2_scale_EAB, self.w2_block)

    def _activation(self, gate_up_R2I: torch.Tensor, weights_R: torch.Tensor | None) -> torch.Tensor:
        """[R, I] in the dtype of its argument; a factor is applied in float32, before the rounding."""
        if self.swiglu_limit is None and weights_R is None:
            return silu_and_mul(gate_up_R2I)
        if gate_up_R2I.is_cuda:
            from layers.kernels import triton_moe_fused

            return triton_moe_fused.weighted_gate(gate_up_R2I, weights_R, self.swiglu_limit)
        gate_RI, up_RI = gate_up_R2I.float().chunk(2, dim=-1)
        if self.swiglu_limit is not None:
            gate_RI = gate_RI.clamp(max=self.swiglu_limit)
            up_RI = up_RI.clamp(-self.swiglu_limit, self.swiglu_limit)
        hidden_RI = F.silu(gate_RI) * up_RI
        if weights_R is not None:
            hidden_RI = hidden_RI * weights_R[:, None]
        return hidden_RI.to(gate_up_R2I.dtype)

    def run_looped(
        self, x_RH: torch.Tensor, expert_ends_E: torch.Tensor, weights_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One pass over the experts that have rows. Waits for the device to learn the ends."""
        y_RH = torch.zeros_like(x_RH)
        for expert, own in _spans(expert_ends_E):
            w13, w2 = self._linears(expert)
            y_RH[own] = w2(self._activation(w13(x_RH[own]), None if weights_R is None else weights_R[own]))
        return y_RH

    def _linears(self, expert: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """The products with both of an expert's matrices; float8 ones are dequantised each time."""
        for weight_ENK, scales in ((self.w13_E2IH, self.w13_scales), (self.w2_EHI, self.w2_scales)):
            weight_NK = weight_ENK[expert]
            if scales is not None:
                weight_NK = dequantize_block_fp8(weight_NK, scales.values[expert], scales.block, self.dtype)
                if PackedWeight.accepts(weight_NK):
                    yield PackedWeight(weight_NK).linear
                    continue
            yield partial(F.linear, weight=weight_NK)

    def run_packed(
        self, x_RH: torch.Tensor, expert_ends_E: torch.Tensor, weights_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same with the CPU's matrix kernel; a row's result does not depend on the other rows."""
        y_RH = torch.zeros_like(x_RH)
        for expert, own in _spans(expert_ends_E):
            w13, w2 = self._packed[expert]
            y_RH[own] = w2.linear(
                self._activation(w13.linear(x_RH[own]), None if weights_R is None else weights_R[own])
            )
        return y_RH

    def run_grouped(
        self,
        x_RH: torch.Tensor,
        expert_ends_E: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        zero_rest: bool = True,
    ) -> torch.Tensor:
        """Two grouped matrix products. Shapes depend on R alone, so a CUDA graph can hold it."""
        hidden = self._activation(torch._grouped_mm(x_RH, self.w13_E2IH.transpose(1, 2), offs=expert_ends_E), weights_R)
        y_RH = torch._grouped_mm(hidden, self.w2_EHI.transpose(1, 2), offs=expert_ends_E)
        if not zero_rest:
            return y_RH
        # The kernel leaves rows past the last end unwritten, and they may hold NaN.
        foreign_R = torch.arange(x_RH.shape[0], device=x_RH.device) >= expert_ends_E[-1]
        return y_RH.masked_fill(foreign_R[:, None], 0)

    def run_triton(
        self, x_RH: torch.Tensor, expert_ends_E: torch.Tensor, weights_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same for every dtype and width and fast for few rows, by our own kernel; a CUDA graph can hold it too."""
        from layers.kernels.triton_grouped import grouped_matmul

        gate_up = grouped_matmul(x_RH, self.w13_E2IH, expert_ends_E, self.num_physical, self.w13_scales)
        hidden = self._activation(gate_up, weights_R)
        return grouped_matmul(hidden, self.w2_EHI, expert_ends_E, self.num_physical, self.w2_scales)

    def _grouped_mm_fits(self, x_RH: torch.Tensor) -> bool:
        """torch's grouped kernel is for bfloat16, weights too, and wants 16-byte strides; with few rows an expert ours
        is faster."""
        # Of the rows some belong to other ranks' experts, as many for each on average.
        many = x_RH.shape[0] > _GROUPED_MM_ROWS * self.num_physical
        aligned = self.intermediate_size % 8 == 0 and x_RH.shape[1] % 8 == 0
        fits = x_RH.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")
        return many and fits and not self.is_fp8

    def pack_weight(self) -> None:
        """See layers.linear.pack_weights; both weights are empty afterwards."""
        if PackedWeight.accepts(self.w13_E2IH[0]) and PackedWeight.accepts(self.w2_EHI[0]):
            self._packed = [
                (PackedWeight(w13_2IH), PackedWeight(w2_HI))
                for w13_2IH, w2_HI in zip(self.w13_E2IH, self.w2_EHI, strict=True)
            ]
            self.drop_weights()

    def drop_weights(self) -> None:
        """For those who hold them in a form of their own now."""
        for parameter in self.parameters():
            parameter.data = parameter.data[:0].clone()

    def storage(self, local: int) -> Sequence[torch.Tensor]:
        """The tensors that hold everything of this rank's expert `local`, to be copied or overwritten as they are."""
        if self._packed:
            return [weight.data for weight in self._packed[local]]
        return [parameter.data[local] for parameter in self.parameters()]

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        gate, up, down = self.names
        inner, first = self.intermediate_size, self.first_column
        full, hidden = self.full_intermediate_size, self.hidden_size
        single_path = block_sibling(path, self.block)
        slots: dict[int, list[int]] = {}
        for local in range(self.num_local):
            physical = self.first + local
            logical = physical if self.placement is None else self.placement.physical_to_logical[physical]
            slots.setdefault(logical, []).append(local)
        columns, all_hidden = (first, first + inner), (0, hidden)
        w13 = (self.w13_E2IH, self.w13_scale_EAB, self.w13_block, "gate_up_proj")
        w2 = (self.w2_EHI, self.w2_scale_EAB, self.w2_block, "down_proj")
        for (parameter, scale, block, merged), name, merged_rows, shape, source, at in (
            (w13, gate, 0, (full, hidden), (columns, all_hidden), slice(0, inner)),
            (w13, up, full, (full, hidden), (columns, all_hidden), slice(inner, 2 * inner)),
            (w2, down, 0, (hidden, full), (all_hidden, columns), slice(0, hidden)),
        ):
            merged_shape = (self.num_experts, 2 * full if merged == "gate_up_proj" else hidden, shape[1])
            for expert in range(self.num_experts):
                # Of an expert that only other ranks hold nothing is taken.
                for local in slots.get(expert, [None]):
                    target = parameter.data[0, :0] if local is None else parameter.data[local, at]
                    kept = None
                    if local is not None and scale is not None and block is not None:
                        scale_at = slice(at.start // block[0], -(-at.stop // block[0]))
                        kept = KeptScales(scale.data[local, scale_at], scale, block)
                    (start, stop), across = source if local is not None else ((source[0][0],) * 2, source[1])
                    together = StoredAs(
                        f"{path}.{merged}",
                        merged_shape,
                        ((expert, expert + 1), (merged_rows + start, merged_rows + stop), across),
                    )
                    name_in_checkpoint = f"{single_path}.{expert}.{name}.weight"
                    span = ((start, stop), across)
                    yield WeightPart(name_in_checkpoint, shape, span, target, parameter, (together,), kept)


def _empty_weight(block: tuple[int, int] | None, *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A weight and its scales: float8 and float32 for blocks of this size; without one of the default dtype alone."""
    if block is None:
        return empty_parameter(*shape), None
    scales = empty_parameter(*scale_shape(shape, block), dtype=torch.float32)
    return empty_parameter(*shape, dtype=FP8_DTYPE), scales


def _spans(expert_ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have rows."""
    start = 0
    for expert, end in enumerate(expert_ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
            start = end
