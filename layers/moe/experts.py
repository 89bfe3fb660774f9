"""The routed experts of one rank: gated MLPs whose weights lie in two tensors, run on rows sorted by expert.

Shape letters: R rows sorted by expert, H hidden size, I intermediate size of an expert, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from layers.activation import silu_and_mul
from layers.kernels.cpu import PackedWeight
from layers.parallel import ParallelGroup
from layers.weights import StoredAs, WeightPart, block_sibling, empty_parameter

# Rows an expert from which torch's grouped product beats ours: between 32 and 128 on an H200.
_GROUPED_MM_ROWS = 64


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) with each row's own expert. Every rank of the group holds a run of whole experts.

    w13_E2IH: [gate | up] of every expert; w2_EHI: down.
    names, block: the checkpoint's names of gate, up and down, and of the MoE layer. Experts are stored one by one as
        `<block>.experts.<number>.<name>.weight`, or all together as `<path of this module>.gate_up_proj` [E, 2I, H] and
        `.down_proj` [E, H, I].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        group: ParallelGroup,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        block: str = "mlp",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_local = group.shard(num_experts, "the number of experts")
        self.first = group.rank * self.num_local
        self.intermediate_size = intermediate_size
        self.names = names
        self.block = block
        self.w13_E2IH = empty_parameter(self.num_local, 2 * intermediate_size, hidden_size)
        self.w2_EHI = empty_parameter(self.num_local, hidden_size, intermediate_size)
        self._packed: list[tuple[PackedWeight, PackedWeight]] = []

    def forward(self, x_RH: torch.Tensor, expert_ends_E: torch.Tensor) -> torch.Tensor:
        """[R, H] in x's dtype. expert_ends_E [E] int32: expert e has rows expert_ends[e - 1] to expert_ends[e].

        Rows from the last end on belong to no expert of this rank; what is returned for them is 0.
        """
        if x_RH.shape[0] == 0:
            return x_RH
        if self._packed:
            return packed_experts(x_RH, expert_ends_E, self._packed)
        arguments = (x_RH, expert_ends_E, self.w13_E2IH, self.w2_EHI)
        if not x_RH.is_cuda:
            return looped_experts(*arguments)
        if self._grouped_mm_fits(x_RH):
            return grouped_experts(*arguments, all_rows_local=self.num_local == self.num_experts)
        return triton_experts(*arguments)

    def _grouped_mm_fits(self, x_RH: torch.Tensor) -> bool:
        """torch's grouped kernel is for bfloat16 and wants 16-byte strides; with few rows an expert ours is faster."""
        many = x_RH.shape[0] > _GROUPED_MM_ROWS * self.num_local
        aligned = self.intermediate_size % 8 == 0 and x_RH.shape[1] % 8 == 0
        return many and x_RH.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")

    def pack_weight(self) -> None:
        """See layers.linear.pack_weights; both weights are empty afterwards."""
        if PackedWeight.accepts(self.w13_E2IH[0]) and PackedWeight.accepts(self.w2_EHI[0]):
            self._packed = [
                (PackedWeight(w13_2IH), PackedWeight(w2_HI))
                for w13_2IH, w2_HI in zip(self.w13_E2IH, self.w2_EHI, strict=True)
            ]
            self.w13_E2IH.data = self.w13_E2IH.data[:0].clone()
            self.w2_EHI.data = self.w2_EHI.data[:0].clone()

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        gate, up, down = self.names
        size = self.intermediate_size
        single_path = block_sibling(path, self.block)
        hidden = self.w2_EHI.shape[1]
        for parameter, name, merged, start, rows in (
            (self.w13_E2IH, gate, "gate_up_proj", 0, size),
            (self.w13_E2IH, up, "gate_up_proj", size, size),
            (self.w2_EHI, down, "down_proj", 0, hidden),
        ):
            columns = parameter.shape[2]
            for expert in range(self.num_experts):
                local = expert - self.first
                # Of the other ranks' experts nothing is taken.
                taken = rows if 0 <= local < self.num_local else 0
                together = StoredAs(
                    f"{path}.{merged}",
                    (self.num_experts, *parameter.shape[1:]),
                    ((expert, expert + 1), (start, start + taken), (0, columns)),
                )
                yield WeightPart(
                    f"{single_path}.{expert}.{name}.weight",
                    (rows, columns),
                    ((0, taken), (0, columns)),
                    parameter.data[local if taken else 0, start : start + taken],
                    parameter,
                    (together,),
                )


def looped_experts(
    x_RH: torch.Tensor, expert_ends_E: torch.Tensor, w13_E2IH: torch.Tensor, w2_EHI: torch.Tensor
) -> torch.Tensor:
    """One pass over the experts that have rows; see `Experts.forward`. Waits for the device to learn the ends."""
    y_RH = torch.zeros_like(x_RH)
    for expert, start, end in _spans(expert_ends_E):
        hidden = silu_and_mul(F.linear(x_RH[start:end], w13_E2IH[expert]))
        y_RH[start:end] = F.linear(hidden, w2_EHI[expert])
    return y_RH


def packed_experts(
    x_RH: torch.Tensor, expert_ends_E: torch.Tensor, packed: Sequence[tuple[PackedWeight, PackedWeight]]
) -> torch.Tensor:
    """The same with the CPU's matrix kernel; a row's result does not depend on the other rows."""
    y_RH = torch.zeros_like(x_RH)
    for expert, start, end in _spans(expert_ends_E):
        w13, w2 = packed[expert]
        y_RH[start:end] = w2.linear(silu_and_mul(w13.linear(x_RH[start:end])))
    return y_RH


def _spans(expert_ends_E: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, row after its last) of the experts that have rows."""
    start = 0
    for expert, end in enumerate(expert_ends_E.tolist()):
        if end > start:
            yield expert, start, end
            start = end


def grouped_experts(
    x_RH: torch.Tensor,
    expert_ends_E: torch.Tensor,
    w13_E2IH: torch.Tensor,
    w2_EHI: torch.Tensor,
    all_rows_local: bool = False,
) -> torch.Tensor:
    """Two grouped matrix products; see `Experts.forward`. Shapes depend on R alone, so a CUDA graph can hold it.

    all_rows_local: every row has an expert here, so there are no others to set to 0.
    """
    hidden = silu_and_mul(torch._grouped_mm(x_RH, w13_E2IH.transpose(1, 2), offs=expert_ends_E))
    y_RH = torch._grouped_mm(hidden, w2_EHI.transpose(1, 2), offs=expert_ends_E)
    if all_rows_local:
        return y_RH
    # The kernel leaves rows past the last end unwritten, and they may hold NaN.
    foreign_R = torch.arange(x_RH.shape[0], device=x_RH.device) >= expert_ends_E[-1]
    return y_RH.masked_fill(foreign_R[:, None], 0)


def triton_experts(
    x_RH: torch.Tensor, expert_ends_E: torch.Tensor, w13_E2IH: torch.Tensor, w2_EHI: torch.Tensor
) -> torch.Tensor:
    """The same for every dtype and width and fast for few rows, by our own kernel; a CUDA graph can hold it too."""
    from layers.kernels.triton_grouped import grouped_matmul

    hidden = silu_and_mul(grouped_matmul(x_RH, w13_E2IH, expert_ends_E))
    return grouped_matmul(hidden, w2_EHI, expert_ends_E)
