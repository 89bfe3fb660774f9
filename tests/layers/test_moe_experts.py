"""Dispatch, experts and combine against a naive reference, for even, skewed and empty routings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from layers.forward_batch import StepRows
from layers.kernels.cpu import PackedWeight
from layers.linear import pack_weights
from layers.moe import Experts, MoE, NoneBackend, Routing, SoftmaxRouter
from layers.moe.grouping import Grouped, local_ids, run_experts, weighted_sum
from layers.parallel import ParallelGroup, ParallelGroups
from tests.layers.moe_support import batch_of

HIDDEN, INTERMEDIATE = 24, 16


@dataclass(frozen=True)
class OneOfMany(ParallelGroup):
    """A rank whose sums are left to the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def groups_of(group: ParallelGroup | None) -> ParallelGroups:
    return ParallelGroups(attention=group, experts=group) if group else ParallelGroups()


def make_experts(num_experts: int, group: ParallelGroup | None = None, dtype: torch.dtype = torch.float32) -> Experts:
    """The group's share of experts whose weights depend on the number of experts only."""
    experts = Experts(num_experts, HIDDEN, INTERMEDIATE, groups_of(group))
    generator = torch.Generator().manual_seed(num_experts)
    own = slice(experts.first, experts.first + experts.num_local)
    for parameter in (experts.w13_E2IH, experts.w2_EHI):
        values = torch.randn(num_experts, *parameter.shape[1:], generator=generator) / parameter.shape[-1] ** 0.5
        parameter.data = values[own].to(dtype)
    return experts


def make_routing(name: str, rows: int, num_experts: int, top_k: int) -> Routing:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(rows, num_experts, generator=generator).argsort(dim=-1)[:, :top_k]
    if name == "one":  # every token to the same experts
        ids = torch.arange(num_experts)[-top_k:].expand(rows, top_k)
    elif name == "skewed" and rows:  # nearly all tokens to the same experts
        ids[: rows * 19 // 20] = torch.arange(top_k)
    weights = torch.rand(rows, top_k, generator=generator)
    return Routing(ids.int(), weights)


def naive(experts: Experts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Token by token in float64; experts elsewhere count as 0."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(routing.topk_ids[token].tolist(), routing.topk_weights[token], strict=True):
            if 0 <= expert - experts.first < experts.num_local:
                gate_up = experts.w13_E2IH[expert - experts.first].double() @ x[token].double()
                hidden = F.silu(gate_up[:INTERMEDIATE]) * gate_up[INTERMEDIATE:]
                out[token] += weight.double() * (experts.w2_EHI[expert - experts.first].double() @ hidden)
    return out


def run(experts: Experts, x: torch.Tensor, routing: Routing, group: ParallelGroup | None = None) -> torch.Tensor:
    return NoneBackend(groups_of(group)).forward(x, routing, experts, StepRows((x.shape[0],)))


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("routing_name", ["even", "skewed", "one"])
@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 8, 2), (57, 8, 2), (40, 4, 4), (3, 64, 6), (20, 1, 1)])
def test_matches_the_naive_reference(routing_name: str, rows: int, num_experts: int, top_k: int) -> None:
    experts, x = make_experts(num_experts), rows_of(rows)
    routing = make_routing(routing_name, rows, num_experts, top_k)
    out = run(experts, x, routing)
    assert out.dtype == torch.float32
    assert (out - naive(experts, x, routing)).abs().max() < 2e-6


def test_no_rows() -> None:
    out = run(make_experts(8), rows_of(0), make_routing("even", 0, 8, 2))
    assert out.shape == (0, HIDDEN)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 31])
@pytest.mark.parametrize("routing_name", ["even", "one"])
def test_ranks_with_some_of_the_experts_add_up(size: int, rows: int, routing_name: str) -> None:
    x, routing = rows_of(rows), make_routing(routing_name, rows, 8, 2)
    total = torch.zeros(rows, HIDDEN)
    for rank in range(size):
        group = OneOfMany(rank, size)
        experts = make_experts(8, group)
        part = run(experts, x, routing, group)
        assert torch.allclose(part.double(), naive(experts, x, routing), atol=2e-6)
        total += part
    assert torch.allclose(total, run(make_experts(8), x, routing), atol=2e-6)


