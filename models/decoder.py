"""The decoder that all families share: embedding, pre-normed layers with a running residual, final norm, LM head.

Shape letters: T token rows, N wanted rows, H hidden size, I intermediate size of this rank, V vocabulary, D rotated
width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from layers.embedding import LMHead, VocabEmbedding
from layers.forward_batch import ForwardBatch
from layers.kv_cache import KVSpec
from layers.linear import GateUpLinear, RowLinear, kv_head_share
from layers.norm import RMSNorm
from layers.parallel import ParallelGroup, ParallelGroups
from layers.rotary import RotaryEmbedding
from models.hf_config import HFConfig


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), split by intermediate columns over the group.

    `batch` is what a mixture of experts in its place is given too.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, group: ParallelGroup, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(hidden_size, intermediate_size, ("gate_proj", "up_proj"), group, bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, group, bias)

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.silu_and_mul(x_TH))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each sum is left to the norm that follows it.

    self_attn: called as (x_TH, cos_sin_TD, batch) -> [T, H]. mlp: called as (x_TH, batch) -> [T, H].
    """

    def __init__(self, config: HFConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, cos_sin_TD: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH, residual_TH = self.input_layernorm.add(x_TH, residual_TH)
        x_TH = self.self_attn(x_TH, cos_sin_TD, batch)
        x_TH, residual_TH = self.post_attention_layernorm.add(x_TH, residual_TH)
        return self.mlp(x_TH, batch), residual_TH


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: HFConfig, groups: ParallelGroups, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, groups.dense)
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x_TH, residual_TH = self.embed_tokens(batch.input_ids), None
        cos_sin_TD = self.rotary(batch.positions)
        for layer in self.layers:
            x_TH, residual_TH = layer(x_TH, residual_TH, cos_sin_TD, batch)
        return self.norm.add(x_TH, residual_TH)[0]


class DecoderLM(nn.Module, ABC):
    """A causal language model. A family says how its layers are built, and what they cache if not plain heads.

    tied_tensors: checkpoint names that may be present but repeat another tensor -> that tensor.
    """

    def __init__(self, config: HFConfig, groups: ParallelGroups) -> None:
        super().__init__()
        self.kv_spec = self.make_kv_spec(config, groups)
        layers = [self.make_layer(config, layer_id, groups) for layer_id in range(config.num_layers)]
        self.model = Decoder(config, groups, layers)
        tied = config.tie_word_embeddings
        self.lm_head = LMHead(
            config.vocab_size, config.hidden_size, groups.dense, self.model.embed_tokens if tied else None
        )
        self.tied_tensors = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    @abstractmethod
    def make_layer(self, config: HFConfig, layer_id: int, groups: ParallelGroups) -> nn.Module: ...

    def make_kv_spec(self, config: HFConfig, groups: ParallelGroups) -> KVSpec:
        num_kv_heads, _ = kv_head_share(config.num_kv_heads, groups.attention)
        return KVSpec(config.num_layers, num_kv_heads, config.head_dim, config.head_dim)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Final-normed hidden states [T, H] of every row."""
        return self.model(batch)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32."""
        return self.lm_head(hidden_NH)
