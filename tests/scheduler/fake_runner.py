"""A runner without a model: it checks what the scheduler promises about KV memory and answers with known tokens.

Each KV slot remembers the (position, token) written to it. A step reads every visible position back through the request
table and fails unless it finds the request's own tokens, so a page given away too early or shared wrongly is caught at
once. The sampled token is a hash of all tokens so far.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable

import numpy as np
import torch

from scheduler.batch import Batch, ItemResult
from scheduler.memory import KVMemory
from scheduler.messages import GenerateRequest, RequestOutput, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerLimits


def next_token(tokens: list[int], vocab: int) -> int:
    return zlib.crc32(array("q", tokens).tobytes()) % vocab


def expected_output(prompt: list[int], params: SamplingParams, vocab: int, eos: tuple[int, ...]) -> list[int]:
    tokens, output = list(prompt), []
    while len(output) < params.max_new_tokens:
        output.append(next_token(tokens, vocab))
        tokens.append(output[-1])
        if output[-1] in eos and not params.ignore_eos:
            break
    return output


class FakePending:
    """A step that is computed when its results are wanted, as late as a device may be."""

    def __init__(self, batch: Batch, compute: Callable[[], list[ItemResult]]) -> None:
        self.batch, self._compute = batch, compute

    def wait(self) -> list[ItemResult]:
        return self._compute()


class FakeRunner:
    def __init__(self, memory: KVMemory, vocab: int) -> None:
        self.memory, self.vocab = memory, vocab
        num_slots = (memory.allocator.num_pages + 1) * memory.page_size
        self.kv = np.full((num_slots, 2), -1, dtype=np.int64)
        self.last_tokens: dict[int, int] = {}
        self.nan_rids: set[str] = set()

    def launch(self, batch: Batch) -> FakePending:
        placed = []
        for item in batch.items:
            residence = item.request.residence
            assert residence is not None
            slots = self.memory.slots(residence, item.start, item.end)
            self.memory.table[residence.row, item.start : item.end] = torch.from_numpy(slots).int()
            placed.append((residence.row, slots, self.memory.table[residence.row, : item.end].numpy().copy()))
        return FakePending(batch, lambda: self._compute(batch, placed))

    def _compute(self, batch: Batch, placed: list[tuple[int, np.ndarray, np.ndarray]]) -> list[ItemResult]:
        """placed: row, slots to write and slots to read of each item, as they were when it was launched."""
        results = []
        self.last_tokens.update(batch.seeds)
        for item, (row, slots, readable) in zip(batch.items, placed, strict=True):
            tokens = item.request.tokens()
            new = [self.last_tokens[row]] if item.is_decode else tokens[item.start : item.end]
            self.kv[slots, 0] = np.arange(item.start, item.end)
            self.kv[slots, 1] = new
            visible = self.kv[readable]
            assert (visible[:, 0] == np.arange(item.end)).all(), f"{item.request.rid}: a KV slot was overwritten"
            tokens = visible[:, 1].tolist()
            known = item.request.tokens()[: item.end]
            assert tokens[: len(known)] == known, f"{item.request.rid}: KV of other tokens"
            result = ItemResult()
            if item.samples:
                result.token = next_token(tokens, self.vocab)
                result.valid = item.request.rid not in self.nan_rids
                self.last_tokens[row] = result.token
            results.append(result)
        return results


class FakeEngine:
    """Scheduler and fake runner with both loops."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_requests: int = 8,
        context: int = 128,
        chunk: int | None = 16,
        vocab: int = 50,
        eos: tuple[int, ...] = (7,),
        overlap: bool = False,
        policy: str = "fcfs",
        queued: int | None = None,
        prefix_cache: bool = True,
        conservativeness: float = 1.0,
        role: Callable[[FakeEngine, SchedulerLimits], Scheduler] | None = None,
    ) -> None:
        """role: makes the scheduler, for the two sides of a hand-over."""
        context = min(context, num_pages * page_size)
        self.memory = KVMemory(
            num_pages, page_size, max_requests, context, torch.device("cpu"), use_prefix_cache=prefix_cache
        )
        limits = SchedulerLimits(context, vocab, chunk, 64, queued, policy, conservativeness)
        self.runner = FakeRunner(self.memory, vocab)
        self.vocab, self.eos, self.overlap = vocab, eos, overlap
        self.scheduler = Scheduler(self.memory, limits, eos) if role is None else role(self, limits)
        self.pending: FakePending | None = None
        self.batches: list[Batch] = []
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def submit(self, rid: str, prompt: list[int], **params: int | bool) -> None:
        self.scheduler.add(GenerateRequest(rid, prompt, SamplingParams(**{"max_new_tokens": 8, "seed": 1, **params})))

    def step(self) -> list[RequestOutput]:
        batch = self.scheduler.next_batch()
        launched = None
        if batch is not None:
            self.batches.append(batch)
            launched = self.runner.launch(batch)
        finished, self.pending = (self.pending, launched) if self.overlap else (launched, None)
        outputs = self.scheduler.take_early_outputs()
        if finished is not None:
            outputs += self.scheduler.process(finished.batch, finished.wait())
        for output in outputs:
            assert output.rid not in self.reasons, f"output for {output.rid} after its end"
            self.tokens.setdefault(output.rid, []).extend(output.token_ids)
            if output.finish is not None:
                self.reasons[output.rid] = output.finish.reason
                self.messages[output.rid] = output.finish.message
        return outputs

    def run(self, limit: int = 10_000) -> dict[str, tuple[list[int], str]]:
        """Steps until idle: rid -> (all tokens since the start, finish reason)."""
        for _ in range(limit):
            if not self.step() and self.scheduler.is_idle and self.pending is None:
                return {rid: (self.tokens[rid], self.reasons[rid]) for rid in self.tokens}
        raise AssertionError("not idle after the step limit")
