"""The routed experts of one rank: gated MLPs whose weights lie in two tensors, run on rows sorted by expert.

Shape letters: R rows sorted by expert, H hidden size, I intermediate size of an expert on this rank, E experts of this
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from layers.activation import silu_and_mul
from layers.kernels.cpu import PackedWeight
from layers.moe.placement import ExpertPlacement
from layers.parallel import SINGLE, ParallelGroups
from layers.weights import StoredAs, WeightPart, block_sibling, empty_parameter

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
        self.w13_E2IH = empty_parameter(self.num_local, 2 * self.intermediate_size, hidden_size)
        self.w2_EHI = empty_parameter(self.num_local, hidden_size, self.intermediate_size)
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
            gate_up = F.linear(x_RH[own], self.w13_E2IH[expert])
            hidden = self._activation(gate_up, None if weights_R is None else weights_R[own])
            y_RH[own] = F.linear(hidden, self.w2_EHI[expert])
        return y_RH

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

        gate_up = grouped_matmul(x_RH, self.w13_E2IH, expert_ends_E, self.num_physical)
        return grouped_matmul(self._activation(gate_up, weights_R), self.w2_EHI, expert_ends_E, self.num_physical)

    def _grouped_mm_fits(self, x_RH: torch.Tensor) -> bool:
        """torch's grouped kernel is for bfloat16 and wants 16-byte strides; with few rows an expert ours is faster."""
        # Of the rows some belong to other ranks' experts, as many for each on average.
        many = x_RH.shape[0] > _GROUPED_MM_ROWS * self.num_physical
        aligned = self.intermediate_size % 8 == 0 and x_RH.shape[1] % 8 == 0
        return many and x_RH.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")

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
        self.w13_E2IH.data = self.w13_E2IH.data[:0].clone()
        self.w2_EHI.data = self.w2_EHI.data[:0].clone()

    def storage(self, local: int) -> Sequence[torch.Tensor]:
        """The tensors that hold everything of this rank's expert `local`, to be copied or overwritten as they are."""
        if self._packed:
            return [weight.data for weight in self._packed[local]]
        return [self.w13_E2IH.data[local], self.w2_EHI.data[local]]

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
        for parameter, name, merged, merged_rows, shape, source, at in (
            (self.w13_E2IH, gate, "gate_up_proj", 0, (full, hidden), (columns, all_hidden), slice(0, inner)),
            (self.w13_E2IH, up, "gate_up_proj", full, (full, hidden), (columns, all_hidden), slice(inner, 2 * inner)),
            (self.w2_EHI, down, "down_proj", 0, (hidden, full), (all_hidden, columns), slice(0, hidden)),
        ):
            merged_shape = (self.num_experts, 2 * full if merged == "gate_up_proj" else hidden, shape[1])
            for expert in range(self.num_experts):
                # Of an expert that only other ranks hold nothing is taken.
                for local in slots.get(expert, [None]):
                    target = parameter.data[0, :0] if local is None else parameter.data[local, at]
                    (start, stop), across = source if local is not None else ((source[0][0],) * 2, source[1])
                    together = StoredAs(
                        f"{path}.{merged}",
                        merged_shape,
                        ((expert, expert + 1), (merged_rows + start, merged_rows + stop), across),
                    )
                    name_in_checkpoint = f"{single_path}.{expert}.{name}.weight"
                    yield WeightPart(name_in_checkpoint, shape, ((start, stop), across), target, parameter, (together,))


def _spans(expert_ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have rows."""
    start = 0
    for expert, end in enumerate(expert_ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
            start = end
