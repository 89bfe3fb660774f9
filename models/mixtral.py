"""Mixtral: Llama attention; every layer's MLP is a mixture of experts with softmax weights that add up to 1."""

from __future__ import annotations

from torch import nn

from layers.moe import Experts, MoE, SoftmaxRouter
from layers.parallel import ParallelGroups
from models.decoder import DecoderLayer, DecoderLM
from models.hf_config import HFConfig
from models.llama import LlamaAttention

# The checkpoint's name of the MLP, and of an expert's gate, up and down projections.
BLOCK = "block_sparse_moe"
EXPERT_NAMES = ("w1", "w3", "w2")


class MixtralForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        num_experts, hidden_size = config.integer("num_local_experts"), config.hidden_size
        gate = SoftmaxRouter(
            hidden_size, num_experts, config.integer("num_experts_per_tok"), renormalize=True, block=BLOCK
        )
        experts = Experts(
            num_experts, hidden_size, config.intermediate_size, groups, EXPERT_NAMES, BLOCK, fp8_block=config.fp8_block
        )
        return DecoderLayer(config, LlamaAttention(config, layer_id, groups), MoE(gate, experts, groups))
