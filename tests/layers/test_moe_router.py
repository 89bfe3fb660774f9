"""Routers: values worked out by hand, the contract of their outputs, and refusals."""

from __future__ import annotations

import pytest
import torch

from layers.moe import GroupedSigmoidRouter, SoftmaxRouter
from layers.moe.router import Routing, grouped_sigmoid_topk, softmax_topk


def by_expert(routing: Routing, row: int = 0) -> dict[int, float]:
    """Expert -> weight of one token, rounded."""
    ids, weights = routing.topk_ids[row].tolist(), routing.topk_weights[row].tolist()
    return {expert: round(weight, 5) for expert, weight in zip(ids, weights, strict=True)}


def logit(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).logit().float()


class TestSoftmax:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.05, 0.6, 0.1]]).log()

    def test_weights_are_probabilities_over_all_experts(self) -> None:
        routing = softmax_topk(self.logits, 2, renormalize=False)
        assert by_expert(routing, 0) == {1: 0.4, 3: 0.3}
        assert by_expert(routing, 1) == {2: 0.6, 0: 0.25}

    def test_renormalised_weights_add_up_to_one(self) -> None:
        routing = softmax_topk(self.logits, 2, renormalize=True)
        assert by_expert(routing, 0) == {1: round(4 / 7, 5), 3: round(3 / 7, 5)}
        assert by_expert(routing, 1) == {2: round(60 / 85, 5), 0: round(25 / 85, 5)}

    def test_bfloat16_logits_give_float32_weights(self) -> None:
        routing = softmax_topk(self.logits.bfloat16(), 3, renormalize=True)
        assert routing.topk_weights.dtype == torch.float32
        assert (routing.topk_weights.sum(dim=-1) - 1).abs().max() < 1e-6


class TestGroupedSigmoid:
    # Groups of two: sums 1.0, 1.1, 1.09, 0.3. The best single expert is in the third best group.
    scores = logit([0.9, 0.1, 0.6, 0.5, 0.55, 0.54, 0.2, 0.1])
    no_bias = torch.zeros(8)

    def route(self, bias: torch.Tensor, groups: int = 2, renormalize: bool = True, factor: float = 1.0) -> Routing:
        return grouped_sigmoid_topk(self.scores, bias, 2, 4, groups, renormalize, factor)

    def test_only_the_best_groups_can_be_chosen(self) -> None:
        assert by_expert(self.route(self.no_bias)) == {2: round(0.6 / 1.15, 5), 4: round(0.55 / 1.15, 5)}

    def test_all_groups_permitted(self) -> None:
        assert by_expert(self.route(self.no_bias, groups=4)) == {0: 0.6, 2: 0.4}

    def test_bias_changes_the_choice_but_not_the_weights(self) -> None:
        bias = self.no_bias.clone()
        bias[5] = 0.1
        assert by_expert(self.route(bias)) == {5: round(0.54 / 1.14, 5), 2: round(0.6 / 1.14, 5)}

    def test_negative_choice_scores_stay_inside_the_groups(self) -> None:
        assert set(by_expert(self.route(self.no_bias - 2.0))) == {2, 4}

    def test_scaling_factor_is_applied_once(self) -> None:
        scaled = self.route(self.no_bias, factor=2.5)
        assert by_expert(scaled) == {2: round(2.5 * 0.6 / 1.15, 5), 4: round(2.5 * 0.55 / 1.15, 5)}
        assert abs(scaled.topk_weights.sum().item() - 2.5) < 1e-6

    def test_without_renormalisation(self) -> None:
        assert by_expert(self.route(self.no_bias, renormalize=False, factor=2.0)) == {2: 1.2, 4: 1.1}

    def test_groups_of_one_expert(self) -> None:
        routing = grouped_sigmoid_topk(logit([0.3, 0.9, 0.5]), torch.zeros(3), 2, 3, 2, False, 1.0)
        assert by_expert(routing) == {1: 0.9, 2: 0.5}

    def test_scores_that_underflow_give_no_nan(self) -> None:
        routing = grouped_sigmoid_topk(torch.full((1, 8), -200.0), self.no_bias, 2, 4, 2, True, 1.0)
        assert routing.topk_weights.tolist() == [[0.0, 0.0]]


def routers() -> list[SoftmaxRouter | GroupedSigmoidRouter]:
    built: list[SoftmaxRouter | GroupedSigmoidRouter] = [
        SoftmaxRouter(16, 8, 3, True),
        GroupedSigmoidRouter(16, 8, 3, 4, 2, True, 2.5),
    ]
    generator = torch.Generator().manual_seed(0)
    for router in built:
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return built


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("router", routers(), ids=["softmax", "grouped"])
def test_contract(router: SoftmaxRouter | GroupedSigmoidRouter, rows: int) -> None:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    ids, weights = router(x)
    assert (ids.shape, weights.shape) == ((rows, 3), (rows, 3))
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in ids.tolist())


@pytest.mark.parametrize("router", routers(), ids=["softmax", "grouped"])
def test_nan_rows_keep_valid_ids_and_spoil_no_others(router: SoftmaxRouter | GroupedSigmoidRouter) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    clean = router(x)
    x[1] = torch.nan
    ids, weights = router(x)
    assert ids.min() >= 0
    assert ids.max() < 8
    assert weights[1].isnan().all()
    assert torch.equal(ids[[0, 2, 3]], clean.topk_ids[[0, 2, 3]])
    assert torch.equal(weights[[0, 2, 3]], clean.topk_weights[[0, 2, 3]])


def test_grouped_router_computes_in_float32() -> None:
    router = routers()[1]
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert router.weight.dtype == torch.float32
    assert torch.equal(router(x).topk_weights, router(x.float()).topk_weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, 8, 9, 4, 2), "num_experts_per_tok is 9"),
        ((16, 8, 2, 3, 2), "n_group is 3"),
        ((16, 8, 2, 4, 5), "topk_group is 5"),
        ((16, 8, 3, 4, 1), "topk_group = 1 groups of 2 experts hold fewer than num_experts_per_tok = 3"),
    ],
)
def test_impossible_choices_are_refused(arguments: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedSigmoidRouter(*arguments, True, 1.0)


def test_too_many_experts_of_a_token() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 5; expected 1 to the number of experts, 4"):
        SoftmaxRouter(16, 4, 5, True)


def test_logits_that_are_not_numbers_choose_distinct_experts_in_range() -> None:
    """A broken row must not reach an expert twice, or one that does not exist."""
    logits = torch.zeros(3, 8)
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    for routing in (
        softmax_topk(logits, 3, renormalize=True),
        grouped_sigmoid_topk(logits, torch.zeros(8), 3, 4, 2, True, 1.0),
    ):
        for row in routing.topk_ids.tolist():
            assert len(set(row)) == 3
            assert all(0 <= expert < 8 for expert in row)
        assert routing.topk_weights[0].isfinite().all()
