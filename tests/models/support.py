"""Tiny random checkpoints made with transformers, and a runner that drives a model as the scheduler would.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from layers.attention import TorchAttention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kv_cache import KVCache
from models.base import ModelInfo

VOCAB_SIZE = 512
TOLERANCE = 1e-4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# Family -> (configuration class of transformers, its arguments beyond the common ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
}


def make_checkpoint(family: str, folder: Path, *, max_shard_size: str = "5GB", seed: int = 0, **overrides: Any) -> Any:
    """Save a tiny random model of the family to `folder`; returns transformers' model, float32, in evaluation mode."""
    config_class, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_COMMON, **own, **overrides})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random values everywhere, also where transformers starts from a constant (norms, biases)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * values)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * values)
            else:
                parameter.copy_(values * 1.5 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def random_ids(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.no_grad()
def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] float32 logits of the transformers model for the whole sequence at once."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file; None removes the key."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


class Runner:
    """Requests with KV slots scattered over the cache at random; passes are made by hand."""

    def __init__(self, model: Any, info: ModelInfo, *, max_requests: int = 8, max_length: int = 256) -> None:
        self.model = model
        self.info = info
        num_slots = 1 + max_requests * max_length
        self.kv_cache = KVCache(info.kv_spec, num_slots, info.dtype, "cpu")
        self.attention = TorchAttention()
        order = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.table = torch.zeros(1 + max_requests, max_length, dtype=torch.int32)
        self.table[1:] = order.view(max_requests, max_length).int()
        self.lengths = [0] * (1 + max_requests)

    def batch(self, work: Sequence[tuple[int, Sequence[int]]]) -> ForwardBatch:
        """A planned batch that extends request row `row` by `ids` for each (row, ids) of the work; rows start at 1."""
        rows = [row for row, _ in work]
        extend_lens = [len(ids) for _, ids in work]
        starts = [self.lengths[row] for row in rows]
        for row, count in zip(rows, extend_lens, strict=True):
            self.lengths[row] += count
        seq_lens = [self.lengths[row] for row in rows]
        positions = torch.cat([torch.arange(start, stop) for start, stop in zip(starts, seq_lens, strict=True)])
        token_rows = torch.tensor(rows).repeat_interleave(torch.tensor(extend_lens))
        decode = all(count == 1 for count in extend_lens)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=torch.tensor([id_ for _, ids in work for id_ in ids]),
            positions=positions,
            slots=self.table[token_rows, positions].long(),
            request_table=self.table,
            request_rows=torch.tensor(rows),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            extend_lens=torch.tensor(extend_lens, dtype=torch.int32),
            query_start=torch.tensor([0, *extend_lens]).cumsum(0).int(),
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens,
            kv_cache=self.kv_cache,
            attention=self.attention,
        )
        self.attention.plan(batch)
        return batch

    @torch.inference_mode()
    def step(self, *work: tuple[int, Sequence[int]]) -> list[torch.Tensor]:
        """One pass; logits [rows of the request, V] float32 for each (row, ids)."""
        batch = self.batch(work)
        logits_TV = self.model.logits(self.model.forward(batch))
        return list(logits_TV.split(batch.extend_lens_cpu))

    def run_chunked(self, row: int, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """[T, V] logits of the sequence fed in passes of `chunk` tokens; 1 is cached decode from the first token on."""
        parts = [self.step((row, ids[start : start + chunk]))[0] for start in range(0, len(ids), chunk)]
        return torch.cat(parts)


def check_parity(family: str, folder: Path, **overrides: Any) -> None:
    """Float32 logits of every position equal transformers' in whole and chunked prefill, cached decode and batches."""
    import models

    reference = make_checkpoint(family, folder, **overrides)
    model, info = models.load_model(str(folder), dtype="float32")
    ids = random_ids(160)
    wanted = reference_logits(reference, ids)
    runner = Runner(model, info)
    for row, chunk in enumerate((len(ids), 64, 37, 1), start=1):
        got = runner.run_chunked(row, ids, chunk)
        error = (got - wanted).abs().max().item()
        assert error < TOLERANCE, f"{family}, chunks of {chunk}: {error}"
    check_mixed_batches(runner, reference)


def check_mixed_batches(runner: Runner, reference: Any) -> None:
    """Requests of different lengths prefill, extend and decode in the same passes."""
    sequences = {5: random_ids(60, seed=1), 6: random_ids(9, seed=2), 7: random_ids(33, seed=3)}
    got: dict[int, list[torch.Tensor]] = {row: [] for row in sequences}
    # Passes of unequal pieces: all rows extend, some extend while others decode, all decode.
    for pieces in ({5: 40, 6: 5, 7: 1}, {5: 1, 7: 29}, {5: 18, 6: 1}, {6: 1, 7: 1}, {5: 1, 6: 1, 7: 1}, {6: 1, 7: 1}):
        work = [
            (row, sequences[row][runner.lengths[row] : runner.lengths[row] + count]) for row, count in pieces.items()
        ]
        for (row, _), logits in zip(work, runner.step(*work), strict=True):
            got[row].append(logits)
    for row, ids in sequences.items():
        assert runner.lengths[row] == len(ids)
        error = (torch.cat(got[row]) - reference_logits(reference, ids)).abs().max().item()
        assert error < TOLERANCE, f"request {row}: {error}"


def check_prefill(reference: Any, folder: Path) -> None:
    """Float32 logits of one prefill of the checkpoint in `folder` equal the transformers model's."""
    import models

    runner = Runner(*models.load_model(str(folder), dtype="float32"), max_requests=1)
    ids = random_ids(90)
    error = (runner.step((1, ids))[0] - reference_logits(reference, ids)).abs().max().item()
    assert error < TOLERANCE, f"{folder}: {error}"


def check_merged_experts(family: str, folder: Path) -> None:
    """Checkpoints in which all experts of a layer are one tensor load to the same logits."""
    reference = make_checkpoint(family, folder)
    shutil.rmtree(folder)
    reference.save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    check_prefill(reference, folder)
