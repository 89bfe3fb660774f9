"""What the scheduler asks of a model, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from layers.forward_batch import ForwardBatch
from layers.kv_cache import KVSpec


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a loaded model. context_length: positions it was made for. dtype: of weights and KV.

    kv_spec: of this rank. total_kv_heads: of all ranks together, each counted once.
    expert_dtype: in which routed experts are held; None where there are none.
    """

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    kv_spec: KVSpec
    total_kv_heads: int
    expert_dtype: torch.dtype | None


class CausalLM(Protocol):
    """T token rows, H hidden size, N wanted rows, V vocabulary."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Final-normed hidden states [T, H] of every row, in the model's dtype."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 over the real vocabulary, the same on every rank."""
