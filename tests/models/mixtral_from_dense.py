"""A Mixtral checkpoint that computes what a dense Llama does: every expert is a copy of the dense MLP.

The two chosen experts' weights add up to 1, so whatever the router says, the layer's output is the dense one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
INDEX = "model.safetensors.index.json"


def convert(llama_dir: Path, out_dir: Path, *, num_experts: int = 8, seed: int = 0) -> None:
    """Write the Mixtral twin of a Llama checkpoint (safetensors, no biases) to the new folder `out_dir`.

    Routers are random, by `seed`. One file a layer, so that little of the larger model is in memory at a time; all
    other files (tokenizer, generation config) are copied.
    """
    config = json.loads((llama_dir / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"{llama_dir}: expected a Llama without biases, the only kind with a Mixtral twin")
    out_dir.mkdir(parents=True)
    for path in llama_dir.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, out_dir)
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    (out_dir / "config.json").write_text(json.dumps(config, indent=2))
    _convert_tensors(llama_dir, out_dir, config, num_experts, torch.Generator().manual_seed(seed))


def _convert_tensors(
    llama_dir: Path, out_dir: Path, config: dict[str, int], num_experts: int, generator: torch.Generator
) -> None:
    sources = [safe_open(path, framework="pt") for path in sorted(llama_dir.glob("*.safetensors"))]
    where = {name: source for source in sources for name in source.keys()}  # noqa: SIM118 (not a dict)
    weight_map = {}
    for layer in range(-1, config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = [name for name in where if (name.startswith(prefix) if layer >= 0 else ".layers." not in name)]
        tensors = {}
        for name in own:
            parent, _, projection = name.removesuffix(".weight").rpartition(".")
            tensor = where[name].get_tensor(name)
            if parent == f"{prefix}mlp":
                for expert in range(num_experts):
                    new = f"{prefix}block_sparse_moe.experts.{expert}.{EXPERT_NAMES[projection]}.weight"
                    tensors[new] = tensor.clone()  # safetensors refuses tensors that share memory
            else:
                tensors[name] = tensor
        if layer >= 0:
            router = torch.randn(num_experts, config["hidden_size"], generator=generator)
            like = tensors[f"{prefix}input_layernorm.weight"]
            tensors[f"{prefix}block_sparse_moe.gate.weight"] = router.to(like.dtype)
        file = f"model-{layer + 2:05d}-of-{config['num_hidden_layers'] + 1:05d}.safetensors"
        save_file(tensors, out_dir / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (out_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
