"""Sampling against the definitions of its filters, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from layers.sampling import RowSampling, sample, token_logprobs, uniform


def row(
    temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0, u: float = 0.5
) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, min_p, u)


def make_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept_mass(logits: torch.Tensor, r: RowSampling) -> dict[int, float]:
    """The candidates and their probabilities by the definitions, one token at a time."""
    probs = (logits.double() / r.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: -float(probs[i]))
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        p = float(probs[token])
        if (r.top_k > 0 and rank >= r.top_k) or (rank and before >= r.top_p) or p < r.min_p * float(probs[order[0]]):
            break
        kept[token] = p
        before += p
    total = sum(kept.values())
    return {token: p / total for token, p in kept.items()}


def test_uniform_is_in_range_repeats_and_spreads() -> None:
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == 2000
    assert abs(sum(values) / 2000 - 0.5) < 0.02
    assert uniform(2**63 - 1, 7) == uniform(2**63 - 1, 7)
    histogram = torch.tensor(values).histc(10, 0, 1)
    assert float(((histogram - 200) ** 2 / 200).sum()) < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


def test_greedy_rows_take_the_maximum() -> None:
    logits = make_logits(4, 100)
    rows = [row(0.0), row(1e-6), row(1.0, top_k=1, u=0.99), row(0.7, u=0.0)]
    tokens, valid = sample(logits, rows)
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert valid.all()


@pytest.mark.parametrize(
    "r",
    [
        row(0.7, top_k=5),
        row(1.3, top_p=0.6),
        row(1.0, min_p=0.2),
        row(0.9, top_k=20, top_p=0.8, min_p=0.05),
        row(1.0, top_p=1e-9),
        row(),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [30, 3000])
def test_sampled_tokens_follow_the_filtered_distribution(r: RowSampling, vocab: int) -> None:
    logits = make_logits(1, vocab, seed=3)
    expected = kept_mass(logits[0], r)
    draws = 4000
    rows = [RowSampling(r.temperature, r.top_k, r.top_p, r.min_p, (i + 0.5) / draws) for i in range(draws)]
    tokens, _ = sample(logits.expand(draws, -1), rows)
    counts = tokens.bincount(minlength=vocab)
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    for token, p in expected.items():  # evenly spaced numbers hit each interval within one of its length
        assert abs(int(counts[token]) - p * draws) <= 1.01


def test_nucleus_wider_than_the_candidates_is_sorted_whole() -> None:
    logits = torch.zeros(1, 5000)
    tokens, _ = sample(logits.expand(50, -1), [row(top_p=0.9, u=(i + 0.5) / 50) for i in range(50)])
    assert len(set(tokens.tolist())) == 50
    assert int(tokens.max()) > 2000


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = make_logits(16, 2000, seed=5)
    rows = [row(0.8, top_k=[-1, 7][i % 2], top_p=[1.0, 0.5][i // 2 % 2], u=uniform(42, i)) for i in range(16)]
    rows[3] = row(0.0)
    together, _ = sample(logits, rows)
    alone = [int(sample(logits[i : i + 1], [rows[i]])[0]) for i in range(16)]
    assert together.tolist() == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("r", [row(0.0), row(), row(top_p=0.5)], ids=["greedy", "plain", "filtered"])
def test_bad_logits_are_flagged_for_their_row_only(bad: float, r: RowSampling) -> None:
    logits = make_logits(3, 50)
    logits[1, 17] = bad
    tokens, valid = sample(logits, [r] * 3)
    assert valid.tolist() == [True, False, True]
    assert (tokens >= 0).all()
    assert (tokens < 50).all()


def test_masked_tokens_are_never_sampled() -> None:
    logits = make_logits(1, 40)
    logits[0, 10:] = -math.inf
    tokens, valid = sample(logits.expand(200, -1), [row(5.0, u=i / 200) for i in range(200)])
    assert valid.all()
    assert int(tokens.max()) < 10


def test_uniform_next_to_one_takes_the_last_candidate_with_mass() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    tokens, _ = sample(logits, [row(u=1.0)])
    assert tokens.tolist() == [1]


def test_token_logprobs_are_of_the_unscaled_distribution() -> None:
    logits = make_logits(2, 30)
    chosen, values, ids = token_logprobs(logits, torch.tensor([3, 29]), 4)
    reference = logits.double().log_softmax(-1)
    assert torch.allclose(chosen.double(), reference[[0, 1], [3, 29]], atol=1e-6)
    expected = reference.topk(4, dim=-1)
    assert ids.tolist() == expected.indices.tolist()
    assert torch.allclose(values.double(), expected.values, atol=1e-6)
    assert token_logprobs(logits, torch.tensor([3, 29]), 0)[1].shape == (2, 0)
