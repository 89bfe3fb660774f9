"""Passes recorded as the list of their kernel calls, to be run again without the Python that led to them.

Of a decode pass of a small model a fifth and more is Python: modules, views, allocations. None of it depends on what
the tensors hold, so a pass of the same shape is the same calls with the same addresses.

Between the native kernels a pass may have a few operations of torch, such as the look-up of embeddings; they are
repeated through torch. What cannot be repeated, because Python or a shape depends on numbers in tensors, is noticed
while it is recorded (in inference mode). By then the pass has been computed, and its result is right in any case.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# More of them are the sign of a model whose time does not go into native kernels; it would gain nothing.
_MOST_TORCH_CALLS = 4
_SMALLEST_BLOCK, _ALIGNMENT = 4096, 64  # bytes
_FACTORIES = ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like")
_VARYING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
# What torch does when a tensor is made of Python's numbers, and when it is turned into a list or an array of NumPy's.
_CROSSINGS = ("aten::lift_fresh", "aten::resolve_neg")


class Workspace:
    """Memory of the results inside recorded passes. Tapes share it, so only one of them runs at a time."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}
        self._free: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._blocks.values()))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, whose memory is given out again once the tensor and all views of it are gone."""
        if not (size := dtype.itemsize * math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        block = self._take(size)
        part = block[:size]
        # torch holds on to this array until the last view of the tensor is gone.
        weakref.finalize(part, self._free.append, block)
        return torch.frombuffer(part, dtype=dtype).view(shape)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in the same place, without a claim on the memory if it is of the workspace."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return tensor
        whole = torch.frombuffer(block, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _take(self, size: int) -> np.ndarray:
        fitting = [i for i, block in enumerate(self._free) if len(block) >= size]
        if fitting:
            # Of the smallest ones that last used: it may still be in the cache.
            return self._free.pop(min(reversed(fitting), key=lambda i: len(self._free[i])))
        # Powers of two, so that passes of other shapes can use them too. Not by torch, whose calls are being recorded.
        rounded = max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())
        memory = np.empty(rounded + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        block = memory[start : start + rounded]
        self._blocks[block.ctypes.data] = block
        return block


class Tape:
    """The calls of one pass, in order.

    obstacle: what kept the pass from being recorded, or None; such a tape cannot be run.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.obstacle: str | None = None
        self._workspace = workspace
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._num_torch_calls = 0
        self._kept: list[torch.Tensor] = []  # made by torch without a call to repeat
        self._result: torch.Tensor | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Do `work` and give its result, as `run` will: the same calls on what the same tensors hold then.

        The result, here and there, is overwritten when any tape of the workspace runs or is recorded.
        """
        with _recording(self), _TorchCalls(self):
            result = work()
        self._result = self._workspace.alias(result)
        return self._result

    def run(self) -> torch.Tensor:
        assert self._result is not None and self.obstacle is None
        for function, args in self._calls:
            function(*args)
        return self._result

    def add(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._calls.append((function, args))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._workspace.empty(shape, dtype)

    def add_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation that torch has done."""
        name = function._schema.name
        if any(tag in function.tags for tag in _VARYING) or name in _CROSSINGS:
            self.obstacle = self.obstacle or f"{name} is not the same for other numbers"
        if name in _FACTORIES:
            self._kept.append(result)
            return
        if function._schema.is_mutable:
            self.add(partial(function, *args, **kwargs), ())
        elif _is_view(result, (*args, *kwargs.values())):
            return
        elif isinstance(result, torch.Tensor):
            self.add(_repeat, (result, function, args, kwargs))
        else:
            self.obstacle = self.obstacle or f"{name} gives something else than one tensor"
        self._num_torch_calls += 1
        if self._num_torch_calls > _MOST_TORCH_CALLS:
            self.obstacle = self.obstacle or f"more than {_MOST_TORCH_CALLS} operations are torch's, like {name}"


class _Recording(threading.local):
    """The tape that this thread is recording."""

    tape: Tape | None = None


_current = _Recording()


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """torch.empty on the CPU for a kernel's result; in the workspace while this thread records."""
    tape = _current.tape
    return torch.empty(shape, dtype=dtype) if tape is None else tape.empty(shape, dtype)


def call(function: Callable[..., Any], *args: Any) -> None:
    """Call a kernel; noted while this thread records. args: addresses and numbers, nothing that others change later."""
    function(*args)
    if (tape := _current.tape) is not None:
        tape.add(function, args)


@contextmanager
def _recording(tape: Tape) -> Iterator[None]:
    _current.tape = tape
    try:
        yield
    finally:
        _current.tape = None


class _TorchCalls(TorchDispatchMode):
    """Tells a tape of torch's operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape


def _on_torch_call(
    mode: _TorchCalls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    result = function(*args, **(kwargs or {}))
    mode.tape.add_torch(function, args, kwargs or {}, result)
    return result


# Were it in the body of the class, torch would import its compiler at the first call, which takes longer than a start.
_TorchCalls.__torch_dispatch__ = _on_torch_call  # type: ignore[method-assign]


def _repeat(result: torch.Tensor, function: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> None:
    result.copy_(function(*args, **kwargs))


def _is_view(result: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether every tensor of the result lies in the memory of an input."""
    results = result if isinstance(result, (list, tuple)) else [result]
    storages = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
    return bool(storages) and all(
        isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in storages for x in results
    )
