"""A GGUF file of a llama-family model, written out as a checkpoint folder that any loader of safetensors reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

# Names llama.cpp gives to tensors of one block, and theirs in a transformers checkpoint.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_READ_FIELDS = ("general.architecture", "llama.", "tokenizer.ggml.bos", "tokenizer.ggml.eos", "tokenizer.ggml.padding")


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer into `folder`.

    Quantised tensors are dequantised to float32 and rounded once to bfloat16. ValueError names what the file holds
    that this does not know: another architecture or an unknown tensor.
    """
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(_READ_FIELDS)}
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{gguf_file.name} holds a {architecture!r} model; only 'llama' can be converted")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in tensors)
    weights = {}
    for name, tensor in tensors.items():
        array = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("attn_q.weight"):
            array = _undo_rope_permutation(array, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            array = _undo_rope_permutation(array, config["num_key_value_heads"])
        weights[checkpoint_name(name)] = torch.tensor(array, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _save_tokenizer(gguf_file, folder, config["max_position_embeddings"])


def checkpoint_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`. ValueError for a name not known."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in _BLOCK_NAMES:
            return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"
    raise ValueError(f"unknown tensor {gguf_name!r} in a llama GGUF file")


def _undo_rope_permutation(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """[heads * head_dim, hidden] with rotary pairs next to each other (llama.cpp) to pairs half a head apart."""
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": _shortest_float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _shortest_float32(value: float) -> float:
    """9.999999747378752e-06, a float32 read as a float64, back to the 1e-05 it was written as."""
    return float(str(np.float32(value)))


def _save_tokenizer(gguf_file: Path, folder: Path, model_max_length: int) -> None:
    from transformers import AutoTokenizer  # 1.5 s of imports that only a conversion needs

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.model_max_length = model_max_length  # a GGUF file has no such field, and the default means "no limit"
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
