"""The one attention interface. A backend is chosen by device; models and the scheduler do not know which one runs.

Shape letters: T token rows, N query heads, K key/value heads, D key width, E value width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from layers.forward_batch import ForwardBatch
from layers.kv_cache import KVCache


class AttentionBackend(Protocol):
    """Causal attention over the paged cache."""

    def can_record(self, kv_cache: KVCache) -> bool:
        """Whether a decode pass over this cache learns lengths and places from the device's tensors alone, so that it
        can be recorded once and replayed for others."""

    def plan(self, batch: ForwardBatch) -> None:
        """Derive once a pass what every layer's call needs and leave it in `batch.plan`."""

    def forward(
        self,
        layer: Attention,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Write the new keys and values to `batch.slots`, then attend; returns [T, N, E] in q's dtype.

        Row i of a request sees the request's positions 0..position(i), read through `batch.request_table`. T is at
        least 1: kernels expect work.
        """


class Attention(nn.Module):
    """One layer's attention: shapes and scale; the work is the batch's backend's."""

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        v_head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.scale = scale

    def forward(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKE: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        if q_TND.shape[0] == 0:  # an idle pass
            return q_TND.new_empty(0, self.num_heads, self.v_head_dim)
        return batch.attention.forward(self, q_TND, k_TKD, v_TKE, batch)
