"""Qwen3: Llama with every query and key head normalised before the rotary embedding.

Shape letters: T token rows, H hidden size, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.forward_batch import ForwardBatch
from layers.norm import RMSNorm
from layers.parallel import ParallelGroups
from layers.rotary import apply_rotary
from models.decoder import DecoderLayer, DecoderLM, GatedMLP
from models.hf_config import HFConfig
from models.llama import LlamaAttention


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> None:
        bias = config.flag("attention_bias", False)
        super().__init__(config, layer_id, groups, qkv_bias=bias, o_bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.qkv_proj.split_heads(x_TH)
        q, k = apply_rotary(self.q_norm(q), self.k_norm(k), cos_sin_TD)
        return self.o_proj(self.attn(q, k, v, batch).flatten(1))


class Qwen3ForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        attention = Qwen3Attention(config, layer_id, groups)
        return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size, groups.dense))
