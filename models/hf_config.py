"""A checkpoint's config.json: typed access, the fields every family has, and both spellings of the rotary settings."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from layers.rotary import ROPE_KINDS, RopeConfig
from models.errors import ModelError
from models.registry import model_class

logger = logging.getLogger(__name__)

# No size of a model comes near these; larger ones are slips, which would take all memory or time before they showed.
_LARGEST_SIZE, _MOST_LAYERS = 2**31 - 1, 1000
_LARGEST_NUMBER = 1e12
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class HFConfig:
    """values: config.json as parsed. source: what errors call it.

    eos_token_ids: ends of a generation; those outside the vocabulary are dropped with a warning.
    rope: the rotary settings. fp8_block: (rows, columns) that share a scale in a block-fp8 checkpoint; None when it is
    not quantised.
    Accessors raise ModelError naming the field when it is missing (and no default is given) or of another type.
    """

    values: dict[str, Any]
    source: str
    eos_token_ids: tuple[int, ...] = ()
    rope: RopeConfig = field(init=False)
    fp8_block: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        model_class(self.architecture, self.source)  # an unknown family may lack what is read next
        activation = self.values.get("hidden_act", "silu")
        if activation != "silu":
            raise self.error(f"hidden_act is {activation!r}; only 'silu' is supported")
        windowed = "sliding_attention" in self.items("layer_types")
        if windowed or (self.values.get("sliding_window") and self.values.get("use_sliding_window", True)):
            raise self.error("it asks for sliding-window attention, which is not supported")
        inside = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        if inside != self.eos_token_ids:
            logger.warning(
                "%s: of eos_token_id %s only %s are in the vocabulary", self.source, self.eos_token_ids, inside
            )
        object.__setattr__(self, "eos_token_ids", inside)
        object.__setattr__(self, "rope", _parse_rope(self))
        object.__setattr__(self, "fp8_block", _parse_fp8_block(self))

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = _LARGEST_SIZE) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{name} is {value!r}; expected a whole number of at least {minimum}")
        if value > maximum:
            raise self.error(f"{name} is {value}; expected a whole number of at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not _is_number(value):
            raise self.error(f"{name} is {value!r}; expected a number")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """Empty when the field is missing."""
        value = self.values.get(name) or []
        if not isinstance(value, list):
            raise self.error(f"{name} is {value!r}; expected a list")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}; expected true or false")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"the field {name} is missing")
        return value

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self.error(f"architectures is {names!r}; expected a list with the model class's name")
        return names[0]

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype; bfloat16 where it says none or one that cannot be computed in."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "bfloat16"
        return DTYPES.get(str(name).removeprefix("torch."), torch.bfloat16)

    @property
    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size")

    @property
    def intermediate_size(self) -> int:
        return self.integer("intermediate_size")

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=_MOST_LAYERS)

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.integer("num_key_value_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", self.hidden_size // self.num_heads)

    @property
    def rms_norm_eps(self) -> float:
        return self.number("rms_norm_eps", 1e-6)

    @property
    def tie_word_embeddings(self) -> bool:
        return self.flag("tie_word_embeddings", False)


def read_config(folder: Path) -> HFConfig:
    """config.json (and the eos ids of generation_config.json, which win) of a checkpoint folder."""
    values = _read_json(folder / "config.json")
    eos = values.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    return HFConfig(values, str(folder / "config.json"), eos_ids(eos, str(folder)))


def eos_ids(value: Any, source: str) -> tuple[int, ...]:
    """eos_token_id as configs give it: nothing, one id or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in ids):
        raise ModelError(f"{source}: eos_token_id is {value!r}; expected a token id or a list of them")
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values


def _parse_rope(config: HFConfig) -> RopeConfig:
    """Rotary settings from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older)."""
    settings = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise config.error(f"the rotary settings are {settings!r}; expected a JSON object")
    settings = dict(settings)
    if any(isinstance(value, dict) for value in settings.values()):
        raise config.error("rope_parameters differ by layer type, which is not supported")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise config.error(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    settings.setdefault("rope_theta", config.number("rope_theta", 10000.0))
    partial = settings.get("partial_rotary_factor", config.values.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise config.error(f"partial_rotary_factor is {partial}; only whole heads can be rotated")

    def number(name: str, default: float | None = None, above: float | None = None) -> float:
        value = settings.get(name)
        value = default if value is None else value
        if not _is_number(value) or (above is not None and value <= above):
            wanted = "a number" if above is None else f"a number above {above:g}"
            raise config.error(f"the rotary setting {name} is {value!r}; expected {wanted}")
        return value

    max_positions = config.integer("max_position_embeddings")
    original = int(number("original_max_position_embeddings", max_positions, above=0))
    factor = number("factor", 1.0 if kind == "default" else None, above=0)
    if kind == "yarn":
        # Configs often keep the unstretched length here and leave the stretching to the factor.
        max_positions = max(max_positions, int(original * factor))
    latent = "qk_rope_head_dim" in config.values
    dim = config.integer("qk_rope_head_dim") if latent else config.head_dim
    if dim % 2:
        raise config.error(f"heads of {dim} numbers cannot be rotated in pairs")
    attention_factor = settings.get("attention_factor")
    return RopeConfig(
        dim=dim,
        theta=number("rope_theta", above=1),
        max_positions=max_positions,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0, above=0),
        beta_slow=number("beta_slow", 1.0, above=0),
        attention_factor=None if attention_factor is None else number("attention_factor"),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=bool(settings.get("truncate", True)),
        interleaved=config.flag("rope_interleave", latent),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _parse_fp8_block(config: HFConfig) -> tuple[int, int] | None:
    quantization = config.values.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise config.error(f"quantization_config is {quantization!r}; expected a JSON object")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8":
        raise config.error(f"quantization_config asks for quant_method {method!r}; supported: 'fp8' (in blocks)")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(x, int) and x > 0 for x in block):
        raise config.error(
            f"quantization_config has weight_block_size {block!r}; expected two sizes such as [128, 128]: "
            "'fp8' is supported with a scale for each block"
        )
    return block[0], block[1]
