"""What Triton kernels are compiled with: widths as the powers of two that blocks must have, precision of products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


def power_of_two_above(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least `n` and at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """Of matrix products with operands of this type: float32 ones are not rounded to tf32 on their way."""
    return "ieee" if dtype == torch.float32 else "tf32"


@lru_cache
def has_large_shared_memory() -> bool:
    """Whether a multiprocessor has 228 KiB of shared memory (Hopper and later data centre parts; Ampere has 164)."""
    return torch.cuda.is_available() and torch.cuda.get_device_properties().shared_memory_per_multiprocessor >= 233472


@dataclass(frozen=True)
class HeadWidths:
    """A key of width D as two blocks, d1 + d2 >= D (d2 is 0 where one block holds it), a value of width E in one.

    96 becomes 64 + 32 and 576 becomes 512 + 64, where one block would be 128 and 1024. `value_is_d1`: the first key
    block is the value (the compressed latent of DeepSeek's attention), so it is loaded once for both.
    """

    d1: int
    d2: int
    block_e: int
    value_is_d1: bool

    @staticmethod
    @lru_cache
    def of(head_dim: int, v_head_dim: int, value_in_key: bool) -> HeadWidths:
        block_e = power_of_two_above(v_head_dim)
        if value_in_key and block_e == v_head_dim:
            rest = head_dim - v_head_dim
            return HeadWidths(v_head_dim, power_of_two_above(rest) if rest else 0, block_e, True)
        d1 = max(16, 1 << (head_dim.bit_length() - 1))
        rest = max(0, head_dim - d1)
        return HeadWidths(d1, power_of_two_above(rest) if rest else 0, block_e, False)
