"""Which experts a token goes to, and with what weights.

Every router returns the same contract, whatever follows it: ids int32, weights float32.

Shape letters: T token rows, H hidden size, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from layers.linear import Linear
from layers.weights import StoredAs, WeightPart, block_sibling, empty_parameter, whole


class Routing(NamedTuple):
    """topk_ids [T, K] int32 in [0, E), distinct in a row. topk_weights [T, K] float32: factors of the outputs."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def at_least_one_row(x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Routing]:
    """Rows and routing as they are, or one row without an expert where there are none.

    For libraries that take no null pointers, on ranks that have to call them all the same.
    """
    if x_TH.shape[0]:
        return x_TH, routing
    ids_TK, weights_TK = routing
    none = Routing(ids_TK.new_full((1, ids_TK.shape[1]), -1), weights_TK.new_zeros(1, ids_TK.shape[1]))
    return x_TH.new_zeros(1, x_TH.shape[1]), none


def softmax_topk(logits_TE: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """The K most probable experts, weighted by their softmax probability over all experts.

    renormalize: divide the weights by their sum, so that they add up to 1 (Mixtral; Qwen3-MoE's norm_topk_prob).
    """
    if logits_TE.is_cuda:
        from layers.kernels import triton_moe

        return Routing(*triton_moe.softmax_topk(logits_TE, top_k, renormalize))
    weights_TK, ids_TK = logits_TE.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(ids_TK.int(), weights_TK)


def grouped_sigmoid_topk(
    logits_TE: torch.Tensor,
    correction_bias_E: torch.Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling_factor: float,
) -> Routing:
    """DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2): sigmoid scores, group-limited choice, bias for balance.

    correction_bias_E is added for the choice only; weights are the scores without it. A group's score is the sum of its
    two best experts; experts of all but the `top_groups` best groups cannot be chosen. `scaling_factor` multiplies the
    (renormalized) weights: nothing after the router may apply it again.
    """
    scores_TE = logits_TE.float().sigmoid()
    choice_TE = scores_TE + correction_bias_E
    if top_groups < num_groups:
        choice_TGE = choice_TE.unflatten(-1, (num_groups, -1))
        group_scores_TG = choice_TGE.topk(min(2, choice_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, group_scores_TG.topk(top_groups, dim=-1).indices, False)
        # Minus infinity, not 0: a correction bias can make the score of a permitted expert negative.
        choice_TE = choice_TGE.masked_fill(dropped_TG[..., None], -torch.inf).flatten(1)
    ids_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        # All scores of a row can underflow to 0.
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(ids_TK.int(), weights_TK * scaling_factor)


class SoftmaxRouter(Linear):
    """softmax_topk of x @ weight.T; weight [E, H] in the model's dtype.

    block: the checkpoint's name of the MoE layer; this module's own path is looked at too.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, renormalize: bool, block: str = "mlp") -> None:
        super().__init__(hidden_size, num_experts)
        _check_top_k(top_k, num_experts)
        self.top_k = top_k
        self.renormalize = renormalize
        self.block = block

    def forward(self, x_TH: torch.Tensor) -> Routing:
        return softmax_topk(super().forward(x_TH), self.top_k, self.renormalize)

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        part = whole(self.weight, f"{block_sibling(path, self.block)}.weight")
        yield replace(part, alternatives=(StoredAs(f"{path}.weight", part.shape, part.source),))


class GroupedSigmoidRouter(nn.Module):
    """grouped_sigmoid_topk of x @ weight.T in float32; weight [E, H] and e_score_correction_bias [E] are float32."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        num_groups: int,
        top_groups: int,
        renormalize: bool,
        scaling_factor: float,
    ) -> None:
        super().__init__()
        _check_top_k(top_k, num_experts)
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(f"n_group is {num_groups}, which does not divide the {num_experts} experts evenly")
        if not 1 <= top_groups <= num_groups:
            raise ValueError(f"topk_group is {top_groups}; expected 1 to n_group = {num_groups}")
        if top_groups * (num_experts // num_groups) < top_k:
            raise ValueError(
                f"topk_group = {top_groups} groups of {num_experts // num_groups} experts hold fewer than "
                f"num_experts_per_tok = {top_k}"
            )
        self.top_k = top_k
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.weight = empty_parameter(num_experts, hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = empty_parameter(num_experts, dtype=torch.float32)

    def forward(self, x_TH: torch.Tensor) -> Routing:
        return grouped_sigmoid_topk(
            F.linear(x_TH.float(), self.weight),
            self.e_score_correction_bias,
            self.top_k,
            self.num_groups,
            self.top_groups,
            self.renormalize,
            self.scaling_factor,
        )


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"num_experts_per_tok is {top_k}; expected 1 to the number of experts, {num_experts}")