class Recorder(torch.nn.Module):
    """In place of experts: keeps what they are given and returns numbers of the rows."""

    def __init__(self, num_local: int, first: int = 0) -> None:
        super().__init__()
        self.num_local, self.first = num_local, first

    def forward(self, x_RH: torch.Tensor, expert_ends_E: torch.Tensor, *_: object) -> torch.Tensor:
        self.x_RH, self.expert_ends_E = x_RH, expert_ends_E
        rows_R = torch.arange(x_RH.shape[0], device=x_RH.device)
        return torch.where(rows_R < expert_ends_E[-1], rows_R + 1.0, 0.0)[:, None]


FOUR = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]], dtype=torch.int32)


def test_rows_are_sorted_by_expert_in_token_order() -> None:
    recorder = Recorder(5)
    grouped = run_experts(torch.arange(4.0)[:, None].expand(4, HIDDEN), FOUR, recorder)  # type: ignore[arg-type]
    assert recorder.x_RH[:, 0].tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert recorder.expert_ends_E.tolist() == [3, 3, 6, 8, 8]
    assert recorder.expert_ends_E.dtype == torch.int32
    assert grouped.places_TK.tolist() == [[3, 0], [1, 6], [4, 7], [2, 5]]


def test_of_the_rows_of_other_ranks_one_stands_for_all() -> None:
    recorder = Recorder(2, first=2)
    ids = local_ids(FOUR, recorder)  # type: ignore[arg-type]
    assert ids.tolist() == [[0, 2], [2, 1], [0, 1], [2, 0]]
    grouped = run_experts(torch.arange(4.0)[:, None].expand(4, HIDDEN), ids, recorder)  # type: ignore[arg-type]
    assert recorder.x_RH[:-1, 0].tolist() == [0, 2, 3, 1, 2]
    assert recorder.expert_ends_E.tolist() == [3, 5]
    assert grouped.places_TK.tolist() == [[0, 5], [5, 3], [1, 4], [5, 2]]
    assert grouped.y_RH[5].tolist() == [0.0]


def test_combine_accumulates_in_float32() -> None:
    # In bfloat16 256 + 1 is 256.
    y_RH = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = weighted_sum(Grouped(y_RH, torch.tensor([[0, 1, 2]])), torch.ones(1, 3), torch.bfloat16)
    assert (out.dtype, out.item()) == (torch.bfloat16, 258.0)


@pytest.mark.parametrize("routing_name", ["even", "skewed"])
def test_a_row_does_not_depend_on_its_place_or_company(routing_name: str) -> None:
    experts, x, routing = make_experts(8), rows_of(40), make_routing(routing_name, 40, 8, 2)
    out = run(experts, x, routing)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = run(experts, x[order], Routing(routing.topk_ids[order], routing.topk_weights[order]))
    assert torch.allclose(moved, out[order], atol=1e-6)
    alone = run(experts, x[:1], Routing(routing.topk_ids[:1], routing.topk_weights[:1]))
    assert torch.allclose(alone, out[:1], atol=1e-6)
    assert torch.equal(run(experts, x, routing), out)


def test_not_a_number_stays_in_its_row() -> None:
    experts, x, routing = make_experts(4), rows_of(6), make_routing("even", 6, 4, 2)
    x[2] = torch.nan
    out = run(experts, x, routing)
    assert out[2].isnan().all()
    assert not out[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.bfloat16])
def test_routing_of_any_width_is_taken(id_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    experts, x, routing = make_experts(8), rows_of(9), make_routing("even", 9, 8, 2)
    weights = routing.topk_weights.bfloat16()
    expected = run(experts, x, Routing(routing.topk_ids, weights.float()))
    assert torch.equal(run(experts, x, Routing(routing.topk_ids.to(id_dtype), weights.to(weight_dtype))), expected)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.int32, torch.int32)])
def test_routing_of_another_kind_is_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    routing = Routing(torch.zeros(2, 1, dtype=dtypes[0]), torch.ones(2, 1, dtype=dtypes[1]))
    with pytest.raises(ValueError, match="expected an integer and a float type"):
        run(make_experts(4), rows_of(2), routing)


def test_rows_that_the_step_does_not_know_are_refused() -> None:
    routing = make_routing("even", 3, 4, 2)
    with pytest.raises(ValueError, match="data-parallel rank 0 has 3 rows, and the step 2 for it"):
        NoneBackend(ParallelGroups()).forward(rows_of(3), routing, make_experts(4), StepRows((2,)))


