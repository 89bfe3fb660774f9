"""Every backend on every layout gives what one rank gives: uneven, idle and padded ranks, crowded experts, NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layers.forward_batch import StepRows
from layers.moe import MoE, Routing, SoftmaxRouter, make_backend
from layers.moe.deepep import DeepEPBackend
from layers.moe.megamoe import MegaMoEBackend
from layers.moe.placement import fake_choice
from layers.moe_options import MoEOptions
from layers.parallel import ParallelGroup, ParallelGroups
from layers.parallel_layout import ParallelLayout
from tests.layers.moe_support import HIDDEN, TOP_K, batch_of, make_experts, make_routing, make_rows, reference, run_step
from tests.models.thread_group import run_layout

pytestmark = pytest.mark.timeout(180)
TOLERANCE = 1e-5

# (tp, dp, ep) -> rows of the data-parallel ranks in one step after another.
STEPS: dict[tuple[int, int, int], list[list[int]]] = {
    (1, 1, 1): [[9], [0], [1]],
    (2, 1, 2): [[9], [0], [1], [2]],
    (2, 2, 2): [[5, 7], [0, 3], [1, 0], [0, 0]],
    (4, 1, 4): [[9], [2], [0], [5]],
    (4, 2, 4): [[5, 2], [0, 9], [0, 0], [1, 1]],
    (4, 4, 4): [[0, 5, 0, 7], [0, 0, 0, 1], [0, 0, 0, 0], [3, 3, 3, 3], [100, 1, 2, 0], [3, 1, 0, 2]],
}
# Layouts with experts split by columns, which only backend `none` has.
COLUMN_STEPS: dict[tuple[int, int, int], list[list[int]]] = {
    (2, 1, 1): [[9], [0]],
    (4, 1, 2): [[9], [1], [0]],
    (4, 2, 2): [[5, 2], [0, 3], [0, 0]],
    (4, 4, 1): [[0, 5, 0, 7], [3, 3, 3, 3]],
}
ALL_STEPS = {**STEPS, **COLUMN_STEPS}


def check(layout: tuple[int, int, int], options: MoEOptions, **step: object) -> None:
    """All steps of the layout on one set of experts; each rank's rows against the reference."""

    def work(groups: ParallelGroups) -> list[tuple[torch.Tensor, torch.Tensor]]:
        experts = make_experts(groups)
        return [
            run_step(groups, experts, counts, seed=seed, **step)  # type: ignore[arg-type]
            for seed, counts in enumerate(ALL_STEPS[layout])
        ]

    for results in run_layout(ParallelLayout(*layout), work, options):
        for out, wanted in results:
            assert out.dtype == torch.float32
            assert out.numel() == 0 or (out - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["random", "one", "skewed"])
@pytest.mark.parametrize("layout", ALL_STEPS)
def test_none(layout: tuple[int, int, int], kind: str) -> None:
    check(layout, MoEOptions(), kind=kind)


@pytest.mark.parametrize("kind", ["random", "one", "skewed"])
@pytest.mark.parametrize("layout", STEPS)
@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
def test_deepep(layout: tuple[int, int, int], mode: str, kind: str) -> None:
    check(layout, MoEOptions("deepep", deepep_mode=mode), kind=kind, extends=mode != "auto")


