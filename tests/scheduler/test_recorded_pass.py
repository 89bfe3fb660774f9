"""What a decode pass does on GPUs, on tensors without data: no value can be asked for, and no tensor lies on the host.

A CUDA graph can hold such a pass. Triton kernels are not run; what surrounds their launches is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

import models
from layers.attention.triton_backend import TritonAttention
from layers.kv_cache import KVCache
from layers.moe import MoE
from layers.moe.deepep import DeepEPBackend
from layers.moe.megamoe import MegaMoEBackend
from layers.moe.peer_memory import BufferShape, PeerBuffer, PeerExchange
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.parallel_layout import ParallelLayout
from scheduler.cuda_graph import DecodeGraphs

META = torch.device("meta")
REQUESTS, CONTEXT, PAGE = 3, 64, 16


class OnDevice(TorchDispatchMode):
    """Refuses operations that see a tensor of the host, as its copy to the device waits or is not recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            assert not isinstance(leaf, torch.Tensor) or leaf.device == META, f"{func} on a tensor of the host"
        return out


class NoValues(TorchFunctionMode):
    """Refuses to make tensors of the host's values, which are copied to the device like other tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), func.__name__
        return func(*args, **(kwargs or {}))


class Checker:
    """A recorder that watches each pass."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Not needed: there is nothing that the first pass would set up."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with OnDevice(), NoValues():
            work()
        return work


@dataclass(frozen=True)
class Shapes(ParallelGroup):
    """Collectives whose results have the right shapes; with counts that differ there are no fixed ones."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        return x.new_empty(x.shape[0] if receive_counts is None else sum(receive_counts), *x.shape[1:])


def groups_of(layout: ParallelLayout, rank: int, moe: MoEOptions) -> ParallelGroups:
    def group(partition: list[list[int]]) -> ParallelGroup:
        ranks = next(ranks for ranks in partition if rank in ranks)
        return Shapes(ranks.index(rank), len(ranks)) if len(ranks) > 1 else ParallelGroup()

    return ParallelGroups(
        attention=group(layout.attention_groups()),
        dense=group(layout.dense_groups()),
        experts=group(layout.expert_groups()),
        expert_columns=group(layout.expert_tp_groups()),
        data=group(layout.dp_groups()),
        moe=moe,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Layers do as on GPUs. Names of the kernels that they launched."""
    names: set[str] = set()

    def launch(kernel: Any, grid: object) -> Callable[..., None]:
        names.add(kernel.fn.__name__)
        return lambda *args, **kwargs: None

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    return names


def use_peer_memory(model: torch.nn.Module, group: ParallelGroup) -> None:
    """Exchanges over the memory of other GPUs of the host, as `reserve` opens them there."""
    for layer in model.modules():
        if not isinstance(layer, MoE):
            continue
        backend, experts = layer.backend, layer.experts
        assert isinstance(backend, (DeepEPBackend, MegaMoEBackend))
        shape = BufferShape(group.size, REQUESTS, experts.hidden_size, layer.gate.top_k, experts.dtype)
        memory = torch.empty(shape.offsets[-1], dtype=torch.uint8, device=META)
        buffer = PeerBuffer(shape, group.rank, memory, [0] * group.size, lambda: None)
        backend._peers = PeerExchange(buffer, fused=isinstance(backend, MegaMoEBackend))


@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 2), (4, 2), pytest.param(2, 1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("path", ["none", "deepep", "deepep, peers", "megamoe", "megamoe, peers"])
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("tiny-qwen3-moe", {}),
        ("tiny-qwen3-moe", {"num_redundant_experts": 8, "enable_eplb": True}),
        ("tiny-qwen3-moe", {"dispatch_algorithm": "fake"}),
        ("tiny-deepseek-v3", {}),
    ],
    ids=str,
)
def test_nothing_waits_for_the_device(
    preset: str, options: dict[str, Any], path: str, tp_size: int, dp_size: int, launched: set[str]
) -> None:
    moe = MoEOptions(path.split(",")[0], **options)
    groups = groups_of(ParallelLayout(tp_size, dp_size), tp_size - 1, moe)
    model, info = models.load_model(preset, dtype="bfloat16", device=META, groups=groups)
    if path.endswith("peers"):
        use_peer_memory(model, groups.experts)
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32, device=META)
    cache = KVCache(info.kv_spec, (REQUESTS * CONTEXT // PAGE + 1) * PAGE, info.dtype, META)
    passes = DecodeGraphs(
        lambda batch: model.logits(model(batch)),
        table,
        cache,
        TritonAttention(num_sms=132),
        REQUESTS,
        info.vocab_size,
        dp_size,
    )
    passes.record_all(Checker())
    assert {"_sort_kernel", "_weighted_sum_kernel"} <= launched
    assert ("_push_kernel" in launched) == path.endswith("peers")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.tensor([1, 2, 3], device=x.device),
        lambda x: torch.empty(3).to(x.device),
    ],
)
def test_what_a_recording_cannot_hold_is_found(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(3, dtype=torch.int64, device=META)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        Checker().record(lambda: [work(x)].clear())
