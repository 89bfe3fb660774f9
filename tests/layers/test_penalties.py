from __future__ import annotations

import math

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from layers.kernels import cpu
from layers.penalties import RowPenalties, TokenCounts

VOCAB = 200  # of three whole blocks of the kernel and a part
CPU = torch.device("cpu")


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


def penalized(
    logits_NV: torch.Tensor, texts: list[tuple[list[int], list[int]]], rows: list[RowPenalties]
) -> torch.Tensor:
    counts = TokenCounts(len(texts), CPU)
    slots = [counts.take(VOCAB, prompt, output) for prompt, output in texts]
    changed_NV = logits_NV.clone()
    counts.penalize(changed_NV, torch.arange(len(texts)), torch.tensor(slots), rows)
    return changed_NV


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "usable", lambda x: False)
    elif not cpu.usable(torch.empty(1)):
        pytest.skip("the CPU kernels cannot be compiled here")


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
def test_values_are_those_of_the_definitions(penalties: RowPenalties) -> None:
    logits = make_logits(1)
    prompt, output = make_ids(11, 1), make_ids(20, 2)
    changed = penalized(logits, [(prompt, output)], [penalties])
    assert changed[0].tolist() == pytest.approx(expected(logits[0], prompt, output, penalties), abs=1e-5)
    assert torch.equal(changed, logits) == penalties.is_neutral


@pytest.mark.parametrize("repetition", [0.7, 1.0, 1.05, 2.0])
def test_repetition_penalty_is_that_of_transformers(repetition: float) -> None:
    logits = make_logits(3)
    texts = [(make_ids(7, i), make_ids(13, 10 + i)) for i in range(3)]
    ids = torch.tensor([prompt + output for prompt, output in texts])
    reference = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits.clone())
    assert torch.equal(penalized(logits, texts, [RowPenalties(repetition=repetition)] * 3), reference)


def test_rows_beyond_a_block_and_rows_between_others() -> None:
    """150 texts on every second row of the logits; the rest is left alone."""
    logits = make_logits(300)
    rows = [RowPenalties([0.0, 0.5][i % 2], [0.0, 0.9][i // 2 % 2], [1.0, 1.2][i // 4 % 2]) for i in range(150)]
    texts = [(make_ids(5, i), make_ids(i % 9, 1000 + i)) for i in range(150)]
    counts = TokenCounts(150, CPU)
    slots = [counts.take(VOCAB, prompt, output) for prompt, output in texts]
    changed = logits.clone()
    counts.penalize(changed, torch.arange(1, 300, 2), torch.tensor(slots), rows)
    assert torch.equal(changed[::2], logits[::2])
    for i in range(150):  # exactly what it is alone
        assert torch.equal(changed[2 * i + 1], penalized(logits[2 * i + 1 : 2 * i + 2], [texts[i]], [rows[i]])[0])


def test_counts_follow_the_tokens_while_the_table_grows() -> None:
    counts = TokenCounts(7, CPU)
    penalties = RowPenalties(0.5, 0.25, 1.5)
    texts = [(make_ids(4, i), make_ids(i, 50 + i)) for i in range(7)]
    slots: list[int] = []
    for i, (prompt, output) in enumerate(texts):
        slots.append(counts.take(VOCAB, prompt, output))
        assert counts.num_slots == (4 if i < 4 else 7)
        new = make_ids(len(slots), 90 + i)
        counts.add(torch.tensor(slots), torch.tensor(new))
        for (_, known), token in zip(texts, new, strict=False):
            known.append(token)
    assert len(set(slots)) == 7
    logits = make_logits(7)
    changed = logits.clone()
    counts.penalize(changed, torch.arange(7), torch.tensor(slots), [penalties] * 7)
    for i, (prompt, output) in enumerate(texts):
        assert changed[i].tolist() == pytest.approx(expected(logits[i], prompt, output, penalties), abs=1e-5)


def test_a_slot_begins_anew_and_the_table_goes_with_the_last() -> None:
    counts = TokenCounts(100, CPU)
    kept = counts.take(VOCAB, [1], [])
    counts.give_back(counts.take(VOCAB, [5, 6], [7, 7]))
    slot = counts.take(VOCAB, [], [8])
    logits = make_logits(1)
    changed = logits.clone()
    counts.penalize(changed, torch.tensor([0]), torch.tensor([slot]), [RowPenalties(presence=1.0)])
    assert (changed != logits).nonzero().tolist() == [[0, 8]]
    counts.give_back(slot)
    assert counts.num_slots == 4
    counts.give_back(kept)
    assert counts.num_slots == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_stay_so(bad: float) -> None:
    logits = torch.full((1, VOCAB), 0.5)
    logits[0, 3] = bad
    changed = penalized(logits, [([3], [3, 4])], [RowPenalties(1.0, 1.0, 100.0)])[0].tolist()
    assert math.isnan(changed[3]) if math.isnan(bad) else changed[3] == bad
    assert all(map(math.isfinite, changed[:3] + changed[4:]))
