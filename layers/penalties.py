"""Penalties on tokens that a text already has, from a count of each token on the device.

Shape letters: B rows of logits, N of them with penalties, S slots of the table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layers.kernels import cpu
from layers.transfer import to_device

# A count with this bit is of a token that the prompt has; the bits below count it in the output.
_IN_PROMPT = 1 << 30
_OUTPUT_BITS = _IN_PROMPT - 1
_FEWEST_SLOTS = 4
# Rows changed at a time: the intermediate tensors of 64 rows of a 150k vocabulary are 40 MB each.
_BLOCK = 64


@dataclass(frozen=True)
class RowPenalties:
    """What lowers the logits of tokens in the text; the defaults change nothing.

    frequency: subtracted once for each time the token is in the output. presence: subtracted where it is in the output
    at all. Both as in OpenAI's API. repetition: above 0; logits of tokens in prompt or output are divided by it where
    positive and multiplied by it where negative (Keskar et al., 2019).
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0

    @property
    def is_neutral(self) -> bool:
        return not (self.frequency or self.presence) and self.repetition == 1.0


class TokenCounts:
    """A table of counts [S, V] int32 with a row (slot) for each text that needs one, `max_slots` at most.

    A slot is 4 V bytes, as much as a row of logits. The table doubles when it is full and is given up when no slot is
    in use. device: where it is, and the logits.
    """

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self.device = device
        self._counts_SV: torch.Tensor | None = None
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        return 0 if self._counts_SV is None else self._counts_SV.shape[0]

    def take(self, vocab: int, prompt: Sequence[int], output: Sequence[int]) -> int:
        """A slot with the counts of a text so far; all ids below `vocab`, which is the same in every call."""
        if not self._free:
            self._grow(vocab)
        assert self._counts_SV is not None
        slot = self._free.pop()
        counts_V = self._counts_SV[slot].zero_()
        if prompt:
            counts_V.index_fill_(0, to_device(prompt, torch.int64, self.device), _IN_PROMPT)
        if output:
            ids = to_device(output, torch.int64, self.device)
            counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        if len(self._free) == self.num_slots:
            self._counts_SV, self._free = None, []

    def add(self, slots_N: torch.Tensor, tokens_N: torch.Tensor) -> None:
        """One more output token for each of these slots, which all differ. Both int64."""
        assert self._counts_SV is not None
        self._counts_SV[slots_N, tokens_N] += 1

    def penalize(
        self,
        logits_BV: torch.Tensor,
        rows_N: torch.Tensor,
        slots_N: torch.Tensor,
        penalties: Sequence[RowPenalties],
    ) -> None:
        """Change these rows of the logits (float32, last axis dense) in place, by the counts in these slots.

        Repetition first, then frequency and presence. Indices are contiguous int64.
        """
        assert self._counts_SV is not None
        values = [(row.frequency, row.presence, row.repetition) for row in penalties]
        penalties_N3 = to_device(values, torch.float32, self.device)
        if cpu.usable(logits_BV):
            cpu.penalize(logits_BV, self._counts_SV, rows_N, slots_N, penalties_N3, _OUTPUT_BITS)
            return
        for start in range(0, len(penalties), _BLOCK):
            block = slice(start, start + _BLOCK)
            logits_NV, counts_NV = logits_BV[rows_N[block]], self._counts_SV[slots_N[block]]
            frequency_N1, presence_N1, repetition_N1 = penalties_N3[block, :, None].unbind(1)
            output_NV = counts_NV & _OUTPUT_BITS
            penalized_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
            penalized_NV -= frequency_N1 * output_NV
            penalized_NV -= presence_N1 * (output_NV > 0)
            logits_BV[rows_N[block]] = torch.where(counts_NV != 0, penalized_NV, logits_NV)

    def _grow(self, vocab: int) -> None:
        old = self.num_slots
        size = min(max(_FEWEST_SLOTS, 2 * old), self._max_slots)
        counts_SV = torch.empty(size, vocab, dtype=torch.int32, device=self.device)
        if self._counts_SV is not None:
            counts_SV[:old] = self._counts_SV
        self._counts_SV = counts_SV
        self._free.extend(range(old, size))
