"""KV pages on a device, with KVArgs for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from disagg.base import KVArgs


class DevicePages:
    """Regions of [pages, page bytes] uint8, all parts of one allocation; the page size is 16 tokens."""

    def __init__(
        self,
        device: str,
        fill: bool = False,
        num_pages: int = 512,
        num_regions: int = 6,
        heads: int = 2,
        head_bytes: int = 256,
        seed: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self._heads = heads
        self._device = device
        shape = (num_regions, num_pages, 16 * heads * head_bytes)
        if fill:
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
        else:
            whole = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.regions = list(whole.unbind(0))
        self._aux = np.ones((4, 64), dtype=np.uint8)

    def args(self, **changes: object) -> KVArgs:
        args = KVArgs(
            model="tiny",
            page_size=16,
            kv_dtype="uint8",
            kv_layout="region-page",
            kv_head_num=self._heads,
            total_kv_head_num=self._heads,
            kv_data_ptrs=[region.data_ptr() for region in self.regions],
            kv_data_lens=[region.numel() for region in self.regions],
            kv_item_lens=[region.shape[1] for region in self.regions],
            kv_layer_ids=list(range(len(self.regions))),
            aux_data_ptrs=[self._aux.ctypes.data],
            aux_data_lens=[self._aux.nbytes],
            aux_item_lens=[self._aux.shape[1]],
            device=self._device,
        )
        return replace(args, **changes)  # type: ignore[arg-type]
