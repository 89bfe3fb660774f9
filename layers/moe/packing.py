"""Several tensors with a row for each token as one, so that one collective carries all of them."""

from __future__ import annotations

import torch


def pack_rows(*parts: torch.Tensor) -> torch.Tensor:
    """[T, bytes of a row] uint8 of tensors with T rows each."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack_rows(packed: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The tensors that went into `pack_rows`, of widths and dtypes like these.

    A part starts at a multiple of its dtype's size if those of wider dtypes come first or widths are even.
    """
    widths = [part.shape[1] * part.element_size() for part in like]
    parts = packed.split(widths, dim=1)
    return [part.contiguous().view(form.dtype) for part, form in zip(parts, like, strict=True)]
