"""The fixed tensors that recorded decode passes read.

Shape letters: M largest recorded batch.
"""

from __future__ import annotations

import torch

from layers.attention import AttentionBackend
from layers.forward_batch import ForwardBatch, ForwardMode, StepRows
from layers.kv_cache import KVCache


class DecodeInputs:
    """Holds one decode batch of up to `max_batch` requests; batches of all sizes begin at the same addresses.

    request_table, kv_cache, attention: the ones every later batch uses; recordings hold their addresses.
    num_groups: data-parallel ranks that replay together. None where no expert layer needs to know which rows are real.
    """

    def __init__(
        self,
        request_table: torch.Tensor,
        kv_cache: KVCache,
        attention: AttentionBackend,
        max_batch: int,
        num_groups: int | None = None,
    ) -> None:
        self._request_table = request_table
        self._kv_cache = kv_cache
        self._attention = attention
        self._num_groups = num_groups
        device = request_table.device
        # Rows: input ids, positions, slots, request rows. Zeros are what padding needs.
        self._indices_4M = torch.zeros(4, max_batch, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._extend_lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._row_numbers_M1 = torch.arange(max_batch, device=device)[:, None]
        self._padding_M1 = torch.ones(max_batch, 1, dtype=torch.bool, device=device)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy a decode of at most `size` requests, or an idle batch, and let padding rows follow up to `size`."""
        count = batch.batch_size
        if count:
            input_ids, positions, slots, request_rows = self._indices_4M[:, :count].unbind(0)
            torch._foreach_copy_(
                [input_ids, positions, slots, request_rows, self._seq_lens[:count]],
                [batch.input_ids, batch.positions, batch.slots, batch.request_rows, batch.seq_lens],
            )
        if count < size:
            self._indices_4M[:, count:size].zero_()
            self._seq_lens[count:size].fill_(1)
        if self._num_groups is not None:
            torch.ge(self._row_numbers_M1, count, out=self._padding_M1)

    def batch(self, size: int) -> ForwardBatch:
        """A decode of `size` requests that reads what `fill` writes; its lists of lengths say 1."""
        input_ids, positions, slots, request_rows = self._indices_4M[:, :size].unbind(0)
        rows = None
        if self._num_groups is not None:
            counts = (size,) * self._num_groups
            rows = StepRows(counts, "max", size, extends=False, padding_T1=self._padding_M1[:size])
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            request_table=self._request_table,
            request_rows=request_rows,
            seq_lens=self._seq_lens[:size],
            extend_lens=self._extend_lens[:size],
            query_start=self._query_start[: size + 1],
            seq_lens_cpu=[1] * size,
            extend_lens_cpu=[1] * size,
            kv_cache=self._kv_cache,
            attention=self._attention,
            rows=rows,
        )
