"""CUDA graphs of decode passes: captured once for a ladder of batch sizes, replayed for any batch up to the largest.

A replay copies the batch into the graph's fixed tensors and fills the rest with padding rows (request row 0, one
visible position, slot 0), whose keys and values land in the padding slot and whose logits nobody reads. The attention
backend's decode path must depend on the batch size only, never on lengths; `layers.attention.triton_backend` says how
it does.

Shape letters: B requests, M largest captured batch, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch

from layers.attention import AttentionBackend
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kv_cache import KVCache
from scheduler.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Eager passes before a capture: kernels compile and libraries set themselves up outside of it.
_WARM_UP_PASSES = 2


def graph_sizes(max_batch: int) -> list[int]:
    """Ascending batch sizes to capture, ending at `max_batch`: closer where a padding row costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, max_batch + 1, 64)]
    return [size for size in sizes if size < max_batch] + [max_batch]


class DecodeGraphs:
    """One captured graph a batch size, over shared inputs, a shared logits buffer and one memory pool.

    forward: decode batch (already planned) -> logits [B, V] float32. It runs under capture, so it must not wait for the
        device or depend on a tensor's values.
    request_table, kv_cache, attention: the ones every later batch uses; graphs hold their addresses.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        request_table: torch.Tensor,
        kv_cache: KVCache,
        attention: AttentionBackend,
        max_batch: int,
    ) -> None:
        self._forward = forward
        self._request_table = request_table
        self._kv_cache = kv_cache
        self._attention = attention
        device = request_table.device
        self.sizes = graph_sizes(max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Rows: input ids, positions, slots, request rows. Zeros are what padding needs.
        self._indices_4M = torch.zeros(4, max_batch, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._extend_lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._logits_MV: torch.Tensor | None = None
        # The batches' plans own tensors the graphs write.
        self._batches: dict[int, ForwardBatch] = {}

    @classmethod
    def capture(cls, runner: ModelRunner, max_batch: int) -> DecodeGraphs:
        """Graphs of `runner`'s model for batches up to `max_batch`; takes seconds, and the pool's memory for good."""
        started = time.monotonic()
        free_before = torch.cuda.mem_get_info(runner.device)[0]

        def forward(batch: ForwardBatch) -> torch.Tensor:
            return runner.model.logits(runner.model.forward(batch))

        graphs = cls(forward, runner.memory.table, runner.kv_cache, runner.attention, max_batch)
        graphs.capture_all()
        logger.info(
            "captured decode graphs for %d batch sizes up to %d in %.1f s, %.2f GiB",
            len(graphs.sizes),
            max_batch,
            time.monotonic() - started,
            (free_before - torch.cuda.mem_get_info(runner.device)[0]) / 2**30,
        )
        return graphs

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size, the largest first so that the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._request_table.device)  # type: ignore[no-untyped-call]
        for size in reversed(self.sizes):
            batch = self._batches[size] = self._batch(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_PASSES):
                    self._attention.plan(batch)
                    logits_BV = self._forward(batch)
                if self._logits_MV is None:
                    self._logits_MV = torch.empty_like(logits_BV)
            torch.cuda.current_stream().wait_stream(stream)
            del logits_BV
            self._attention.plan(batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                # One buffer for all sizes: outputs of their own could not share the pool's memory.
                self._logits_MV[:size].copy_(self._forward(batch))
            self._graphs[size] = graph
        torch.cuda.synchronize()

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is a decode of at most M requests."""
        return batch.mode == ForwardMode.DECODE and 0 < batch.batch_size <= self.sizes[-1]

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [B, V] float32 of a batch that `can_run`; a view that the next replay overwrites."""
        count = batch.batch_size
        size = self.sizes[bisect_left(self.sizes, count)]
        input_ids, positions, slots, request_rows = self._indices_4M[:, :count].unbind(0)
        torch._foreach_copy_(
            [input_ids, positions, slots, request_rows, self._seq_lens[:count]],
            [batch.input_ids, batch.positions, batch.slots, batch.request_rows, batch.seq_lens],
        )
        if count < size:
            self._indices_4M[:, count:size].zero_()
            self._seq_lens[count:size].fill_(1)
        self._graphs[size].replay()
        assert self._logits_MV is not None
        return self._logits_MV[:count]

    def _batch(self, size: int) -> ForwardBatch:
        input_ids, positions, slots, request_rows = self._indices_4M[:, :size].unbind(0)
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
        )
