"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from torch import nn

from layers.parallel import ParallelGroups
from models.decoder import DecoderLayer, DecoderLM, GatedMLP
from models.hf_config import HFConfig
from models.llama import LlamaAttention


class Qwen2ForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        attention = LlamaAttention(config, layer_id, groups, qkv_bias=True)
        return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size, groups.dense))
