"""Random weights that depend on a tensor's checkpoint name and full shape only, so that every layout has the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch


def dummy_tensor(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor, float32 on the CPU.

    Norm weights lie near 1, biases near 0, matrices are scaled by 1 / sqrt(inputs) so that activations stay near
    unit size and so do the logits.
    """
    digest = hashlib.sha256(f"{name}:{tuple(shape)}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    values = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    if len(shape) >= 2:
        return values.mul_(1 / math.sqrt(shape[-1]))
    if "norm" in name:
        return values.mul_(0.1).add_(1)
    return values.mul_(0.1)
