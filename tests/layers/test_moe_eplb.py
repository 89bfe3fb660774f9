"""Placement of experts: the planner's pure functions, choice of copies, counting, and moves that change no token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.forward_batch import StepRows
from layers.moe import GroupedSigmoidRouter, Routing, eplb, make_backend
from layers.moe.placement import ExpertPlacement, fake_choice
from layers.moe.rebalance import Rebalancer, move_experts
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroups
from layers.parallel_layout import ParallelLayout
from tests.layers.moe_support import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    expert_weight,
    make_experts,
    make_routing,
    make_rows,
    reference,
    run_step,
)
from tests.models.thread_group import run_layout

pytestmark = pytest.mark.timeout(180)


def rank_loads(loads: list[int], placement: list[int], num_ranks: int) -> list[float]:
    """[E], [P] -> [R]: what each rank carries when copies share their expert's load evenly."""
    copies = [0] * len(loads)
    for expert in placement:
        copies[expert] += 1
    per_rank = len(placement) // num_ranks
    return [
        sum(loads[expert] / copies[expert] for expert in placement[rank * per_rank : (rank + 1) * per_rank])
        for rank in range(num_ranks)
    ]


class TestPlanner:
    def test_packing_by_hand(self) -> None:
        # 9 | 8 | 7+... : 9 to pack 0, 8 to 1, 5 to 1 (lighter), 4 to 0, then 3 and 2.
        assert eplb.balanced_packing([9, 8, 5, 4], 2) == [0, 1, 1, 0]
        assert eplb.balanced_packing([1, 1, 1, 1], 4) == [0, 1, 2, 3]
        # A full pack takes nothing more, however light it is.
        assert eplb.balanced_packing([10, 9, 0, 0], 2) == [0, 1, 1, 0]

    def test_copies_by_hand(self) -> None:
        # 12 -> 6 each, then 8 is the most, then 6 -> 4 each.
        assert eplb.replicate([12, 8, 1], 4, 4) == [2, 1, 1]
        assert eplb.replicate([12, 8, 1], 5, 5) == [2, 2, 1]
        assert eplb.replicate([12, 8, 1], 6, 6) == [3, 2, 1]
        assert eplb.replicate([12, 8, 1], 6, 2) == [2, 2, 2]

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: eplb.balanced_packing([1, 2, 3], 2), "3 items do not divide into 2 packs"),
            (lambda: eplb.replicate([1, 2], 1, 4), "2 experts cannot have 1 copies"),
            (lambda: eplb.plan_hierarchical([1] * 8, 8, 4, 2, 3), "3 groups of experts do not divide into 2 hosts"),
        ],
    )
    def test_refusals(self, call: object, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            call()  # type: ignore[operator]

    @given(
        st.lists(st.integers(0, 10_000), min_size=8, max_size=8),
        st.sampled_from([8, 12, 16]),
        st.sampled_from([1, 2, 4]),
    )
    @settings(max_examples=100)
    def test_every_expert_has_a_copy_and_the_busiest_rank_is_no_worse_than_in_order(
        self, loads: list[int], num_physical: int, num_ranks: int
    ) -> None:
        plan = eplb.plan_global(loads, num_physical, num_ranks)
        assert len(plan) == num_physical
        assert set(plan) == set(range(8))
        # Greedy longest-first scheduling is within the mean plus one item of the best.
        carried = rank_loads(loads, plan, num_ranks)
        assert abs(sum(carried) - sum(loads)) < 1e-6 * (1 + sum(loads))
        heaviest = max(load / plan.count(expert) for expert, load in enumerate(loads))
        assert max(carried) <= sum(loads) / num_ranks + heaviest * (1 + 1e-9)

    def test_a_crowded_expert_is_spread(self) -> None:
        loads = [1000, 10, 10, 10, 10, 10, 10, 10]
        before = rank_loads(loads, list(range(8)), 4)
        after = rank_loads(loads, eplb.plan_global(loads, 12, 4), 4)
        assert max(before) == 1010
        assert max(after) < 300

    def test_groups_stay_on_one_host(self) -> None:
        loads = [float(7 * expert % 11 + 1) for expert in range(16)]
        plan = eplb.plan_hierarchical(loads, 24, 4, num_hosts=2, num_groups=4)
        hosts = [{expert // 4 for expert in plan[half * 12 : (half + 1) * 12]} for half in range(2)]
        assert len(hosts[0]) == len(hosts[1]) == 2
        assert hosts[0].isdisjoint(hosts[1])
        assert set(plan) == set(range(16))

    def test_choice_between_the_two(self) -> None:
        loads = [float(expert) for expert in range(8)]
        assert eplb.plan_placement(loads, 8, 4, 2, 3) == eplb.plan_global(loads, 8, 4)
        assert eplb.plan_placement(loads, 8, 4, 2, 4) == eplb.plan_hierarchical(loads, 8, 4, 2, 4)
        assert eplb.plan_placement(loads, 8, 1, 2, 4) == eplb.plan_global(loads, 8, 1)

    def test_the_model_says_in_which_groups_its_experts_are_chosen(self) -> None:
        options = MoEOptions(enable_eplb=True)
        groups = ParallelGroups(moe=options)
        gate = GroupedSigmoidRouter(HIDDEN, NUM_EXPERTS, TOP_K, 4, 2, True, 1.0)
        rebalancer = Rebalancer.of(torch.nn.ModuleList([gate, make_experts(groups)]), groups, num_hosts=2)
        assert rebalancer is not None
        assert (rebalancer.num_hosts, rebalancer.num_groups) == (2, 4)

    def test_experts_that_stay_keep_their_places(self) -> None:
        assert eplb.keep_in_place([0, 1, 2, 3], [1, 2, 3, 0], 2) == [2, 1, 0, 3]
        assert eplb.keep_in_place([0, 0, 1, 2], [0, 1, 2, 0], 2) == [0, 1, 0, 2]

    def test_moves_prefer_the_own_rank_and_share_the_sending(self) -> None:
        # Places 2 and 3 are on rank 1; expert 0 is on ranks 0 and 2.
        assert eplb.moves([0, 1, 2, 3, 0, 5], [0, 1, 2, 2, 0, 5], 3) == [(2, 3)]
        assert eplb.moves([0, 1, 2, 3, 0, 5], [0, 1, 0, 0, 0, 5], 3) == [(0, 2), (4, 3)]
        assert eplb.moves([0, 1], [0, 1], 2) == []


class TestPlacement:
    def make(self, choice: str, rank: int = 0) -> ExpertPlacement:
        placement = ExpertPlacement(4, 6, rank, 3, choice, counts_load=True)
        placement.assign([0, 1, 2, 0, 3, 0])
        return placement

    def test_minus_one_stays(self) -> None:
        ids = torch.tensor([[-1, 3], [0, -1]], dtype=torch.int32)
        for choice in ("static", "dynamic"):
            physical = self.make(choice).to_physical(ids)
            assert physical.dtype == torch.int32
            assert physical.tolist() == [[-1, 4], [0 if choice == "static" else 3, -1]]

    def test_dynamic_is_a_function_of_the_row(self) -> None:
        ids = torch.zeros(7, 1, dtype=torch.int32)
        for rank in range(3):
            assert self.make("dynamic", rank).to_physical(ids).flatten().tolist() == [0, 3, 5, 0, 3, 5, 0]

    def test_static_prefers_the_own_copy_and_shares_the_others(self) -> None:
        tables = [self.make("static", rank).own_copy_E.tolist() for rank in range(3)]
        assert [table[0] for table in tables] == [0, 3, 5]
        assert [table[1:] for table in tables] == [[1, 2, 4]] * 3
        placement = [ExpertPlacement(4, 8, rank, 4, "static", False) for rank in range(4)]
        for part in placement:
            part.assign([0, 1, 0, 2, 3, 3, 1, 2])
        # Expert 0 has copies on ranks 0 and 1; ranks 2 and 3 take one each.
        assert [int(part.own_copy_E[0]) for part in placement] == [0, 2, 0, 2]

    def test_padding_is_not_counted(self) -> None:
        placement = self.make("dynamic")
        ids = torch.tensor([[0, 3], [0, 1], [-1, -1]], dtype=torch.int32)
        placement.admit(Routing(ids, torch.ones(3, 2)))
        assert placement.load_E.tolist() == [2, 1, 0, 1]

    def test_every_expert_needs_a_copy(self) -> None:
        with pytest.raises(ValueError, match="copies of 3 logical ones; there are 6 and 4"):
            self.make("static").assign([0, 1, 2, 0, 1, 2])

    def test_fake_rows_are_distinct_even_and_the_same_on_every_rank(self) -> None:
        ids = fake_choice(4096, 4, 64, torch.device("cpu"))
        assert ids.dtype == torch.int32
        assert all(len(set(row)) == 4 for row in ids.tolist())
        counts = torch.bincount(ids.flatten(), minlength=64)
        assert counts.min() > 180
        assert counts.max() < 340
        assert torch.equal(fake_choice(100, 4, 64, torch.device("cpu")), ids[:100])

    def test_fake_rows_of_data_parallel_ranks_are_spread_too(self) -> None:
        """A row on each rank, as when each decodes one request."""
        ids = torch.cat([fake_choice(1, 4, 64, torch.device("cpu"), rank) for rank in range(512)])
        counts = torch.bincount(ids.flatten(), minlength=64)
        assert counts.min() > 12
        assert counts.max() < 64


@pytest.mark.parametrize(
    ("layout", "backend", "choice"),
    [
        *((layout, "none", "dynamic") for layout in ((2, 2, 2), (4, 2, 4), (4, 1, 2), (4, 4, 4))),
        *(
            (layout, backend, choice)
            for layout in ((2, 2, 2), (4, 2, 4), (4, 4, 4))
            for backend in ("deepep", "megamoe")
            for choice in ("static", "dynamic")
        ),
    ],
)
def test_redundant_experts_change_nothing(layout: tuple[int, int, int], backend: str, choice: str) -> None:
    options = MoEOptions(backend, dispatch_algorithm=choice, num_redundant_experts=4)
    counts = [9] if layout[1] == 1 else [5, 0, 7, 1][: layout[1]]

    def work(groups: ParallelGroups) -> tuple[torch.Tensor, torch.Tensor]:
        experts = make_experts(groups)
        assert experts.num_physical == NUM_EXPERTS + 4
        return run_step(groups, experts, counts, kind="skewed")

    for out, wanted in run_layout(ParallelLayout(*layout), work, options):
        assert out.numel() == 0 or (out - wanted).abs().max() < 1e-5


def test_redundant_experts_have_to_divide() -> None:
    groups = ParallelGroups(moe=MoEOptions(num_redundant_experts=1))
    with pytest.raises(ValueError, match="the number of experts with --ep-num-redundant-experts 1 is 9"):
        run_layout(ParallelLayout(2), make_experts, groups.moe)


@pytest.mark.parametrize("redundant", [0, 4])
def test_moved_experts_are_the_same_bits(redundant: int) -> None:
    old = [place % NUM_EXPERTS for place in range(NUM_EXPERTS + redundant)]
    new = old[3:] + old[:3]

    def work(groups: ParallelGroups) -> int:
        experts = make_experts(groups)
        count = move_experts(experts, old, new, groups.experts)
        for local in range(experts.num_local):
            expert = new[experts.first + local]
            w13, w2 = experts.storage(local)
            assert torch.equal(w13, torch.cat([expert_weight(expert, name) for name in ("gate_proj", "up_proj")]))
            assert torch.equal(w2, expert_weight(expert, "down_proj"))
        return count

    results = run_layout(ParallelLayout(4, 4), work, MoEOptions(num_redundant_experts=redundant))
    assert results == [sum(a != b for a, b in zip(old, new, strict=True))] * 4


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("layout", [(2, 2, 2), (4, 2, 4), (4, 4, 4)])
def test_outputs_do_not_change_when_experts_move(layout: tuple[int, int, int], backend: str) -> None:
    """Every third pass moves experts; ranks have uneven and no rows; each pass gives what one rank gives."""
    options = MoEOptions(backend, num_redundant_experts=4, enable_eplb=True, eplb_rebalance_num_iterations=3)
    steps = [[5, 0], [9, 1], [0, 0], [2, 2], [0, 7], [1, 0], [3, 3], [4, 0]]

    def work(groups: ParallelGroups) -> tuple[list[list[int]], float]:
        experts = make_experts(groups)
        layer = torch.nn.Sequential(experts)
        rebalancer = Rebalancer.of(layer, groups)
        assert rebalancer is not None and experts.placement is not None
        plans, worst = [], 0.0
        for seed, counts in enumerate(steps):
            counts = (counts * 2)[: groups.data.size]
            out, wanted = run_step(groups, experts, counts, kind="skewed", seed=seed, extends=seed % 2 == 0)
            worst = max(worst, float((out - wanted).abs().max()) if out.numel() else 0.0)
            assert rebalancer.after_pass() == (seed in (2, 5))
            plans.append(list(experts.placement.physical_to_logical))
        return plans, worst

    results = run_layout(ParallelLayout(*layout), work, options)
    plans = results[0][0]
    assert plans[0] == plans[1] != plans[2]
    for other, worst in results:
        assert other == plans
        assert worst < 1e-5
    # Nearly all rows went to the last experts, so these have the copies.
    assert all(plans[2].count(expert) > 1 for expert in range(NUM_EXPERTS - TOP_K, NUM_EXPERTS))


def test_no_rebalancer_without_the_flag() -> None:
    assert Rebalancer.of(make_experts(ParallelGroups()), ParallelGroups()) is None


@pytest.mark.parametrize("backend", ["none", "deepep"])
def test_placement_is_dropped_where_there_is_nothing_to_choose(backend: str) -> None:
    options = MoEOptions(backend)
    experts = make_experts(ParallelGroups(moe=options))
    assert experts.placement is None
    x, routing = make_rows(4), make_routing(4)
    out = make_backend(ParallelGroups(moe=options)).forward(x, routing, experts, StepRows((4,)))
    assert (out - reference(x, routing)).abs().max() < 1e-5
