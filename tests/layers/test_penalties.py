"""Penalties against their definitions, one token at a time, by the CPU's kernel, in torch and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from layers.kernels import cpu
from layers.penalties import RowPenalties, TokenCounts

VOCAB = 200  # of three whole blocks of the kernel and a part


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def make_ids(length: int, seed: int) -> list[int]:
    # Of a few ids, so that some come twice and some not at all, and all over the vocabulary.
    return torch.randint(0, VOCAB // 7, (length,), generator=torch.Generator().manual_seed(seed)).mul(7).tolist()


def expected(logits_V: torch.Tensor, prompt: list[int], output: list[int], p: RowPenalties) -> list[float]:
    """By the definitions, one token at a time."""
    found = []
    for token, given in enumerate(logits_V.tolist()):
        value = given
        if token in prompt or token in output:
            value = value / p.repetition if value > 0 else value * p.repetition
        found.append(value - p.frequency * output.count(token) - p.presence * (token in output))
    return found


def penalize(
    counts: TokenCounts, logits_BV: torch.Tensor, rows: Sequence[int], slots: list[int], penalties: list[RowPenalties]
) -> torch.Tensor:
    """The changed logits; those given stay."""
    device = counts.device
    changed_BV = logits_BV.to(device, copy=True)
    counts.penalize(changed_BV, torch.tensor(rows, device=device), torch.tensor(slots, device=device), penalties)
    return changed_BV.cpu()


def penalized(
    device: torch.device,
    logits_NV: torch.Tensor,
    texts: list[tuple[list[int], list[int]]],
    penalties: list[RowPenalties],
) -> torch.Tensor:
    counts = TokenCounts(len(texts), device)
    slots = [counts.take(VOCAB, prompt, output) for prompt, output in texts]
    return penalize(counts, logits_NV, range(len(texts)), slots, penalties)


@pytest.fixture(autouse=True, params=["kernel", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    if request.param == "torch":
        monkeypatch.setattr(cpu, "usable", lambda x: False)
    elif not cpu.usable(torch.empty(1)):
        pytest.skip("the CPU kernels cannot be compiled here")
    return torch.device("cpu")


@pytest.mark.parametrize(
    "penalties",
    [
        RowPenalties(),
        RowPenalties(frequency=0.7),
        RowPenalties(frequency=-2.0),
        RowPenalties(presence=1.3),
        RowPenalties(presence=-0.4),
        RowPenalties(repetition=1.3),
        RowPenalties(repetition=0.8),
        RowPenalties(0.25, -1.5, 1.1),
    ],
    ids=str,
)
def test_values_are_those_of_the_definitions(device: torch.device, penalties: RowPenalties) -> None:
    logits = make_logits(1)
    prompt, output = make_ids(11, 1), make_ids(20, 2)
    changed = penalized(device, logits, [(prompt, output)], [penalties])
    assert changed[0].tolist() == pytest.approx(expected(logits[0], prompt, output, penalties), abs=1e-5)
    assert torch.equal(changed, logits) == penalties.is_neutral


@pytest.mark.parametrize("repetition", [0.7, 1.0, 1.05, 2.0])
def test_repetition_penalty_is_that_of_transformers(device: torch.device, repetition: float) -> None:
    logits = make_logits(3)
    texts = [(make_ids(7, i), make_ids(13, 10 + i)) for i in range(3)]
    ids = torch.tensor([prompt + output for prompt, output in texts])
    reference = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits.clone())
    assert torch.equal(penalized(device, logits, texts, [RowPenalties(repetition=repetition)] * 3), reference)


def test_rows_beyond_a_block_and_rows_between_others(device: torch.device) -> None:
    """150 texts on every second row of the logits; the rest is left alone."""
    logits = make_logits(300)
    rows = [RowPenalties([0.0, 0.5][i % 2], [0.0, 0.9][i // 2 % 2], [1.0, 1.2][i // 4 % 2]) for i in range(150)]
    texts = [(make_ids(5, i), make_ids(i % 9, 1000 + i)) for i in range(150)]
    counts = TokenCounts(150, device)
    slots = [counts.take(VOCAB, prompt, output) for prompt, output in texts]
    changed = penalize(counts, logits, range(1, 300, 2), slots, rows)
    assert torch.equal(changed[::2], logits[::2])
    for i in range(150):
        alone = penalized(device, logits[2 * i + 1 : 2 * i + 2], [texts[i]], [rows[i]])
        assert torch.equal(changed[2 * i + 1], alone[0])


def test_counts_follow_the_tokens_while_the_table_grows(device: torch.device) -> None:
    counts = TokenCounts(7, device)
    penalties = RowPenalties(0.5, 0.25, 1.5)
    texts = [(make_ids(4, i), make_ids(i, 50 + i)) for i in range(7)]
    slots: list[int] = []
    for i, (prompt, output) in enumerate(texts):
        slots.append(counts.take(VOCAB, prompt, output))
        assert counts.num_slots == (4 if i < 4 else 7)
        new = make_ids(len(slots), 90 + i)
        counts.add(torch.tensor(slots, device=device), torch.tensor(new, device=device))
        for (_, known), token in zip(texts, new, strict=False):
            known.append(token)
    assert len(set(slots)) == 7
    logits = make_logits(7)
    changed = penalize(counts, logits, range(7), slots, [penalties] * 7)
    for i, (prompt, output) in enumerate(texts):
        assert changed[i].tolist() == pytest.approx(expected(logits[i], prompt, output, penalties), abs=1e-5)


def test_a_slot_begins_anew_and_the_table_goes_with_the_last(device: torch.device) -> None:
    counts = TokenCounts(100, device)
    kept = counts.take(VOCAB, [1], [])
    counts.give_back(counts.take(VOCAB, [5, 6], [7, 7]))
    slot = counts.take(VOCAB, [], [8])
    logits = make_logits(1)
    changed = penalize(counts, logits, [0], [slot], [RowPenalties(presence=1.0)])
    assert (changed != logits).nonzero().tolist() == [[0, 8]]
    counts.give_back(slot)
    assert counts.num_slots == 4
    counts.give_back(kept)
    assert counts.num_slots == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_stay_so(device: torch.device, bad: float) -> None:
    logits = torch.full((1, VOCAB), 0.5)
    logits[0, 3] = bad
    changed = penalized(device, logits, [([3], [3, 4])], [RowPenalties(1.0, 1.0, 100.0)])[0].tolist()
    assert math.isnan(changed[3]) if math.isnan(bad) else changed[3] == bad
    assert all(map(math.isfinite, changed[:3] + changed[4:]))
