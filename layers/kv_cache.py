"""Key/value tensors of one rank, addressed by slot. Which slot belongs to whom is the scheduler's business.

Shape letters: S slots (a multiple of the page size), K key/value heads of this rank, D key width, E value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

_CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class KVSpec:
    """What one layer caches per token on this rank.

    num_kv_heads, head_dim: the key is [K, D].
    v_head_dim: the value is [K, E].
    value_in_key: the value is the first E numbers of the key and is not stored again (DeepSeek's latent attention,
        where the key is the compressed latent followed by the shared rotary part).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    value_in_key: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes one token takes over all layers."""
        width = self.head_dim + (0 if self.value_in_key else self.v_head_dim)
        return self.num_layers * self.num_kv_heads * width * dtype.itemsize


class KVRegions(NamedTuple):
    """Memory that holds KV, one entry a region; a region is cut into pages of `page_bytes`."""

    addresses: list[int]
    num_bytes: list[int]
    page_bytes: list[int]
    layers: list[int]


class KVCache:
    """k(layer) [S, K, D] and v(layer) [S, K, E]; for `value_in_key` v is a view of k. Slot 0 is padding."""

    def __init__(self, spec: KVSpec, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.spec = spec
        self.dtype = dtype
        shape = (spec.num_layers, num_slots, spec.num_kv_heads)
        # Zeroed, because padded rows attend to slot 0 and garbage there could be NaN.
        self._k = _zeros((*shape, spec.head_dim), dtype, device)
        if spec.value_in_key:
            self._v = self._k[..., : spec.v_head_dim]
        else:
            self._v = _zeros((*shape, spec.v_head_dim), dtype, device)
        # Indexing a tensor by layer costs a microsecond or more each time; layers ask twice a step.
        self._k_layers = list(self._k.unbind(0))
        self._v_layers = list(self._v.unbind(0))

    @property
    def device(self) -> torch.device:
        return self._k.device

    def regions(self, page_size: int) -> KVRegions:
        """Memory of every layer's keys, then of every layer's values."""
        stored = [self._k_layers] if self.spec.value_in_key else [self._k_layers, self._v_layers]
        tensors = [(layer, tensor) for kind in stored for layer, tensor in enumerate(kind)]
        return KVRegions(
            addresses=[tensor.data_ptr() for _, tensor in tensors],
            num_bytes=[tensor.nbytes for _, tensor in tensors],
            page_bytes=[tensor[0].nbytes * page_size for _, tensor in tensors],
            layers=[layer for layer, _ in tensors],
        )

    def k(self, layer: int) -> torch.Tensor:
        return self._k_layers[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v_layers[layer]

    def write(self, layer: int, slots: torch.Tensor, k_TKD: torch.Tensor, v_TKE: torch.Tensor | None) -> None:
        """Store the rows at `slots` [T] int64; `v_TKE` is ignored for `value_in_key`."""
        self._k_layers[layer].index_copy_(0, slots, k_TKD.to(self.dtype))
        if not self.spec.value_in_key:
            assert v_TKE is not None
            self._v_layers[layer].index_copy_(0, slots, v_TKE.to(self.dtype))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On the CPU numpy leaves zeroing to the kernel, page by page on first use; torch.zeros takes seconds for 4 GB."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE  # a row that starts within a cache line takes one more to read
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
