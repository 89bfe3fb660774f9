"""The adapters to DeepEP and DeepGEMM against stand-ins for one rank that keep to the libraries' contracts.

The stand-ins check what is handed to them: dtypes, pointers, order of the calls, and that weights are applied once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from layers.forward_batch import StepRows
from layers.moe import Routing, deepep_library, make_backend
from layers.moe.deep_gemm import DeepGemmExperts
from layers.moe.library import load_library
from layers.moe.peer_memory import BufferShape, open_buffer
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from tests.layers.moe_support import HIDDEN, NUM_EXPERTS, TOP_K, make_experts, make_routing, make_rows, reference

CAP = 12


class FakeBuffer:
    """One rank of deep_ep.Buffer. log: the calls."""

    log: list[str] = []

    def __init__(self, group: object, nvl_bytes: int, rdma_bytes: int, **options: Any) -> None:
        assert options == {"low_latency_mode": True, "num_qps_per_rank": NUM_EXPERTS}
        assert rdma_bytes == 77
        self.log.clear()
        self.is_clean = True

    @staticmethod
    def get_dispatch_config(size: int) -> SimpleNamespace:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda width, ranks: width, get_rdma_buffer_size_hint=lambda width, ranks: 0
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(cap: int, hidden: int, ranks: int, experts: int) -> int:
        assert (cap, hidden, ranks, experts) == (CAP, HIDDEN, 1, NUM_EXPERTS)
        return 77

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> tuple[Any, ...]:
        assert ids.dtype == torch.int64
        here = (ids >= 0).any(dim=1, keepdim=True)
        counts = torch.bincount(ids[ids >= 0], minlength=experts).int()
        return here.sum(dim=0).int(), None, counts, here, None

    def dispatch(self, x: torch.Tensor, **parts: Any) -> tuple[Any, ...]:
        assert x.data_ptr() != 0 and parts["topk_weights"].dtype == torch.float32
        self.log.append("dispatch")
        self.is_clean = False
        here = parts["is_token_in_rank"][:, 0]
        return x[here], parts["topk_idx"][here], parts["topk_weights"][here], [], (here, x.shape), None

    def combine(self, y: torch.Tensor, handle: tuple[torch.Tensor, torch.Size]) -> tuple[Any, ...]:
        here, shape = handle
        out = y.new_zeros(shape)
        out[here] = y
        return out, None, None

    def clean_low_latency_buffer(self, cap: int, hidden: int, experts: int) -> None:
        self.log.append("clean")
        self.is_clean = True

    def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, cap: int, experts: int, use_fp8: bool) -> Any:
        assert self.is_clean and ids.dtype == torch.int64 and not use_fp8
        assert x.data_ptr() != 0 and x.shape[0] <= cap
        self.log.append("low latency")
        packed = torch.full((experts, cap, x.shape[1]), torch.nan, dtype=x.dtype)
        places: dict[tuple[int, int], int] = {}
        counts = [0] * experts
        for token, row in enumerate(ids.tolist()):
            for expert in row:
                if expert >= 0:
                    packed[expert, counts[expert]] = x[token]
                    places[token, expert] = counts[expert]
                    counts[expert] += 1
        return packed, torch.tensor(counts), places, None, None

    def low_latency_combine(
        self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, places: dict[tuple[int, int], int]
    ) -> tuple[Any, ...]:
        out = torch.zeros(ids.shape[0], y.shape[2])
        for (token, expert), place in places.items():
            weight = weights[token, ids[token].tolist().index(expert)]
            out[token] += weight * y[expert, place].float()
        return out.to(y.dtype), None, None


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deep_ep")
    module.__spec__ = SimpleNamespace(name="deep_ep")  # type: ignore[assignment]
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    deepep_library._connect.cache_clear()


@pytest.mark.usefixtures("deep_ep")
def test_deepep_in_both_layouts() -> None:
    groups = ParallelGroups(moe=MoEOptions("deepep", deepep_transport="library", deepep_max_tokens_per_rank=CAP))
    experts, backend = make_experts(groups, torch.bfloat16), make_backend(groups)
    backend.reserve(40, experts, TOP_K)
    for count, extends in ((9, True), (9, False), (0, False), (0, True), (12, False), (5, False), (13, False)):
        x, routing = make_rows(count).bfloat16(), make_routing(count, scale=2.5)
        routing.topk_ids[-1:] = -1
        out = backend.forward(x, routing, experts, StepRows((count,), extends=extends))
        assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
        torch.testing.assert_close(out.double(), reference(x.float(), routing), rtol=5e-2, atol=5e-2)
        assert out[-1:].abs().sum() == 0
    # After normal ones the signals are cleaned once; 13 rows are more than the low-latency layout takes.
    low, clean, normal = "low latency", "clean", "dispatch"
    assert FakeBuffer.log == [normal, clean, low, low, normal, clean, low, low, normal]


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize(
    ("transport", "mode", "limit"),
    [
        ("collective", "auto", (CAP, f"--deepep-max-tokens-per-rank is {CAP}")),
        ("collective", "low_latency", (CAP, f"--deepep-max-tokens-per-rank is {CAP}")),
        ("collective", "normal", (0, "--deepep-mode normal waits for counts of rows")),
        (
            "library",
            "auto",
            (0, "--deepep-transport library cleans up between the layouts of --deepep-mode auto"),
        ),
        ("library", "low_latency", (CAP, f"--deepep-max-tokens-per-rank is {CAP}")),
    ],
)
def test_rows_that_a_graph_can_hold(transport: str, mode: str, limit: tuple[int, str]) -> None:
    options = MoEOptions("deepep", deepep_mode=mode, deepep_transport=transport, deepep_max_tokens_per_rank=CAP)
    groups = ParallelGroups(moe=options)
    backend = make_backend(groups)
    backend.reserve(CAP, make_experts(groups, torch.bfloat16), TOP_K)
    assert backend.recording_limit == limit


def test_deepep_has_to_be_installed() -> None:
    groups = ParallelGroups(moe=MoEOptions("deepep", deepep_transport="library"))
    with pytest.raises(ValueError, match="--deepep-transport library needs the package deep_ep"):
        make_backend(groups).reserve(4, make_experts(groups, torch.bfloat16), TOP_K)


def test_a_library_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_a_library.py").write_text("present = 1")
    (tmp_path / "broken_library.py").write_text("import ctypes; ctypes.CDLL('libnowhere.so.1')")
    assert load_library("half_a_library", "--flag", "the package p 1.0", ["present"]).present == 1
    for module, message in (
        ("no_library", "--flag needs the package p 1.0, which is not installed"),
        ("half_a_library", "and what is installed has no absent: install another version"),
        ("broken_library", r"cannot be loaded \(OSError: libnowhere.so.1: cannot open"),
    ):
        with pytest.raises(ValueError, match=message):
            load_library(module, "--flag", "the package p 1.0", ["present", "absent"])


def test_gpus_that_share_no_memory_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no peer\naccess")

    monkeypatch.setattr(symmetric_memory, "empty", refuse)
    group = ParallelGroup(0, 2, cast("dist.ProcessGroup", object()))
    with pytest.raises(ValueError, match=r"cannot share a buffer of \d+ bytes \(no peer access\): use"):
        open_buffer(group, BufferShape(2, 4, HIDDEN, TOP_K, torch.bfloat16), torch.device("cpu"))


def test_deep_gemm_says_what_it_needs() -> None:
    groups = ParallelGroups(moe=MoEOptions("megamoe", mega_moe_kernel="deep_gemm"))
    with pytest.raises(ValueError, match="--mega-moe-kernel deep_gemm needs a Hopper GPU"):
        make_backend(groups).reserve(4, make_experts(groups, torch.bfloat16), TOP_K)
    with pytest.raises(ValueError, match="--enable-eplb cannot move the experts"):
        MoEOptions("megamoe", mega_moe_kernel="deep_gemm", enable_eplb=True)


def test_deep_gemm_comes_with_a_row_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hands over int32 ids and float32 weights, and the whole of the buffer's places each time."""
    calls: list[tuple[Any, ...]] = []
    buffer = SimpleNamespace(x="x", x_sf="x_sf", topk_idx="ids", topk_weights="weights")

    def pre_dispatch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any) -> None:
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert x.data_ptr() != 0
        assert rest == ("x", "x_sf", "ids", "weights", x.shape[0])
        calls.append((x.shape[0], ids.tolist(), weights.tolist()))

    def fused(out: torch.Tensor, w13: str, w2: str, own: object, activation_clamp: float | None) -> None:
        assert (w13, w2, own, activation_clamp) == ("w13", "w2", buffer, 10.0)
        out.fill_(3)

    layer = DeepGemmExperts.__new__(DeepGemmExperts)
    layer._library = SimpleNamespace(mega_moe_pre_dispatch_sm90=pre_dispatch, fp8_mega_moe=fused)
    layer._limit, layer.buffer, layer.w13, layer.w2 = 10.0, buffer, "w13", "w2"
    routing = Routing(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[0.5, 0.25]]))
    x = torch.zeros(1, 4, dtype=torch.bfloat16)
    assert layer.run(x, routing).tolist() == [[3, 3, 3, 3]]
    empty = layer.run(x[:0], Routing(routing.topk_ids[:0], routing.topk_weights[:0]))
    assert (empty.shape, empty.dtype) == ((0, 4), torch.bfloat16)
    assert calls == [(1, [[1, 0]], [[0.5, 0.25]]), (1, [[-1, -1]], [[0.0, 0.0]])]


def test_groups_of_processes_tell_buffers_apart() -> None:
    """Buffers are kept by what they depend on; equal groups are one group."""
    assert hash(ParallelGroup(1, 2)) == hash(ParallelGroup(1, 2))
    assert ParallelGroup(1, 2) != ParallelGroup(0, 2)
