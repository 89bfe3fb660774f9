"""Linear layers split over the ranks of a group.

Shape letters: T token rows, I input features, O output features of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from layers.activation import silu_and_mul
from layers.kernels.cpu import PackedWeight
from layers.parallel import ParallelGroup
from layers.weights import WeightPart, empty_parameter, sibling, slice_of, whole


class Linear(nn.Module):
    """x @ weight.T + bias; weight [O, I]. Every rank holds all of it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self._packed: PackedWeight | None = None

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._product(x_TI, self.bias)

    def _product(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.linear(x_TI, bias)
        return F.linear(x_TI, self.weight, bias)

    def pack_weight(self) -> None:
        """See `pack_weights`; `weight` is empty afterwards, so that it is held once."""
        if PackedWeight.accepts(self.weight):
            self._packed = PackedWeight(self.weight)
            self.weight.data = self.weight.data.new_empty(0, self.weight.shape[1])

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        yield whole(self.weight, f"{path}.weight")
        if self.bias is not None:
            yield whole(self.bias, f"{path}.bias")


class MergedColumnLinear(Linear):
    """Several linear layers of one input in one product, each split by output rows over the group.

    names: the checkpoint's names of the layers, beside this one; outputs: their full output sizes, in order.
    A rank's output is [layer 0's share | layer 1's share | ...].
    """

    def __init__(
        self, in_features: int, outputs: Sequence[int], names: Sequence[str], group: ParallelGroup, bias: bool = False
    ) -> None:
        self.names = tuple(names)
        self.outputs = tuple(outputs)
        self.group = group
        self.shares = tuple(group.shard(total, f"{name} size") for name, total in zip(names, outputs, strict=True))
        super().__init__(in_features, sum(self.shares), bias)

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        at = 0
        for name, total, share in zip(self.names, self.outputs, self.shares, strict=True):
            start = self.group.rank * share
            yield from _column_parts(self, sibling(path, name), total, start, at, share)
            at += share


class GateUpLinear(MergedColumnLinear):
    """The gate and up projections of a gated MLP in one product; a rank holds the same columns of both."""

    def __init__(
        self, in_features: int, intermediate_size: int, names: tuple[str, str], group: ParallelGroup, bias: bool = False
    ) -> None:
        super().__init__(in_features, (intermediate_size, intermediate_size), names, group, bias)

    def silu_and_mul(self, x_TI: torch.Tensor) -> torch.Tensor:
        """silu(gate(x)) * up(x), without the way through memory where a kernel can do without it."""
        if self._packed is not None:
            return self._packed.linear_silu_and_mul(x_TI, self.bias)
        return silu_and_mul(self.forward(x_TI))


class ColumnLinear(MergedColumnLinear):
    """One linear layer split by output rows over the group; `name` is its own last path component."""

    def __init__(
        self, in_features: int, out_features: int, name: str, group: ParallelGroup, bias: bool = False
    ) -> None:
        super().__init__(in_features, (out_features,), (name,), group, bias)


class QKVLinear(Linear):
    """Query, key and value projections in one product, split by heads over the group.

    With fewer key/value heads than ranks, each rank holds one and neighbouring ranks hold the same one.
    A rank's output is [num_heads * head_dim | num_kv_heads * head_dim | num_kv_heads * head_dim], its own counts.
    ValueError when the heads do not divide.
    """

    names = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: ParallelGroup,
        bias: bool = False,
    ) -> None:
        self.num_heads = group.shard(num_heads, "num_attention_heads")
        self.num_kv_heads, kv_start = kv_head_share(num_kv_heads, group)
        self._totals = tuple(count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads))
        self._starts = tuple(start * head_dim for start in (group.rank * self.num_heads, kv_start, kv_start))
        self.head_dim = head_dim
        self.heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.shares = tuple(count * head_dim for count in self.heads)
        super().__init__(hidden_size, sum(self.shares), bias)

    def split_heads(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] of x, views of one product."""
        return self.forward(x_TH).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        at = 0
        for name, total, start, share in zip(self.names, self._totals, self._starts, self.shares, strict=True):
            yield from _column_parts(self, sibling(path, name), total, start, at, share)
            at += share


class RowLinear(Linear):
    """A linear layer split by input columns: takes the rank's share of the input, returns the sum over the ranks."""

    def __init__(self, in_features: int, out_features: int, group: ParallelGroup, bias: bool = False) -> None:
        self.in_features = in_features
        self.group = group
        super().__init__(group.shard(in_features, "the input of a row-split layer"), out_features, bias)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self._product(x_TI, self.bias)
        out_TO = self.group.all_reduce(self._product(x_TI, None))
        return out_TO if self.bias is None else out_TO + self.bias

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        share = self.weight.shape[1]
        start = self.group.rank * share
        yield slice_of(self.weight, f"{path}.weight", dim=1, total=self.in_features, start=start)
        if self.bias is not None:
            yield whole(self.bias, f"{path}.bias")


@runtime_checkable
class HasPackedWeight(Protocol):
    """A layer whose weight has a layout of its own for the CPU's matrix kernel."""

    def pack_weight(self) -> None: ...


def pack_weights(model: nn.Module) -> None:
    """Lay out the weights of a loaded model for the CPU's matrix kernel; nothing elsewhere or without a kernel."""
    for module in model.modules():
        if isinstance(module, HasPackedWeight):
            module.pack_weight()


def kv_head_share(num_kv_heads: int, group: ParallelGroup) -> tuple[int, int]:
    """(count, first) of the key/value heads of this rank; ValueError when they neither divide nor replicate evenly."""
    if num_kv_heads >= group.size:
        count = group.shard(num_kv_heads, "num_key_value_heads")
        return count, group.rank * count
    if group.size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads}, which cannot be repeated evenly over {group.size} ranks"
        )
    return 1, group.rank * num_kv_heads // group.size


def _column_parts(layer: Linear, path: str, total: int, start: int, at: int, length: int) -> Iterator[WeightPart]:
    place = {"dim": 0, "total": total, "start": start, "at": at, "length": length}
    yield slice_of(layer.weight, f"{path}.weight", **place)
    if layer.bias is not None:
        yield slice_of(layer.bias, f"{path}.bias", **place)
