"""The mixture-of-experts kernels against plain torch, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from layers.kernels import triton_moe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 3), (128, 8)])
def test_softmax_topk(experts: int, top_k: int, renormalize: bool) -> None:
    logits = normal(6, experts)
    ids, weights = triton_moe.softmax_topk(logits, top_k, renormalize)
    expected, expected_ids = logits.double().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_softmax_topk_prefers_lower_ids_of_equal_logits_and_survives_nan() -> None:
    logits = torch.zeros(2, 12, device=DEVICE)
    logits[0, 7] = 1.0
    logits[1, 3] = float("nan")
    ids, _ = triton_moe.softmax_topk(logits, 3, False)
    assert ids[0].tolist() == [7, 0, 1]
    assert all(0 <= expert < 12 for expert in ids[1].tolist())


@pytest.mark.parametrize("tokens", [1, 5, 300, 1100])
def test_sort_by_expert_is_the_stable_sort(tokens: int) -> None:
    experts, top_k = 6, 4
    generator = torch.Generator().manual_seed(tokens)
    # Expert 2 stays empty; 6 stands for experts elsewhere.
    choices = torch.tensor([0, 1, 3, 4, 5, 6])
    ids = choices[torch.randint(0, 6, (tokens, top_k), generator=generator)].int()
    token_of_row, places, ends = triton_moe.sort_by_expert(ids.to(DEVICE), experts)
    order = ids.flatten().sort(stable=True).indices
    assert token_of_row.tolist() == (order // top_k).tolist()
    assert places.flatten().tolist() == order.argsort().tolist()
    assert ends.tolist() == [int((ids <= expert).sum()) for expert in range(experts)]


@pytest.mark.parametrize("width", [48, 1500])
def test_weighted_sum(width: int) -> None:
    tokens, top_k = 5, 3
    y, weights = normal(tokens * top_k, width), normal(tokens, top_k, seed=1)
    places = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(2)).view(tokens, top_k).to(DEVICE)
    out = triton_moe.weighted_sum(y, places, weights, torch.float32)
    expected = (y.double()[places] * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert triton_moe.weighted_sum(y, places, weights, torch.float16).dtype == torch.float16
