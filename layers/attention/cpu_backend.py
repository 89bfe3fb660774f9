"""Attention on the CPU by the native kernel, which reads the paged cache in place.

Shape letters: T token rows, N query heads, K key/value heads, D key width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layers.attention.base import Attention
from layers.attention.torch_backend import TorchAttention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels import cpu
from layers.kv_cache import KVCache

# Query lines (rows times the query heads of one key/value head) that share a walk over the keys.
_LINES_PER_TASK = 64


@dataclass
class CpuPlan:
    """What the layers' calls of one pass share.

    args: the kernel's arguments; each layer fills in its own. keep: tensors that `args` points to.
    heads: (query heads, key/value heads, key width, value width, scale) that `args` is set for.
    """

    args: cpu.AttentionArgs
    keep: list[torch.Tensor]
    heads: tuple[int, int, int, int, float] | None = None


class CpuAttention:
    """One kernel call a layer: it writes the new rows to the cache, then attends over the requests' slots.

    A row's result does not depend on the batch it is in, nor on whether it was computed in prefill or in decode.
    Where the kernels cannot be had, or for a dtype they do not know, every call goes to the torch backend.
    """

    def __init__(self) -> None:
        self._torch = TorchAttention()

    def can_record(self, kv_cache: KVCache) -> bool:
        return cpu.usable(kv_cache.k(0))

    def plan(self, batch: ForwardBatch) -> None:
        k_cache = batch.kv_cache.k(0)
        if not cpu.usable(k_cache):
            self._torch.plan(batch)
            return
        keep = [t.contiguous() for t in (batch.slots, batch.request_rows, batch.seq_lens, batch.query_start)]
        args = cpu.AttentionArgs()
        args.slots, args.request_rows, args.seq_lens, args.query_start = (t.data_ptr() for t in keep)
        args.request_table, args.table_row = batch.request_table.data_ptr(), batch.request_table.stride(0)
        args.num_tokens = batch.num_tokens
        args.k_cache_slot, args.k_cache_head, _ = k_cache.stride()
        args.v_cache_slot, args.v_cache_head, _ = batch.kv_cache.v(0).stride()
        args.dtype = cpu.DTYPES[k_cache.dtype]
        args.num_threads = torch.get_num_threads()
        batch.plan = CpuPlan(args, keep)

    def forward(
        self,
        layer: Attention,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        plan = batch.plan
        if not isinstance(plan, CpuPlan):
            return self._torch.forward(layer, q_TND, k_TKD, v_TKE, batch)
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.scale)
        if plan.heads != heads:
            _set_heads(plan, heads, batch)
        args, cache = plan.args, batch.kv_cache
        k_cache = cache.k(layer.layer_id)
        q_TND, k_TKD = _as_rows(q_TND, k_cache.dtype), _as_rows(k_TKD, k_cache.dtype)
        out_TNE = cpu.empty(q_TND.shape[0], layer.num_heads, layer.v_head_dim, dtype=k_cache.dtype)
        args.q, args.k, args.out = q_TND.data_ptr(), k_TKD.data_ptr(), out_TNE.data_ptr()
        args.q_row, args.q_head, _ = q_TND.stride()
        args.k_row, args.k_head, _ = k_TKD.stride()
        if cache.spec.value_in_key:
            args.v = None
        else:
            assert v_TKE is not None
            v_TKE = _as_rows(v_TKE, k_cache.dtype)
            args.v = v_TKE.data_ptr()
            args.v_row, args.v_head, _ = v_TKE.stride()
        args.k_cache, args.v_cache = k_cache.data_ptr(), cache.v(layer.layer_id).data_ptr()
        cpu.attention(args)
        return out_TNE


def _as_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the cache's dtype with each head's numbers side by side."""
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _set_heads(plan: CpuPlan, heads: tuple[int, int, int, int, float], batch: ForwardBatch) -> None:
    """Set head counts and widths, and cut the batch's rows into tasks."""
    args = plan.args
    args.num_heads, args.num_kv_heads, args.head_dim, args.v_head_dim, args.scale = heads
    plan.heads = heads
    if batch.mode is ForwardMode.DECODE:
        args.tasks, args.num_tasks, args.rows_per_task = None, batch.batch_size, 1
        return
    rows = max(1, min(_LINES_PER_TASK * heads[1] // heads[0], max(batch.extend_lens_cpu, default=1)))
    # Last rows first: they see most positions, and a long task should not start when the others are done.
    tasks = [
        (request, first)
        for request, extend in enumerate(batch.extend_lens_cpu)
        for first in reversed(range(0, extend, rows))
    ]
    tasks_X2 = torch.tensor(tasks, dtype=torch.int32)
    plan.keep.append(tasks_X2)
    args.tasks, args.num_tasks, args.rows_per_task = tasks_X2.data_ptr(), len(tasks), rows