@pytest.mark.parametrize("kind", ["random", "one", "skewed"])
@pytest.mark.parametrize("layout", STEPS)
@pytest.mark.parametrize("extends", [False, True])
def test_megamoe(layout: tuple[int, int, int], extends: bool, kind: str) -> None:
    check(layout, MoEOptions("megamoe"), kind=kind, extends=extends)


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2), (4, 2, 4), (4, 4, 4)])
@pytest.mark.parametrize("extends", [False, True])
def test_padding_rows_reach_no_expert(layout: tuple[int, int, int], backend: str, extends: bool) -> None:
    """They hold NaN, the ids of a real expert and huge weights."""
    padded = max(max(counts) for counts in STEPS[layout]) + 3
    check(layout, MoEOptions(backend), padded=padded, extends=extends)


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("extends", [False, True])
def test_a_short_step_after_a_long_one(backend: str, extends: bool) -> None:
    """After 100 rows a step of 3 sends exactly 3, whatever the buffers still hold."""

    def work(groups: ParallelGroups) -> list[tuple[torch.Tensor, torch.Tensor]]:
        experts = make_experts(groups)
        return [run_step(groups, experts, [count, 1], padded=100, extends=extends) for count in (100, 3, 0)]

    for results in run_layout(ParallelLayout(2, 2), work, MoEOptions(backend)):
        for out, wanted in results:
            assert out.numel() == 0 or (out - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("layout", [(2, 2, 2), (4, 2, 4)])
@pytest.mark.parametrize("extends", [False, True])
def test_not_a_number_stays_in_its_row(layout: tuple[int, int, int], backend: str, extends: bool) -> None:
    def work(groups: ParallelGroups) -> tuple[int, torch.Tensor]:
        out, _ = run_step(groups, make_experts(groups), [4, 3], kind="one", extends=extends, nan_rank=1)
        return groups.data.rank, out

    for rank, out in run_layout(ParallelLayout(*layout), work, MoEOptions(backend)):
        assert out[0].isnan().all() == (rank == 1)
        assert not out[1:].isnan().any()


@pytest.mark.parametrize("backend", ["deepep", "megamoe"])
def test_ranks_of_an_attention_group_get_all_rows_in_order(backend: str) -> None:
    """Five rows over four ranks are 2, 1, 1, 1; two are 1, 1, 0, 0: the same rows come out on all, in order."""

    def work(groups: ParallelGroups) -> list[torch.Tensor]:
        experts = make_experts(groups)
        return [run_step(groups, experts, [count])[0] for count in (5, 2)]

    results = run_layout(ParallelLayout(4), work, MoEOptions(backend))
    for out in results[1:]:
        assert all(torch.equal(own, first) for own, first in zip(out, results[0], strict=True))
    for count, out in zip((5, 2), results[0], strict=True):
        assert (out - reference(make_rows(count), make_routing(count))).abs().max() < TOLERANCE


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("extends", [False, True])
def test_an_id_of_minus_one_counts_for_nothing(backend: str, extends: bool) -> None:
    routing = make_routing(6)
    routing.topk_ids[2, 1] = -1
    routing.topk_ids[4] = -1
    x = make_rows(6)

    def work(groups: ParallelGroups) -> torch.Tensor:
        rows = StepRows((6, 6), extends=extends)
        return make_backend(groups).forward(x, routing, make_experts(groups), rows)

    for out in run_layout(ParallelLayout(2, 2), work, MoEOptions(backend)):
        assert (out - reference(x, routing)).abs().max() < TOLERANCE
        assert out[4].abs().max() == 0


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
@pytest.mark.parametrize("extends", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(torch.int64, torch.float64), (torch.int32, torch.bfloat16), (torch.int16, torch.float32)]
)
def test_any_width_of_ids_and_weights(backend: str, extends: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    routing = make_routing(6, scale=2.5)
    routing = Routing(routing.topk_ids.to(dtypes[0]), routing.topk_weights.to(dtypes[1]))
    x = make_rows(6)

    def work(groups: ParallelGroups) -> torch.Tensor:
        rows = StepRows((6, 6), extends=extends)
        return make_backend(groups).forward(x, routing, make_experts(groups), rows)

    for out in run_layout(ParallelLayout(2, 2), work, MoEOptions(backend)):
        assert (out - reference(x, routing)).abs().max() < 3 * TOLERANCE


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("layout", [(2, 2, 2), (4, 4, 4)])
def test_bfloat16_is_within_a_rounding_on_any_number_of_ranks(layout: tuple[int, int, int], mode: str) -> None:
    """Outputs travel unsummed: a token's sum is formed in one order wherever its experts are. What is left is how the
    library rounds the products of one row and of several."""
    x, routing = make_rows(12).bfloat16(), make_routing(12)

    def work(groups: ParallelGroups) -> torch.Tensor:
        counts = [12 // groups.data.size] * groups.data.size
        own = slice(counts[0] * groups.data.rank, counts[0] * (groups.data.rank + 1))
        # One row of each rank at a time, so that few rows share a product.
        outs = []
        for at in range(counts[0]):
            row = slice(own.start + at, own.start + at + 1)
            part = Routing(routing.topk_ids[row], routing.topk_weights[row])
            rows = StepRows((1,) * groups.data.size)
            outs.append(make_backend(groups).forward(x[row], part, make_experts(groups, torch.bfloat16), rows))
        return torch.cat(outs)

    one = run_layout(ParallelLayout(1), work, MoEOptions("deepep", deepep_mode=mode))[0]
    spread = torch.cat(run_layout(ParallelLayout(*layout), work, MoEOptions("deepep", deepep_mode=mode)))
    assert one.dtype == torch.bfloat16
    assert (one.float() - spread.float()).abs().max() <= 2**-7 * one.float().abs().max()


class TestChoiceOfPath:
    """Only what all ranks know decides."""

    @pytest.mark.parametrize(
        ("mode", "most", "extends", "expected"),
        [
            ("auto", 16, False, True),
            ("auto", 16, True, False),
            ("auto", 17, False, False),
            ("normal", 1, False, False),
            ("low_latency", 16, True, True),
        ],
    )
    def test_deepep_layout(self, mode: str, most: int, extends: bool, expected: bool) -> None:
        options = MoEOptions("deepep", deepep_mode=mode, deepep_max_tokens_per_rank=16)
        assert DeepEPBackend(ParallelGroups(moe=options)).low_latency(most, extends) is expected

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                MoEOptions("deepep", deepep_mode="low_latency", deepep_max_tokens_per_rank=4),
                r"5 rows a rank are more than --deepep-max-tokens-per-rank 4",
            ),
            (
                MoEOptions("megamoe", mega_moe_max_tokens_per_rank=4),
                r"5 rows a rank are more than --mega-moe-max-tokens-per-rank 4",
            ),
        ],
    )
    @pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)])
    def test_rows_over_the_cap_are_refused_on_every_rank_before_anything_is_sent(
        self, layout: tuple[int, int, int], options: MoEOptions, message: str
    ) -> None:
        counts = [5] if layout[1] == 1 else [1, 5]

        def work(groups: ParallelGroups) -> str:
            experts = make_experts(groups)
            with pytest.raises(ValueError, match=message) as error:
                run_step(groups, experts, counts)
            # The ranks are still in step.
            out, wanted = run_step(groups, experts, [count - 1 for count in counts])
            assert out.numel() == 0 or (out - wanted).abs().max() < TOLERANCE
            return str(error.value)

        messages = run_layout(ParallelLayout(*layout), work, options)
        assert len(set(messages)) == 1

    def test_shares_of_an_attention_group_count(self) -> None:
        groups = ParallelGroups(
            attention=ParallelGroup(0, 4), moe=MoEOptions("megamoe", mega_moe_max_tokens_per_rank=4)
        )
        experts = make_experts(groups)
        MegaMoEBackend(groups).reserve(16, experts, TOP_K)
        with pytest.raises(ValueError, match="5 rows a rank"):
            MegaMoEBackend(groups).reserve(17, experts, TOP_K)

    def test_without_the_flag_the_cap_is_what_the_scheduler_can_make(self) -> None:
        backend = MegaMoEBackend(ParallelGroups(ParallelGroup(0, 4), moe=MoEOptions("megamoe")))
        backend.reserve(18, make_experts(ParallelGroups()), TOP_K)
        assert backend.cap == 5

    @pytest.mark.parametrize("name", ["deepep", "megamoe"])
    def test_experts_on_some_of_the_ranks_are_refused(self, name: str) -> None:
        groups = ParallelGroups(ParallelGroup(0, 4), experts=ParallelGroup(0, 2), moe=MoEOptions(name))
        with pytest.raises(ValueError, match=f"--moe-a2a-backend {name} needs whole experts"):
            make_backend(groups)


