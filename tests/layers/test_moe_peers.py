"""Expert layers over peers' memory: several ranks' buffers in one process, on the GPU or in Triton's interpreter.

What a barrier would separate runs one rank after another here.
"""

from __future__ import annotations

import pytest
import torch

from layers.forward_batch import StepRows
from layers.kernels.triton_moe_fused import weighted_gate
from layers.moe import Routing, make_backend, peer_memory
from layers.moe.deepep import DeepEPBackend
from layers.moe.exchange import CollectiveExchange
from layers.moe.grouping import weighted_sum
from layers.moe.peer_memory import BufferShape, PeerBuffer, PeerExchange, open_buffer
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from tests.layers.moe_support import HIDDEN, NUM_EXPERTS, TOP_K, make_experts, make_routing, make_rows, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPACITY = 12


class Ranks:
    """The ranks of a group, with their experts and the exchanges over one another's buffers."""

    def __init__(self, count: int, fused: bool, dtype: torch.dtype = torch.float32, limit: float | None = None) -> None:
        shape = BufferShape(count, CAPACITY, HIDDEN, TOP_K, dtype)
        # What an earlier use may have left.
        memory = [torch.full((shape.offsets[-1],), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
        bases = [buffer.data_ptr() for buffer in memory]
        self.dtype = dtype
        self.fused = fused
        self.exchanges = [
            PeerExchange(PeerBuffer(shape, rank, memory[rank], bases, lambda: None), fused) for rank in range(count)
        ]
        self.experts = [
            make_experts(ParallelGroups(experts=ParallelGroup(rank, count)), dtype, limit).to(DEVICE)
            for rank in range(count)
        ]

    def step(self, x: list[torch.Tensor], routing: list[Routing], rows: int) -> list[torch.Tensor]:
        """Combined rows of every rank."""
        ids = [part.topk_ids.int().to(DEVICE) for part in routing]
        weights = [part.topk_weights.float().to(DEVICE) for part in routing]
        for rank, exchange in enumerate(self.exchanges):
            inner = weights[rank] if self.fused else None
            exchange.send(x[rank].to(DEVICE, self.dtype), ids[rank], inner, rows, self.experts[rank].num_local)
        for exchange, experts in zip(self.exchanges, self.experts, strict=True):
            exchange.compute(experts, rows, self.fused)
        outs = []
        for rank, exchange in enumerate(self.exchanges):
            outer = torch.ones_like(weights[rank]) if self.fused else weights[rank]
            outs.append(weighted_sum(exchange.result(ids[rank]), outer, self.dtype).cpu())
        return outs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("counts", "kind"),
    [([9], "random"), ([5, 7], "random"), ([0, 2, 0, 3], "one"), ([1, 0], "random")],
)
def test_rows_of_all_ranks(counts: list[int], kind: str, fused: bool) -> None:
    ranks = Ranks(len(counts), fused)
    for seed in (0, 1) if sum(counts) < 10 else (0,):
        x = [make_rows(count, 10 * seed + rank) for rank, count in enumerate(counts)]
        routing = [make_routing(count, kind, 10 * seed + rank) for rank, count in enumerate(counts)]
        for own_x, own_routing, out in zip(x, routing, ranks.step(x, routing, max(counts)), strict=True):
            assert out.shape == own_x.shape
            assert out.numel() == 0 or (out - reference(own_x, own_routing)).abs().max() < 1e-5


def test_the_fused_products_leave_many_rows_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the same: the weight comes before the second product either way."""
    x, routing = [make_rows(5, rank) for rank in range(2)], [make_routing(5, "one", rank) for rank in range(2)]
    ranks = Ranks(2, fused=True)
    few = ranks.step(x, routing, 5)
    monkeypatch.setattr(peer_memory, "_FUSED_ROWS", 0)
    many = ranks.step(x, routing, 5)
    for one, other in zip(few, many, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_gate(weighted: bool, limit: float | None) -> None:
    gate_up, factors = 3 * make_rows(7).to(DEVICE), torch.rand(7).to(DEVICE) if weighted else None
    out = weighted_gate(gate_up, factors, limit)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    wanted = torch.nn.functional.silu(gate) * up * (1.0 if factors is None else factors.double()[:, None])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_short_steps_after_long_ones_and_ids_of_minus_one(fused: bool) -> None:
    ranks = Ranks(2, fused)
    for counts in ([7, 8], [1, 3], [0, 1], [0, 0]):
        x = [make_rows(count, rank) for rank, count in enumerate(counts)]
        routing = [make_routing(count, "random", rank) for rank, count in enumerate(counts)]
        for part in routing:
            part.topk_ids[-1:] = -1
        outs = ranks.step(x, routing, max(counts))
        for own_x, own_routing, out in zip(x, routing, outs, strict=True):
            assert out.shape == own_x.shape
            assert out.numel() == 0 or (out - reference(own_x, own_routing)).abs().max() < 1e-5
            assert out[-1:].abs().sum() == 0


@pytest.mark.parametrize("fused", [False, True])
def test_not_a_number_stays_in_its_row(fused: bool) -> None:
    ranks = Ranks(2, fused)
    x, routing = [make_rows(4), make_rows(3)], [make_routing(4, "one"), make_routing(3, "one")]
    x[1][1] = torch.nan
    first, second = ranks.step(x, routing, 4)
    assert not first.isnan().any()
    assert second.isnan().any(dim=1).tolist() == [False, True, False]


def test_gate_limit_and_half_precision() -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    ranks = Ranks(2, fused=True, dtype=dtype, limit=0.5)
    x = [(2 * make_rows(6, rank)).to(dtype).float() for rank in range(2)]
    routing = [make_routing(6, "random", rank) for rank in range(2)]
    for own_x, own_routing, out in zip(x, routing, ranks.step(x, routing, 6), strict=True):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), reference(own_x, own_routing, 0.5), rtol=3e-2, atol=3e-2)


def test_more_rows_than_places_are_refused() -> None:
    exchange = Ranks(1, fused=False).exchanges[0]
    with pytest.raises(ValueError, match="13 rows do not fit a buffer for 12"):
        exchange.send(make_rows(13), make_routing(13).topk_ids.int(), None, 13, NUM_EXPERTS)


def test_one_buffer_for_all_layers_of_a_shape() -> None:
    shape = BufferShape(1, 4, HIDDEN, TOP_K, torch.float32)
    assert open_buffer(ParallelGroup(), shape, DEVICE) is open_buffer(ParallelGroup(), shape, DEVICE)
    assert all(offset % 256 == 0 for offset in shape.offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepep", "megamoe"])
def test_backend_of_one_rank_in_a_cuda_graph(name: str) -> None:
    """Captured with one routing, right for others, padding rows included."""
    groups = ParallelGroups(moe=MoEOptions(name))
    experts = make_experts(groups, torch.bfloat16).cuda()
    backend = make_backend(groups)
    backend.reserve(16, experts, TOP_K)
    x = torch.zeros(16, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(16, TOP_K, dtype=torch.int32, device="cuda")
    weights = torch.ones(16, TOP_K, device="cuda")
    numbers = torch.arange(16, device="cuda")[:, None]
    padding = numbers >= 16
    rows = StepRows((16,), "max", 16, extends=False, padding_T1=padding)

    def layer() -> torch.Tensor:
        return backend.forward(x, Routing(ids, weights), experts, rows)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for count, kind in ((16, "random"), (16, "one"), (3, "random"), (0, "random")):
        routing, values = make_routing(16, kind), make_rows(16, count).bfloat16()
        x.copy_(values)
        ids.copy_(routing.topk_ids)
        weights.copy_(routing.topk_weights)
        torch.ge(numbers, count, out=padding)
        graph.replay()
        wanted = reference(values[:count].float(), Routing(routing.topk_ids[:count], routing.topk_weights[:count]))
        torch.testing.assert_close(out[:count].double().cpu(), wanted, rtol=4e-2, atol=4e-2)
        assert out[count:].abs().sum() == 0


def test_collectives_serve_cpus() -> None:
    backend = make_backend(ParallelGroups(moe=MoEOptions("deepep")))
    assert isinstance(backend, DeepEPBackend)
    backend.reserve(4, make_experts(ParallelGroups()), TOP_K)
    exchange, rows = backend.exchange(most=4, extends=False)
    assert isinstance(exchange, CollectiveExchange)
    assert rows == 4
    assert backend.exchange(most=4, extends=True)[1] is None
