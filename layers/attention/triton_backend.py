"""Attention on a CUDA device: Triton kernels over the paged cache.

Nothing here waits for the device. A decode pass reads every length on the device and its launch grids depend on the
batch size only, so it can be captured in a CUDA graph; padding rows use request row 0, length 1 and slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from layers.attention.base import Attention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels.triton_cache import store_kv
from layers.kernels.triton_decode import DecodeWorkspace, choose_splits, decode_attention
from layers.kernels.triton_prefill import TileShape, list_tiles, prefill_attention
from layers.kernels.triton_widths import HeadWidths
from layers.kv_cache import KVCache
from layers.transfer import to_device


@dataclass
class TritonPlan:
    """What one pass's layers share. tiles: by tokens a tile, int32 [L, 2] on the device. workspaces: by shape."""

    extend_lens: list[int]
    device: torch.device
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    workspaces: dict[tuple[int, int, int], DecodeWorkspace] = field(default_factory=dict)

    def tiles_of(self, tile_tokens: int) -> torch.Tensor:
        """The pass's prefill tiles, copied to the device at the first layer that asks."""
        tiles = self.tiles.get(tile_tokens)
        if tiles is None:
            tiles = to_device(list_tiles(self.extend_lens, tile_tokens), torch.int32, self.device)
            self.tiles[tile_tokens] = tiles
        return tiles

    def workspace_of(self, num_heads: int, num_splits: int, v_head_dim: int) -> DecodeWorkspace | None:
        """Room for the partial results of `num_splits` splits; None where there is nothing to join."""
        if num_splits == 1:
            return None
        key = (num_heads, num_splits, v_head_dim)
        workspace = self.workspaces.get(key)
        if workspace is None:
            batch = len(self.extend_lens)
            workspace = DecodeWorkspace.allocate(batch, num_heads, num_splits, v_head_dim, self.device)
            self.workspaces[key] = workspace
        return workspace


class TritonAttention:
    """num_sms: multiprocessors to fill, which sets how finely a decode pass is split; None asks the current device."""

    def __init__(self, num_sms: int | None = None) -> None:
        self.num_sms = torch.cuda.get_device_properties().multi_processor_count if num_sms is None else num_sms

    def can_record(self, kv_cache: KVCache) -> bool:
        return True

    def plan(self, batch: ForwardBatch) -> None:
        batch.plan = TritonPlan(batch.extend_lens_cpu, batch.request_table.device)

    def forward(
        self,
        layer: Attention,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        plan: TritonPlan = batch.plan
        value_in_key = batch.kv_cache.spec.value_in_key
        k_SKD, v_SKE = batch.kv_cache.k(layer.layer_id), batch.kv_cache.v(layer.layer_id)
        store_kv(
            _unit_stride(k_TKD),
            None if value_in_key or v_TKE is None else _unit_stride(v_TKE),
            batch.slots,
            k_SKD,
            None if value_in_key else v_SKE,
        )
        q_TND = _unit_stride(q_TND)
        if batch.mode == ForwardMode.DECODE:
            num_splits = choose_splits(
                batch.batch_size, layer.num_heads, layer.num_kv_heads, batch.request_table.shape[1], self.num_sms
            )
            return decode_attention(
                q_TND,
                k_SKD,
                v_SKE,
                batch.request_table,
                batch.request_rows,
                batch.seq_lens,
                layer.scale,
                num_splits,
                value_in_key,
                plan.workspace_of(layer.num_heads, num_splits, layer.v_head_dim),
            )
        widths = HeadWidths.of(layer.head_dim, layer.v_head_dim, value_in_key)
        shape = TileShape.of(layer.num_heads, layer.num_kv_heads, widths, q_TND.dtype)
        return prefill_attention(
            q_TND,
            k_SKD,
            v_SKE,
            batch.request_table,
            batch.request_rows,
            batch.seq_lens,
            batch.query_start,
            plan.tiles_of(shape.tokens),
            shape,
            layer.scale,
            value_in_key,
        )


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` with a contiguous innermost dimension; the kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
