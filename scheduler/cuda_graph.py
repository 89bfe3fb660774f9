"""Decode passes recorded once for a ladder of batch sizes, replayed for any batch up to the largest.

A replay copies the batch into the recording's fixed tensors and fills the rest with padding rows (request row 0, one
visible position, slot 0), whose keys and values land in the padding slot and whose logits nobody reads. With several
data-parallel ranks every rank replays the size that they have agreed on, one without requests on padding rows alone.
Which rows are padding is in a tensor too, so that no expert sees the others.

On CUDA devices recordings are CUDA graphs. The attention backend's decode path must depend on the batch size only,
never on lengths; `layers.attention.triton_backend` says how it does.

Shape letters: B requests, M largest recorded batch, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from layers.attention import AttentionBackend
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kv_cache import KVCache
from scheduler.decode_inputs import DecodeInputs
from scheduler.model_runner import ModelRunner
from scheduler.recorder import Recorder

logger = logging.getLogger(__name__)

# Eager passes before each recording.
_WARM_UP_PASSES = 2


def graph_sizes(max_batch: int) -> list[int]:
    """Ascending batch sizes to record, ending at `max_batch`: closer where a padding row costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, max_batch + 1, 64)]
    return [size for size in sizes if size < max_batch] + [max_batch]


class DecodeGraphs:
    """One recording a batch size, over shared inputs and a shared logits buffer.

    forward: decode batch (already planned) -> logits [B, V] float32. It is recorded, so it must not wait for the device
        or depend on a tensor's values.
    request_table, kv_cache, attention, num_groups: see DecodeInputs.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        request_table: torch.Tensor,
        kv_cache: KVCache,
        attention: AttentionBackend,
        max_batch: int,
        vocab_size: int,
        num_groups: int | None = None,
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._inputs = DecodeInputs(request_table, kv_cache, attention, max_batch, num_groups)
        self.sizes = graph_sizes(max_batch)
        self._replays: dict[int, Callable[[], None]] = {}
        # One buffer for all sizes: outputs of their own could not share a pool's memory.
        self._logits_MV = torch.empty(max_batch, vocab_size, dtype=torch.float32, device=request_table.device)
        # The batches' plans own tensors that recordings write.
        self._batches: dict[int, ForwardBatch] = {}

    @classmethod
    def capture(
        cls, runner: ModelRunner, recorder: Recorder, max_batch: int, num_groups: int | None = None
    ) -> DecodeGraphs:
        """Recordings of `runner`'s model for batches up to `max_batch`; takes seconds, and their memory for good.

        Every rank of the engine calls it at the same time with the same sizes.
        """
        started = time.monotonic()
        free_before = _free_bytes(runner.device)

        def forward(batch: ForwardBatch) -> torch.Tensor:
            return runner.model.logits(runner.model.forward(batch))

        graphs = cls(
            forward,
            runner.memory.table,
            runner.kv_cache,
            runner.attention,
            max_batch,
            runner.info.vocab_size,
            num_groups,
        )
        graphs.record_all(recorder)
        logger.info(
            "captured decode graphs for %d batch sizes up to %d in %.1f s, %.2f GiB",
            len(graphs.sizes),
            max_batch,
            time.monotonic() - started,
            (free_before - _free_bytes(runner.device)) / 2**30,
        )
        return graphs

    @torch.inference_mode()
    def record_all(self, recorder: Recorder) -> None:
        """Record every size, the largest first so that the smaller ones fit into its memory."""
        for size in reversed(self.sizes):
            batch = self._batches[size] = self._inputs.batch(size)
            work = partial(self._pass, batch)
            for _ in range(_WARM_UP_PASSES):
                self._attention.plan(batch)
                recorder.warm_up(work)
            self._attention.plan(batch)
            self._replays[size] = recorder.record(work)

    def size_for(self, batch: ForwardBatch) -> int:
        """The smallest recorded size that holds a decode of at most M requests; 0 for any other batch."""
        if batch.mode is not ForwardMode.DECODE or not 0 < batch.batch_size <= self.sizes[-1]:
            return 0
        return self.sizes[bisect_left(self.sizes, batch.batch_size)]

    def replay(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """Logits [B, V] float32; a view that the next replay overwrites.

        batch: a decode of at most `size` requests, or an idle one. size: one of `sizes`.
        """
        self._inputs.fill(batch, size)
        self._replays[size]()
        return self._logits_MV[: batch.batch_size]

    def _pass(self, batch: ForwardBatch) -> None:
        self._logits_MV[: batch.batch_size].copy_(self._forward(batch))


def _free_bytes(device: torch.device) -> int:
    """Of a CUDA device's memory; 0 for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