class TestOptions:
    def test_none_is_the_default(self) -> None:
        assert MoEOptions().backend_name == MoEOptions(a2a_backend=None).backend_name == "none"
        assert MoEOptions().replica_choice == "dynamic"
        assert MoEOptions("deepep").replica_choice == "static"

    def test_layout_with_split_experts_is_refused(self) -> None:
        MoEOptions("none").check_layout(ParallelLayout(4, ep_size=2))
        MoEOptions("deepep").check_layout(ParallelLayout(4, 2))
        with pytest.raises(ValueError, match="leave --ep-size 2 out, or set it to --tp-size 4"):
            MoEOptions("deepep").check_layout(ParallelLayout(4, ep_size=2))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"a2a_backend": "pplx"}, "--moe-a2a-backend pplx is not one of none, deepep, megamoe"),
            ({"deepep_mode": "fast"}, "--deepep-mode fast is not one of auto, normal, low_latency"),
            ({"dispatch_algorithm": "lp"}, "--ep-dispatch-algorithm lp is not one of static, dynamic, fake"),
            ({"dispatch_algorithm": "static"}, "static does not go with --moe-a2a-backend none"),
            ({"mega_moe_max_tokens_per_rank": 0}, "--mega-moe-max-tokens-per-rank 0 must be at least 1"),
            ({"num_redundant_experts": -1}, "--ep-num-redundant-experts -1 must be at least 0"),
        ],
    )
    def test_refusals(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MoEOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["none", "deepep", "megamoe"])
