"""The sampling kernels against the definition in float64, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from layers.kernels.triton_sampling import sample_unfiltered
from layers.sampling import GREEDY_TEMPERATURE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choose(logits: torch.Tensor, params: list[tuple[float, float]]) -> tuple[list[int], list[bool]]:
    params_B2 = torch.tensor(params, dtype=torch.float64, device=DEVICE)
    tokens, valid = sample_unfiltered(logits.to(DEVICE), params_B2, GREEDY_TEMPERATURE)
    assert (tokens.dtype, valid.dtype) == (torch.int64, torch.bool)
    return tokens.tolist(), valid.tolist()


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [7, 2048, 2049, 9000])
def test_low_temperatures_take_the_first_maximum(vocab: int) -> None:
    logits = normal(3, vocab)
    logits[1, [vocab // 3, vocab - 1]] = 50.0
    tokens, valid = choose(logits, [(0.0, 0.9), (0.0, 0.1), (GREEDY_TEMPERATURE / 2, 0.5)])
    assert tokens == [int(logits[0].argmax()), vocab // 3, int(logits[2].argmax())]
    assert valid == [True] * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("vocab", [7, 2048, 5000])
def test_a_number_in_the_middle_of_a_token_s_share_picks_that_token(vocab: int, temperature: float) -> None:
    logits = normal(1, vocab, seed=vocab)
    probs = (logits[0].double() / temperature).softmax(-1)
    middles = probs.cumsum(0) - probs / 2
    wanted = [0, vocab - 1, vocab // 2, *probs.topk(4).indices.tolist()]
    wanted = [token for token in wanted if probs[token] > 1e-5]
    tokens, valid = choose(logits.expand(len(wanted), -1), [(temperature, float(middles[token])) for token in wanted])
    assert tokens == wanted
    assert all(valid)


def test_the_ends_of_the_range_land_on_tokens_with_mass() -> None:
    logits = torch.full((2, 5000), float("-inf"))
    logits[:, [3000, 3001, 4100]] = torch.tensor([0.0, 1.0, 2.0])
    tokens, valid = choose(logits, [(1.0, 0.0), (1.0, 1 - 2**-53)])
    assert tokens == [3000, 4100]
    assert valid == [True, True]


def test_rows_without_a_finite_maximum_are_invalid_and_harm_no_other_row() -> None:
    logits = normal(5, 3000)
    logits[1, 2500] = float("nan")
    logits[2, 17] = float("inf")
    logits[3] = float("-inf")
    for temperature in (0.0, 1.0):
        tokens, valid = choose(logits, [(temperature, 0.5)] * 5)
        assert valid == [True, False, False, False, True]
        assert all(0 <= token < 3000 for token in tokens)
        alone, _ = choose(logits[[0, 4]], [(temperature, 0.5)] * 2)
        assert [tokens[0], tokens[4]] == alone


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = 100
    numbers = [(i + 0.5) / draws for i in range(draws)]
    tokens, _ = choose(logits.expand(draws, -1), [(0.8, number) for number in numbers])
    expected = (logits[0].double() / 0.8).softmax(-1) * draws
    counts = torch.tensor(tokens).bincount(minlength=4)
    assert (counts - expected).abs().max() <= 1.0
