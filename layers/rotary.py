"""Rotary position embedding (Su et al. 2021, RoFormer) and the ways of stretching it to longer contexts.

Shape letters: T token rows, N heads, D rotated width of a head, P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from layers.kernels import cpu


@dataclass(frozen=True)
class RopeConfig:
    """dim: rotated width of a head. theta: base of the frequencies. max_positions: rows of the table.

    kind: "default"; "linear" (all frequencies divided by `factor`); "llama3" (only the slow ones, with a smooth step
    between `low_freq_factor` and `high_freq_factor` turns of the original context); "yarn" (Peng et al. 2023: a ramp
    between `beta_fast` and `beta_slow` turns, and an attention temperature).
    attention_factor, mscale, mscale_all_dim: "yarn": what cosines and sines are multiplied by; attention_factor wins,
    else the quotient of the two mscale temperatures where both are given, else the paper's 0.1 ln(factor) + 1.
    truncate: "yarn": round the ends of the ramp to whole dimensions.
    interleaved: rotate the pairs (0, 1), (2, 3), ... as DeepSeek does, not (0, D/2), (1, D/2 + 1), ...
    """

    dim: int
    theta: float
    max_positions: int
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    interleaved: bool = False


ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """([D / 2] float32 radians per position, factor on cosines and sines).

    On the CPU whatever the default device: a frequency's last bit moves far positions, and devices differ in it.
    """
    exponent = torch.arange(0, config.dim, 2, dtype=torch.float32, device="cpu") / config.dim
    freqs = 1.0 / config.theta**exponent
    match config.kind:
        case "default":
            return freqs, 1.0
        case "linear":
            return freqs / config.factor, 1.0
        case "llama3":
            return _llama3_frequencies(freqs, config), 1.0
        case "yarn":
            return _yarn_frequencies(freqs, config), _yarn_attention_factor(config)
    raise ValueError(f"rope type {config.kind!r} is not one of {', '.join(ROPE_KINDS)}")


def _llama3_frequencies(freqs: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    turns = config.original_max_positions * freqs / (2 * math.pi)
    # 1 keeps a frequency, 0 divides it by the factor.
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * freqs / config.factor + keep * freqs


def _yarn_frequencies(freqs: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    def dimension(turns: float) -> float:
        """The (fractional) pair that makes this many turns within the original context."""
        ratio = config.original_max_positions / (turns * 2 * math.pi)
        return config.dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    pairs = torch.arange(config.dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * freqs / config.factor + keep * freqs


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def apply_rotary(
    q_TND: torch.Tensor, k_TND: torch.Tensor, cos_sin_TD: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q and k (head counts may differ), in their dtype; cos_sin_TD float32 is [cosines | sines], each D / 2."""
    if q_TND.is_cuda:
        from layers.kernels import triton_elementwise

        return triton_elementwise.apply_rotary(q_TND, k_TND, cos_sin_TD, interleaved)
    if cpu.usable(q_TND):
        return cpu.apply_rotary(q_TND, k_TND, cos_sin_TD, interleaved)
    cos, sin = cos_sin_TD[:, None].chunk(2, dim=-1)
    return _rotate(q_TND, cos, sin, interleaved), _rotate(k_TND, cos, sin, interleaved)


def _rotate(x_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        a, b = x_TND.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x_TND.dtype)
    a, b = x_TND.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_TND.dtype)


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines. Called once a pass with the positions; layers share the rows it returns."""

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.interleaved = config.interleaved
        self.cos_sin_PD: torch.Tensor
        self.register_buffer("cos_sin_PD", _table(config), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """[T, D] float32 rows of the table for positions [T] int64."""
        return self.cos_sin_PD.index_select(0, positions_T)


def _table(config: RopeConfig) -> torch.Tensor:
    """[P, D] float32 on the default device, whatever the model's dtype: bfloat16 angles would move far positions."""
    freqs, factor = inverse_frequencies(config)
    if torch.get_default_device().type == "meta":
        # Only its size is wanted. To compute there would import torch's compiler, which takes longer than torch itself.
        return torch.empty(config.max_positions, 2 * len(freqs), dtype=torch.float32)
    positions_P = torch.arange(config.max_positions, dtype=torch.float32)
    angles_PD = torch.outer(positions_P, freqs.to(positions_P.device))
    return torch.cat((angles_PD.cos(), angles_PD.sin()), dim=-1) * factor
