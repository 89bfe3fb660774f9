"""Small host lists to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[Sequence[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The values as a tensor there. A copy from pageable memory would wait for everything launched before it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
