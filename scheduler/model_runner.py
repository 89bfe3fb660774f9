"""Runs batches on the model: builds its tensors, runs the forward pass, samples, keeps the last tokens on the device.

Shape letters: T token rows, B requests, N sampling rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from layers.attention import AttentionBackend
from layers.forward_batch import ForwardBatch, ForwardMode, StepRows
from layers.kv_cache import KVCache
from layers.sampling import token_logprobs
from layers.transfer import to_device
from models.base import CausalLM, ModelInfo
from scheduler.batch import Batch, BatchItem, ItemResult
from scheduler.memory import KVMemory
from scheduler.request import Residence
from scheduler.sampler import Sampler

# Rows of prompt logits held at a time: 256 rows of a 150k vocabulary in float32 are 150 MB.
_PROMPT_LOGITS_BLOCK = 256


class DecodeGraphRunner(Protocol):
    """Replays recorded decode passes."""

    def size_for(self, batch: ForwardBatch) -> int:
        """The recorded number of requests to run the batch with; 0 where it has to run eagerly."""

    def replay(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """Logits [B, V] float32 of a decode or idle batch, by a pass of `size` requests; valid until the next one."""


class PendingResult:
    """Results of a launched step on their way to the host."""

    def __init__(self, batch: Batch, tensors: dict[str, torch.Tensor], logprob_rows: list[int]) -> None:
        self.batch = batch
        self._logprob_rows = logprob_rows
        self._event: torch.cuda.Event | None = None
        self._host: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                self._host[name] = host
            else:
                self._host[name] = tensor
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[ItemResult]:
        """Results in item order, once the device has them."""
        if self._event is not None:
            self._event.synchronize()
        results = [ItemResult() for _ in self.batch.items]
        sampling = [i for i, item in enumerate(self.batch.items) if item.samples]
        if sampling:
            tokens, valid = self._host["tokens"].tolist(), self._host["valid"].tolist()
            for i, token, ok in zip(sampling, tokens, valid, strict=True):
                results[i].token, results[i].valid = token, ok
        if self._logprob_rows:
            chosen = self._host["chosen"].tolist()
            values, ids = self._host["top_values"].tolist(), self._host["top_ids"].tolist()
            for at, row in enumerate(self._logprob_rows):
                i = sampling[row]
                wanted = self.batch.items[i].request.message.top_logprobs
                results[i].logprob = chosen[at]
                results[i].top = list(zip(ids[at][:wanted], values[at][:wanted], strict=True))
        if "prompt_chosen" in self._host:
            self._split_prompt_logprobs(results)
        return results

    def _split_prompt_logprobs(self, results: list[ItemResult]) -> None:
        chosen = self._host["prompt_chosen"].tolist()
        values, ids = self._host["prompt_values"].tolist(), self._host["prompt_ids"].tolist()
        at = 0
        for item, result in zip(self.batch.items, results, strict=True):
            wanted = item.request.message.top_logprobs
            for _ in item.prompt_logprob_rows():
                top = list(zip(ids[at][:wanted], values[at][:wanted], strict=True))
                result.prompt_logprobs.append((chosen[at], top))
                at += 1


class _TokenRows(NamedTuple):
    """A batch's token rows on the host: ids, positions and KV slots, each [T] int64.

    unknown: rows of a mixed batch whose ids only the device may know yet; they stand as 0.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    unknown: list[int]