def test_work_grows_with_the_experts_that_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of two experts each among many: a product is made for eight at most, over their own rows only."""
    experts, x, routing = make_experts(300), rows_of(4), make_routing("even", 4, 300, 2)
    products: list[int] = []
    linear = F.linear

    def counting(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append(rows.shape[0])
        return linear(rows, weight)

    monkeypatch.setattr(F, "linear", counting)
    run(experts, x, routing)
    assert len(products) <= 2 * 8
    assert sum(products) == 2 * 8


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="the number of experts is 6, which does not divide into 4 ranks"):
        Experts(6, HIDDEN, INTERMEDIATE, ParallelGroups(experts=ParallelGroup(0, 4)))


def test_shared_experts_are_added_once() -> None:
    gate = SoftmaxRouter(HIDDEN, 4, 2, renormalize=True)
    gate.weight.copy_(torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(3)))
    shared = torch.nn.Linear(HIDDEN, HIDDEN)
    experts, x = make_experts(4), rows_of(7)
    layer = MoE(gate, experts, ParallelGroups(), shared)
    with torch.inference_mode():
        expected = naive(experts, x, gate(x)) + shared(x).double()
        assert (layer(x, batch_of(7)) - expected).abs().max() < 2e-6


class TestPacked:
    """The CPU's matrix kernel takes bfloat16 weights of widths that are multiples of 32."""

    def make(self) -> Experts:
        experts = Experts(4, 64, 32)
        generator = torch.Generator().manual_seed(1)
        for parameter in experts.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) / 8).bfloat16()
        if not PackedWeight.accepts(experts.w13_E2IH[0]):
            pytest.skip("no matrix kernel for this CPU")
        return experts

    def test_packed_equals_looped(self) -> None:
        experts, x = self.make(), torch.randn(30, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        routing = make_routing("even", 30, 4, 2)
        expected = run(experts, x, routing)
        pack_weights(experts)
        assert experts.w13_E2IH.numel() == experts.w2_EHI.numel() == 0
        out = run(experts, x, routing)
        assert out.dtype == torch.bfloat16
        assert torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
        assert run(experts, x[:0], make_routing("even", 0, 4, 2)).shape == (0, 64)

    def test_a_row_is_exactly_the_same_in_any_company(self) -> None:
        experts, x = self.make(), torch.randn(30, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        pack_weights(experts)
        routing = make_routing("skewed", 30, 4, 2)
        out = run(experts, x, routing)
        for rows in (slice(0, 1), slice(29, 30), slice(5, 17)):
            part = run(experts, x[rows], Routing(routing.topk_ids[rows], routing.topk_weights[rows]))
            assert torch.equal(part, out[rows])


@pytest.mark.gpu
class TestGroupedOnDevice:
    @pytest.mark.parametrize("routing_name", ["even", "skewed", "one"])
    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("rows", [1, 5, 300])
    def test_grouped_equals_looped(self, routing_name: str, size: int, rows: int) -> None:
        group = OneOfMany(size - 1, size)
        experts = make_experts(8, group, torch.bfloat16).cuda()
        routing = Routing(*(part.cuda() for part in make_routing(routing_name, rows, 8, 2)))
        recorder = Recorder(experts.num_local, experts.first)
        ids = local_ids(routing.topk_ids, experts)
        run_experts(rows_of(rows).bfloat16().cuda(), ids, recorder)  # type: ignore[arg-type]
        grouped = experts.run_grouped(recorder.x_RH, recorder.expert_ends_E)
        looped = experts.run_looped(recorder.x_RH, recorder.expert_ends_E)
        assert not grouped.isnan().any()
        assert torch.allclose(grouped.float(), looped.float(), atol=2e-2, rtol=2e-2)

    def test_graph_follows_the_routing(self) -> None:
        """A captured layer gives the right result for routings other than the one it was captured with."""
        experts = make_experts(8, dtype=torch.bfloat16).cuda()
        backend = NoneBackend(ParallelGroups())
        x = rows_of(16).bfloat16().cuda()
        ids = torch.empty(16, 2, dtype=torch.int32, device="cuda")
        weights = torch.empty(16, 2, device="cuda")

        def layer() -> torch.Tensor:
            return backend.forward(x, Routing(ids, weights), experts, StepRows((16,), extends=False))

        def set_routing(name: str) -> Routing:
            routing = make_routing(name, 16, 8, 2)
            ids.copy_(routing.topk_ids)
            weights.copy_(routing.topk_weights)
            return routing

        set_routing("even")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer()
        reference = make_experts(8, dtype=torch.bfloat16)
        for name in ("even", "one", "skewed"):
            routing = set_routing(name)
            graph.replay()
            expected = naive(reference, x.cpu(), routing)
            assert torch.allclose(out.cpu().double(), expected, atol=3e-2, rtol=3e-2)
