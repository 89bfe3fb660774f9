"""Attention in plain torch: the reference that every other backend is tested against, and a fallback on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from layers.attention.base import Attention
from layers.forward_batch import ForwardBatch
from layers.kv_cache import KVCache


class TorchAttention:
    """One scaled_dot_product_attention call a request over its gathered keys and values."""

    def can_record(self, kv_cache: KVCache) -> bool:
        return False

    def plan(self, batch: ForwardBatch) -> None:
        # The slots of every request's visible positions, in position order.
        batch.plan = [
            batch.request_table[row, :length].long()
            for row, length in zip(batch.request_rows.tolist(), batch.seq_lens_cpu, strict=True)
        ]

    def forward(
        self,
        layer: Attention,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        cache = batch.kv_cache
        cache.write(layer.layer_id, batch.slots, k_TKD, v_TKE)
        k_cache, v_cache = cache.k(layer.layer_id), cache.v(layer.layer_id)
        out_TNE = q_TND.new_empty(q_TND.shape[0], layer.num_heads, layer.v_head_dim)
        start = 0
        for slots, length, extend in zip(batch.plan, batch.seq_lens_cpu, batch.extend_lens_cpu, strict=True):
            q = q_TND[start : start + extend].transpose(0, 1)[None]
            k = k_cache[slots].to(q.dtype).transpose(0, 1)[None]
            v = v_cache[slots].to(q.dtype).transpose(0, 1)[None]
            mask = None
            if extend > 1:
                mask = torch.ones(extend, length, dtype=torch.bool, device=q.device).tril(length - extend)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=layer.num_heads != layer.num_kv_heads
            )
            out_TNE[start : start + extend] = out[0].transpose(0, 1)
            start += extend
        return out_TNE
