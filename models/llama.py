"""Llama, and what shares its architecture (SmolLM2, Mistral without a window).

Shape letters: T token rows, H hidden size, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.attention import Attention
from layers.forward_batch import ForwardBatch
from layers.linear import QKVLinear, RowLinear
from layers.parallel import ParallelGroups
from layers.rotary import apply_rotary
from models.decoder import DecoderLayer, DecoderLM, GatedMLP
from models.hf_config import HFConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; `qkv_bias` and `o_bias` as the family has them."""

    def __init__(
        self, config: HFConfig, layer_id: int, groups: ParallelGroups, *, qkv_bias: bool = False, o_bias: bool = False
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.head_dim = head_dim
        self.qkv_proj = QKVLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, head_dim, groups.attention, qkv_bias
        )
        self.o_proj = RowLinear(config.num_heads * head_dim, config.hidden_size, groups.attention, o_bias)
        self.attn = Attention(
            layer_id, self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, scale=head_dim**-0.5
        )

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.qkv_proj.split_heads(x_TH)
        q, k = apply_rotary(q, k, cos_sin_TD)
        return self.o_proj(self.attn(q, k, v, batch).flatten(1))


class LlamaForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        bias = config.flag("attention_bias", False)
        attention = LlamaAttention(config, layer_id, groups, qkv_bias=bias, o_bias=bias)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, groups.dense, config.flag("mlp_bias", False))
        return DecoderLayer(config, attention, mlp)
