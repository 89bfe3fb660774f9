"""Qwen3-MoE: Qwen3 attention; most layers' MLP is a softmax-routed mixture of experts."""

from __future__ import annotations

from torch import nn

from layers.moe import Experts, MoE, SoftmaxRouter
from layers.parallel import ParallelGroups
from models.decoder import DecoderLayer, DecoderLM, GatedMLP
from models.hf_config import HFConfig
from models.qwen3 import Qwen3Attention


class Qwen3MoeForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        attention = Qwen3Attention(config, layer_id, groups)
        if is_sparse_layer(config, layer_id):
            return DecoderLayer(config, attention, make_moe(config, groups))
        return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size, groups.dense))


def is_sparse_layer(config: HFConfig, layer_id: int) -> bool:
    """Whether the layer's MLP is a mixture: every decoder_sparse_step-th layer that mlp_only_layers does not list."""
    step = config.integer("decoder_sparse_step", 1)
    return layer_id not in config.items("mlp_only_layers") and (layer_id + 1) % step == 0


def make_moe(config: HFConfig, groups: ParallelGroups) -> MoE:
    # Newer versions of transformers write the count under another name.
    count_name = "num_experts" if "num_experts" in config.values else "num_local_experts"
    num_experts, hidden_size = config.integer(count_name), config.hidden_size
    gate = SoftmaxRouter(
        hidden_size, num_experts, config.integer("num_experts_per_tok"), config.flag("norm_topk_prob", False)
    )
    experts = Experts(
        num_experts, hidden_size, config.integer("moe_intermediate_size"), groups, fp8_block=config.fp8_block
    )
    return MoE(gate, experts, groups)