def test_gate_is_limited_from_above_only_and_before_silu(backend: str) -> None:
    """A gate of -50 stays -50, one of 50 becomes the limit; up is limited on both sides."""
    experts = make_experts(ParallelGroups(moe=MoEOptions(backend)), limit=0.5)
    x, routing = 3 * make_rows(8), make_routing(8)
    out = make_backend(ParallelGroups(moe=MoEOptions(backend))).forward(x, routing, experts, StepRows((8,)))
    wanted = reference(x, routing, limit=0.5)
    assert (wanted - reference(x, routing)).abs().max() > 0.1
    assert (out - wanted).abs().max() < TOLERANCE


def test_megamoe_weights_the_intermediate_before_it_is_rounded() -> None:
    """In bfloat16 the order shows: weight, round, project, round, add."""
    groups = ParallelGroups(moe=MoEOptions("megamoe"))
    experts = make_experts(groups, torch.bfloat16)
    x, routing = make_rows(1).bfloat16(), make_routing(1)
    out = make_backend(groups).forward(x, routing, experts, StepRows((1,)))
    total = torch.zeros(1, HIDDEN)
    for k in range(TOP_K):
        expert, weight = int(routing.topk_ids[0, k]), routing.topk_weights[0, k]
        gate, up = (x @ experts.w13_E2IH[expert].T).float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up * weight).bfloat16()
        total += (hidden @ experts.w2_EHI[expert].T).float()
    assert torch.equal(out, total.bfloat16())


@pytest.mark.parametrize("options", [MoEOptions("deepep"), MoEOptions("deepep", num_redundant_experts=4)], ids=str)
def test_thousands_of_rows_for_a_few_experts(options: MoEOptions) -> None:
    """Nineteen of twenty rows go to one rank, again and again: nothing is lost, whatever the counts."""
    count = 1500

    def work(groups: ParallelGroups) -> list[torch.Tensor]:
        experts = make_experts(groups)
        alone = make_experts(ParallelGroups())
        differences = []
        for seed in range(3):
            x, routing = make_rows(count, seed), make_routing(count, "skewed", seed)
            rows = StepRows((count,) * 4)
            out = make_backend(groups).forward(x, routing, experts, rows)
            wanted = make_backend(ParallelGroups()).forward(x, routing, alone, StepRows((count,)))
            differences.append((out - wanted).abs().max())
        return differences

    for differences in run_layout(ParallelLayout(4, 4), work, options):
        assert max(differences) < TOLERANCE


def test_fake_choice_ignores_the_router() -> None:
    """Rows spread evenly, the same on every rank of a group, and the weights stay those of the router."""
    gate = SoftmaxRouter(HIDDEN, 8, TOP_K, renormalize=True)
    gate.weight.data.zero_()
    gate.weight.data[:TOP_K] = 1.0  # alone, all rows would go to the first experts
    x = make_rows(64).abs()

    def work(groups: ParallelGroups) -> torch.Tensor:
        batch = replace(batch_of(64), rows=StepRows((64,) * groups.data.size))
        return MoE(gate, make_experts(groups), groups)(x, batch)

    for backend in ("none", "deepep"):
        options = MoEOptions(backend, dispatch_algorithm="fake")
        for rank, out in enumerate(run_layout(ParallelLayout(4, 2), work, options)):
            ids = fake_choice(64, TOP_K, 8, x.device, rank // 2)
            assert (out - reference(x, Routing(ids, gate(x).topk_weights))).abs().max() < TOLERANCE
