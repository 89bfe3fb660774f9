"""How parameters are made of checkpoint tensors. Modules declare it; the loader carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True)
class StoredAs:
    """Another place where a checkpoint may keep the same numbers: `source` of the tensor `name` of `shape`.

    The source has as many numbers as the part's own, in the same order (leading sizes of 1 may be added).
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KeptScales:
    """Where the scales of a part that stays block-fp8 go.

    target: the view of the parameter's data that takes them [rows / block rows, columns / block columns], float32.
    parameter: the parameter that `target` is a view of.
    block: rows and columns of the part that share a scale; they divide those of the checkpoint's blocks.
    """

    target: torch.Tensor
    parameter: nn.Parameter
    block: tuple[int, int]


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor's contribution to one parameter of this rank.

    name: the tensor's name in the checkpoint.
    shape: its full, unsharded shape.
    source: (start, stop) per dimension: what this rank takes of it.
    target: the view of the parameter's data that takes it; same shape as the source.
    parameter: the parameter that `target` is a view of.
    alternatives: where else to look when the checkpoint has no tensor `name`, in this order.
    scales: of a part whose parameter has float8 numbers as the checkpoint has them; None for all others.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    target: torch.Tensor
    parameter: nn.Parameter
    alternatives: tuple[StoredAs, ...] = ()
    scales: KeptScales | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing of the tensor is this rank's; it is only known to belong to the model."""
        return self.target.numel() == 0


@runtime_checkable
class HasWeightParts(Protocol):
    """A module whose own parameters are not simply checkpoint tensors of the same name and shape."""

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        """Parts of every parameter this module itself owns; `path` is the module's dotted path in the model."""


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialised weight on the current default device, in the current default dtype unless `dtype` is given."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def whole(parameter: nn.Parameter, name: str) -> WeightPart:
    """The checkpoint tensor `name` is the parameter."""
    shape = tuple(parameter.shape)
    return WeightPart(name, shape, tuple((0, size) for size in shape), parameter.data, parameter)


def slice_of(
    parameter: nn.Parameter, name: str, *, dim: int, total: int, start: int, at: int = 0, length: int | None = None
) -> WeightPart:
    """`length` rows of `name` from `start` along `dim`, of `total`, go to rows `at` of the parameter.

    Without `length` they fill the rest of the parameter along `dim`. Other dimensions are taken whole.
    """
    length = parameter.shape[dim] - at if length is None else length
    shape = list(parameter.shape)
    shape[dim] = total
    source = [(0, size) for size in shape]
    source[dim] = (start, start + length)
    return WeightPart(name, tuple(shape), tuple(source), parameter.data.narrow(dim, at, length), parameter)


def sibling(path: str, name: str) -> str:
    """Path of the module `name` beside the module at `path`."""
    parent, _, _ = path.rpartition(".")
    return f"{parent}.{name}" if parent else name


def block_sibling(path: str, block: str) -> str:
    """The path `<...>.<parent>.<own>` with the parent called `block`."""
    parent, _, own = path.rpartition(".")
    return f"{sibling(parent, block)}.{own}"
