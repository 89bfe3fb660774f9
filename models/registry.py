"""Which class builds which architecture. A family is one line here and one file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from models.errors import ModelError

if TYPE_CHECKING:
    from models.decoder import DecoderLM

# `architectures[0]` of config.json -> the module that holds the class of that name.
ARCHITECTURES = {
    "LlamaForCausalLM": "models.llama",
    "Qwen2ForCausalLM": "models.qwen2",
    "Qwen3ForCausalLM": "models.qwen3",
    "Qwen3MoeForCausalLM": "models.qwen3_moe",
    "MixtralForCausalLM": "models.mixtral",
    "DeepseekV3ForCausalLM": "models.deepseek_v3",
}


def model_class(architecture: str, source: str) -> type[DecoderLM]:
    """The class of an architecture; ModelError listing the known ones. `source`: what the error calls the config."""
    module = ARCHITECTURES.get(architecture)
    if module is None:
        raise ModelError(
            f"{source}: the architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    found: type[DecoderLM] = getattr(importlib.import_module(module), architecture)
    return found
