"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, group-limited routing and shared experts.

Attention runs in the absorbed form: what is cached of a token is one latent vector and one rotated key for all heads.
W_UK, which expands the latent into keys, is moved to the query's side (q . W_UK c = W_UK^T q . c), and W_UV, which
expands it into values, behind the attention. So to the backend it is multi-query attention whose value is the key's
first part.

Shape letters: T token rows, H hidden size, N heads of this rank, C latent width (kv_lora_rank), R rotary width,
P width of a head's part without position (qk_nope_head_dim), V value width of a head, D table width.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.attention import Attention
from layers.forward_batch import ForwardBatch
from layers.kv_cache import KVSpec
from layers.linear import ColumnLinear, Linear, RowLinear
from layers.moe import Experts, GroupedSigmoidRouter, MoE
from layers.norm import RMSNorm
from layers.parallel import ParallelGroup, ParallelGroups
from layers.rotary import apply_rotary, yarn_mscale
from models.decoder import DecoderLayer, DecoderLM, GatedMLP
from models.hf_config import HFConfig

# The norms of the latents have this epsilon whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class LatentExpansion(ColumnLinear):
    """kv_b_proj: from a latent to all heads' keys (W_UK) and values (W_UV), split over the group by heads."""

    def __init__(self, latent_dim: int, num_heads: int, key_dim: int, value_dim: int, group: ParallelGroup) -> None:
        super().__init__(latent_dim, num_heads * (key_dim + value_dim), "kv_b_proj", group)
        self.num_local_heads = group.shard(num_heads, "num_attention_heads")
        self.head_dims = (key_dim, value_dim)

    def query_to_latent(self, q_TNP: torch.Tensor) -> torch.Tensor:
        """W_UK^T q of each head: [T, N, C]."""
        w_uk_NPC, _ = self._by_head()
        return torch.bmm(q_TNP.transpose(0, 1), w_uk_NPC).transpose(0, 1)

    def latent_to_value(self, out_TNC: torch.Tensor) -> torch.Tensor:
        """W_UV c of each head: [T, N, V]."""
        _, w_uv_NVC = self._by_head()
        return torch.bmm(out_TNC.transpose(0, 1), w_uv_NVC.transpose(1, 2)).transpose(0, 1)

    def _by_head(self) -> tuple[torch.Tensor, ...]:
        """Views [N, P, C] and [N, V, C] of the weight; nothing is stored twice."""
        return self.weight.unflatten(0, (self.num_local_heads, -1)).split(self.head_dims, dim=1)

    def pack_weight(self) -> None:
        """Stays as it is: it is used head by head, never as the whole product that packing serves."""


class LatentAttention(nn.Module):
    """The query may go through a latent vector of its own (q_lora_rank), which only saves parameters."""

    def __init__(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> None:
        super().__init__()
        group, hidden_size, bias = groups.attention, config.hidden_size, config.flag("attention_bias", False)
        self.num_heads = group.shard(config.num_heads, "num_attention_heads")
        self.nope_dim = config.integer("qk_nope_head_dim")
        self.rope_dim = config.integer("qk_rope_head_dim")
        self.latent_dim = config.integer("kv_lora_rank")
        self.interleaved = config.rope.interleaved
        query_dim = self.nope_dim + self.rope_dim
        self.q_lora_rank = config.integer("q_lora_rank", 0, minimum=0)
        if self.q_lora_rank:
            self.q_a_proj = Linear(hidden_size, self.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = ColumnLinear(self.q_lora_rank, config.num_heads * query_dim, "q_b_proj", group)
        else:
            self.q_proj = ColumnLinear(hidden_size, config.num_heads * query_dim, "q_proj", group)
        self.kv_a_proj_with_mqa = Linear(hidden_size, self.latent_dim + self.rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_NORM_EPS)
        value_dim = config.integer("v_head_dim")
        self.kv_b_proj = LatentExpansion(self.latent_dim, config.num_heads, self.nope_dim, value_dim, group)
        self.o_proj = RowLinear(config.num_heads * value_dim, hidden_size, group, bias)
        self.attn = Attention(
            layer_id,
            self.num_heads,
            num_kv_heads=1,
            head_dim=self.latent_dim + self.rope_dim,
            scale=query_dim**-0.5 * softmax_factor(config),
            v_head_dim=self.latent_dim,
        )

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q_nope_TNP, q_rope_TNR = self._query(x_TH).split((self.nope_dim, self.rope_dim), dim=-1)
        latent_TC, k_rope_TR = self.kv_a_proj_with_mqa(x_TH).split((self.latent_dim, self.rope_dim), dim=-1)
        q_rope_TNR, k_rope_T1R = apply_rotary(q_rope_TNR, k_rope_TR[:, None], cos_sin_TD, self.interleaved)
        q = torch.cat((self.kv_b_proj.query_to_latent(q_nope_TNP), q_rope_TNR), dim=-1)
        k = torch.cat((self.kv_a_layernorm(latent_TC)[:, None], k_rope_T1R), dim=-1)
        out_TNC = self.attn(q, k, None, batch)
        return self.o_proj(self.kv_b_proj.latent_to_value(out_TNC).flatten(1))

    def _query(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, N, P + R]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TH))) if self.q_lora_rank else self.q_proj(x_TH)
        return q.unflatten(-1, (self.num_heads, -1))


def softmax_factor(config: HFConfig) -> float:
    """What yarn's temperature multiplies the scores by: mscale_all_dim acts on both query and key."""
    rope = config.rope
    if rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


class DeepseekV3ForCausalLM(DecoderLM):
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module:
        attention = LatentAttention(config, layer_id, groups)
        first_sparse = config.integer("first_k_dense_replace", 0, minimum=0)
        if layer_id >= first_sparse and layer_id % config.integer("moe_layer_freq", 1) == 0:
            return DecoderLayer(config, attention, make_moe(config, groups))
        return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size, groups.dense))

    def make_kv_spec(self, config: HFConfig, groups: ParallelGroups) -> KVSpec:
        latent_dim = config.integer("kv_lora_rank")
        key_dim = latent_dim + config.integer("qk_rope_head_dim")
        return KVSpec(config.num_layers, 1, key_dim, latent_dim, value_in_key=True)


def make_moe(config: HFConfig, groups: ParallelGroups) -> MoE:
    for field, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        value = config.values.get(field, known)
        if value != known:
            raise config.error(f"{field} is {value!r}; only {known!r} is supported")
    num_experts, hidden_size = config.integer("n_routed_experts"), config.hidden_size
    expert_size = config.integer("moe_intermediate_size")
    gate = GroupedSigmoidRouter(
        hidden_size,
        num_experts,
        top_k=config.integer("num_experts_per_tok"),
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        renormalize=config.flag("norm_topk_prob", True),
        scaling_factor=config.number("routed_scaling_factor", 1.0),
    )
    experts = Experts(num_experts, hidden_size, expert_size, groups, fp8_block=config.fp8_block)
    # Several shared experts are one MLP of their joint width.
    shared_size = expert_size * config.integer("n_shared_experts", 0, minimum=0)
    shared_experts = GatedMLP(hidden_size, shared_size, groups.dense) if shared_size else None
    return MoE(gate, experts, groups, shared_experts)
