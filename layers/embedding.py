"""Token embedding and LM head, split by vocabulary rows.

Shape letters: T token rows, N wanted rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from layers.kernels.cpu import PackedWeight
from layers.parallel import ParallelGroup
from layers.weights import WeightPart, empty_parameter, slice_of


class VocabEmbedding(nn.Module):
    """Rows of a [V, H] table; each rank holds a run of ceil(V / size) rows, the last ones fewer."""

    def __init__(self, vocab_size: int, hidden_size: int, group: ParallelGroup) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.rows_per_rank = -(-vocab_size // group.size)
        self.start = min(group.rank * self.rows_per_rank, vocab_size)
        self.stop = min(self.start + self.rows_per_rank, vocab_size)
        self.weight = empty_parameter(self.stop - self.start, hidden_size)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T, H] embeddings of the token ids [T] int64."""
        if self.group.size == 1:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self.start
        foreign_T = (local_T < 0) | (local_T >= self.stop - self.start)
        if self.stop == self.start:
            out_TH = self.weight.new_zeros(ids_T.shape[0], self.weight.shape[1])
        else:
            out_TH = F.embedding(local_T.masked_fill(foreign_T, 0), self.weight)
            out_TH = out_TH.masked_fill(foreign_T[:, None], 0)
        return self.group.all_reduce(out_TH)

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        yield slice_of(self.weight, f"{path}.weight", dim=0, total=self.vocab_size, start=self.start)


class LMHead(VocabEmbedding):
    """Logits from hidden states. tied_to: the embedding whose weight it shares, or None for its own."""

    def __init__(
        self, vocab_size: int, hidden_size: int, group: ParallelGroup, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size if tied_to is None else 0, group)
        self._packed: PackedWeight | None = None
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 over the whole vocabulary, on every rank."""
        if self._packed is not None:
            logits = self._packed.linear(hidden_NH, dtype=torch.float32)
        else:
            logits = F.linear(hidden_NH, self.weight)
        if self.group.size > 1:
            # Ranks at the end hold fewer rows; the gather needs equal shapes.
            logits = F.pad(logits, (0, self.rows_per_rank - logits.shape[1]))
            logits = self.group.all_gather(logits)[:, : self.vocab_size]
        return logits.float()

    def pack_weight(self) -> None:
        """See layers.linear.pack_weights; a tied weight stays for the embedding."""
        if PackedWeight.accepts(self.weight):
            self._packed = PackedWeight(self.weight)
            if not self.tied:
                self.weight.data = self.weight.data.new_empty(0, self.weight.shape[1])

    def weight_parts(self, path: str) -> Iterator[WeightPart]:
        if not self.tied:
            yield from super().weight_parts(path)