class ModelRunner:
    """One rank's model with its KV tensors. `launch` returns before the device is done."""

    def __init__(
        self,
        model: CausalLM,
        info: ModelInfo,
        kv_cache: KVCache,
        memory: KVMemory,
        attention: AttentionBackend,
        device: torch.device,
    ) -> None:
        self.model = model
        self.info = info
        self.kv_cache = kv_cache
        self.memory = memory
        self.attention = attention
        self.device = device
        self.graphs: DecodeGraphRunner | None = None
        # The token each resident request sampled last, by request row: the next step reads it here, so that it can
        # be launched before the host has seen the token.
        self.last_tokens = torch.zeros(memory.max_requests + 1, dtype=torch.int64, device=device)
        self.sampler = Sampler(info.eos_token_ids, memory.max_requests, device)

    @torch.inference_mode()
    def launch_idle(self, step_rows: StepRows) -> None:
        """A pass without rows, for the sake of ranks that have some and wait for this one in their expert layers."""
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        no_lengths = none.int()
        batch = ForwardBatch(
            mode=ForwardMode.IDLE,
            input_ids=none,
            positions=none,
            slots=none,
            request_table=self.memory.table,
            request_rows=none,
            seq_lens=no_lengths,
            extend_lens=no_lengths,
            query_start=torch.zeros(1, dtype=torch.int32, device=self.device),
            seq_lens_cpu=[],
            extend_lens_cpu=[],
            kv_cache=self.kv_cache,
            attention=self.attention,
            rows=step_rows,
        )
        if size := self._replay_size(batch):
            assert self.graphs is not None
            self.graphs.replay(batch, size)
        else:
            self.model.forward(batch)

    @torch.inference_mode()
    def launch(self, batch: Batch, step_rows: StepRows | None = None) -> PendingResult:
        """Queue the batch's forward pass and sampling; batches launched later see its tokens and its KV.

        step_rows: what the data-parallel ranks have agreed on; None without others.
        """
        if batch.seeds:
            rows, tokens = zip(*batch.seeds, strict=True)
            self.last_tokens[self._indices(rows)] = self._indices(tokens)
        forward_batch = self._build(batch)
        forward_batch.rows = step_rows
        sampling = batch.sampling_items
        tensors: dict[str, torch.Tensor] = {}
        request_rows = forward_batch.request_rows
        if size := self._replay_size(forward_batch):
            assert self.graphs is not None
            logits_NV = self.graphs.replay(forward_batch, size)
        else:
            self.attention.plan(forward_batch)
            hidden_TH = self.model.forward(forward_batch)
            self._prompt_logprobs(batch, hidden_TH, tensors)
            if not sampling:
                return PendingResult(batch, tensors, [])
            if batch.mode is ForwardMode.EXTEND:
                chosen = self._indices([i for i, item in enumerate(batch.items) if item.samples])
                hidden_TH = hidden_TH[forward_batch.last_rows[chosen]]
                request_rows = request_rows[chosen]
            logits_NV = self.model.logits(hidden_TH)
        tokens_N, valid_N = self.sampler.sample(logits_NV, sampling)
        self.last_tokens[request_rows] = tokens_N
        tensors["tokens"], tensors["valid"] = tokens_N, valid_N
        logprob_rows = [i for i, item in enumerate(sampling) if item.request.message.logprobs]
        if logprob_rows:
            index = self._indices(logprob_rows)
            top = max(sampling[i].request.message.top_logprobs for i in logprob_rows)
            tensors["chosen"], tensors["top_values"], tensors["top_ids"] = token_logprobs(
                logits_NV[index], tokens_N[index], top
            )
        return PendingResult(batch, tensors, logprob_rows)

    def _replay_size(self, batch: ForwardBatch) -> int:
        """Requests of the recorded pass to replay; 0 to run eagerly. With other data-parallel ranks they decide."""
        if batch.rows is not None:
            return batch.rows.padded_num_tokens if batch.rows.layout == "max" else 0
        return 0 if self.graphs is None else self.graphs.size_for(batch)

    def _build(self, batch: Batch) -> ForwardBatch:
        """Tensors of the batch; also writes the new positions' slots into the request table."""
        decode_only = batch.mode is ForwardMode.DECODE
        residences = [_residence(item) for item in batch.items]
        seq_lens = [item.end for item in batch.items]
        extend_lens = [item.num_tokens for item in batch.items]
        rows = np.asarray([residence.row for residence in residences], dtype=np.int64)
        lens = np.asarray(extend_lens, dtype=np.int64)
        tokens = self._decode_rows(batch, residences) if decode_only else self._extend_rows(batch, residences)
        token_rows = np.repeat(rows, lens)
        # One transfer for everything: small copies cost more than their bytes.
        query_start = np.concatenate([[0], np.cumsum(lens)])
        packed = np.concatenate(
            [tokens.ids, tokens.positions, tokens.slots, token_rows, rows, lens, query_start, seq_lens]
        )
        device_packed = torch.from_numpy(packed)
        if self.device.type == "cuda":
            device_packed = device_packed.pin_memory().to(self.device, non_blocking=True)
        num_tokens, count = len(token_rows), len(rows)
        sizes = [num_tokens] * 4 + [count, count, count + 1, count]
        parts = torch.split(device_packed, sizes)
        input_ids, positions_T, slots_T, token_rows_T, rows_B, lens_B, start_B, seq_lens_B = parts
        if decode_only:
            input_ids = self.last_tokens[rows_B]
        elif tokens.unknown:
            at = self._indices(tokens.unknown)
            input_ids[at] = self.last_tokens[token_rows_T[at]]
        self.memory.table[token_rows_T, positions_T] = slots_T.int()
        return ForwardBatch(
            mode=batch.mode,
            input_ids=input_ids,
            positions=positions_T,
            slots=slots_T,
            request_table=self.memory.table,
            request_rows=rows_B,
            seq_lens=seq_lens_B.int(),
            extend_lens=lens_B.int(),
            query_start=start_B.int(),
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens,
            kv_cache=self.kv_cache,
            attention=self.attention,
        )

    def _decode_rows(self, batch: Batch, residences: list[Residence]) -> _TokenRows:
        positions = np.asarray([item.start for item in batch.items], dtype=np.int64)
        slots = [self.memory.slot(r, item.start) for r, item in zip(residences, batch.items, strict=True)]
        return _TokenRows(np.zeros_like(positions), positions, np.asarray(slots, dtype=np.int64), [])

    def _extend_rows(self, batch: Batch, residences: list[Residence]) -> _TokenRows:
        ids: list[int] = []
        unknown: list[int] = []
        for item in batch.items:
            if item.is_decode:
                unknown.append(len(ids))
                ids.append(0)
            else:
                ids.extend(item.request.tokens()[item.start : item.end])
        positions = [np.arange(item.start, item.end, dtype=np.int64) for item in batch.items]
        slots = [self.memory.slots(r, item.start, item.end) for r, item in zip(residences, batch.items, strict=True)]
        return _TokenRows(np.asarray(ids, dtype=np.int64), np.concatenate(positions), np.concatenate(slots), unknown)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)

    def _prompt_logprobs(self, batch: Batch, hidden_TH: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        rows: list[int] = []
        targets: list[int] = []
        top = 0
        offset = 0
        for item in batch.items:
            positions = item.prompt_logprob_rows()
            if positions:
                rows.extend(offset + position - item.start for position in positions)
                targets.extend(item.request.message.input_ids[positions.start + 1 : positions.stop + 1])
                top = max(top, item.request.message.top_logprobs)
            offset += item.num_tokens
        if not rows:
            return
        parts = []
        for start in range(0, len(rows), _PROMPT_LOGITS_BLOCK):
            block = self._indices(rows[start : start + _PROMPT_LOGITS_BLOCK])
            target = self._indices(targets[start : start + _PROMPT_LOGITS_BLOCK])
            parts.append(token_logprobs(self.model.logits(hidden_TH[block]), target, top))
        chosen, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        tensors["prompt_chosen"], tensors["prompt_values"], tensors["prompt_ids"] = chosen, values, ids


def _residence(item: BatchItem) -> Residence:
    residence = item.request.residence
    assert residence is not None
    return residence
