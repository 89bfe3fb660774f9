"""What a batch's requests ask of their next tokens: logits processors first, then the choice.

The processors change the logits that a token is chosen from, greedy choice included, in this order: repetition penalty,
frequency and presence penalties, logit bias, stop ids held back until the minimum length.

Counts of a request's tokens live on the device, where the next step finds the token just sampled though the host has
not seen it. They begin with what the host knows when the request samples for the first time since it came into memory:
prompt and output so far, so that nothing is to be carried over when a request is retracted, or comes from a prefill
server. Batches in which nobody asks for any of this have none of its cost.

Shape letters: N sampling rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layers.penalties import RowPenalties, TokenCounts
from layers.sampling import RowSampling, sample, uniform
from layers.transfer import to_device
from scheduler.batch import BatchItem
from scheduler.request import Request


@dataclass(frozen=True)
class _Adjustment:
    """Device state of one request since it came into memory. slot: of its token counts; None without penalties.

    bias_ids int64, bias_values float32: its logit bias; empty without one.
    """

    request: Request
    epoch: int
    penalties: RowPenalties
    slot: int | None
    bias_ids: torch.Tensor
    bias_values: torch.Tensor

    @property
    def is_over(self) -> bool:
        return self.request.finish is not None or self.request.epoch != self.epoch


class Sampler:
    """One rank's. `sample` is to be called once for every step that samples, in launch order."""

    def __init__(self, eos_token_ids: Sequence[int], max_requests: int, device: torch.device) -> None:
        """max_requests: in memory at one time."""
        self._eos = frozenset(eos_token_ids)
        self._device = device
        self.counts = TokenCounts(max_requests, device)
        self._adjustments: dict[str, _Adjustment] = {}

    def sample(self, logits_NV: torch.Tensor, items: list[BatchItem]) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [N] int64, valid [N] bool) as `layers.sampling.sample`.

        logits_NV float32; what processors do to them is done in place, unless a request wants log probabilities.
        """
        self._forget_ended()
        adjusted = self._adjusted(items, logits_NV.shape[1])
        held_back = self._held_back(items)
        if not adjusted and not held_back:
            return sample(logits_NV, [_row_sampling(item) for item in items])
        if any(item.request.message.logprobs for item in items):
            logits_NV = logits_NV.clone()
        penalized = self._penalize(logits_NV, adjusted)
        self._add_bias(logits_NV, [(row, entry) for row, entry in adjusted if len(entry.bias_ids)])
        if held_back:
            rows_held, ids_held = self._indices(held_back)
            logits_NV[rows_held, ids_held] = float("-inf")
        tokens_N, valid_N = sample(logits_NV, [_row_sampling(item) for item in items])
        if penalized is not None:
            rows, slots = penalized
            self.counts.add(slots, tokens_N[rows])
        return tokens_N, valid_N

    def _forget_ended(self) -> None:
        over = [rid for rid, entry in self._adjustments.items() if entry.is_over]
        for rid in over:
            slot = self._adjustments.pop(rid).slot
            if slot is not None:
                self.counts.give_back(slot)

    def _adjusted(self, items: list[BatchItem], vocab: int) -> list[tuple[int, _Adjustment]]:
        """The rows whose requests have penalties or a bias."""
        found = []
        for row, item in enumerate(items):
            if not item.request.message.sampling.adjusts_logits:
                continue
            entry = self._adjustments.get(item.request.rid)
            if entry is None:
                entry = self._adjustments[item.request.rid] = self._begin(item.request, vocab)
            found.append((row, entry))
        return found

    def _begin(self, request: Request, vocab: int) -> _Adjustment:
        prompt, params = request.message.input_ids, request.message.sampling
        penalties = RowPenalties(params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
        slot = None if penalties.is_neutral else self.counts.take(vocab, prompt, request.output_ids)
        ids = to_device([id_ for id_, _ in params.logit_bias], torch.int64, self._device)
        values = to_device([value for _, value in params.logit_bias], torch.float32, self._device)
        return _Adjustment(request, request.epoch, penalties, slot, ids, values)

    def _penalize(
        self, logits_NV: torch.Tensor, adjusted: list[tuple[int, _Adjustment]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, slots) of those with penalties, None without any."""
        penalized = [(row, entry.slot, entry.penalties) for row, entry in adjusted if entry.slot is not None]
        if not penalized:
            return None
        rows, slots = self._indices([[row for row, _, _ in penalized], [slot for _, slot, _ in penalized]])
        self.counts.penalize(logits_NV, rows, slots, [penalties for _, _, penalties in penalized])
        return rows, slots

    def _add_bias(self, logits_NV: torch.Tensor, biased: list[tuple[int, _Adjustment]]) -> None:
        if not biased:
            return
        ids = torch.cat([entry.bias_ids for _, entry in biased])
        values = torch.cat([entry.bias_values for _, entry in biased])
        counts = [len(entry.bias_ids) for _, entry in biased]
        rows, repeats = self._indices([[row for row, _ in biased], counts])
        # Told the length, it need not wait for the device to know it.
        logits_NV[torch.repeat_interleave(rows, repeats, output_size=sum(counts)), ids] += values

    def _held_back(self, items: list[BatchItem]) -> list[list[int]]:
        """[rows, ids]: stop ids of requests that have fewer than min_new_tokens; empty where there are none."""
        held = [
            (row, id_)
            for row, item in enumerate(items)
            if item.output_index < item.request.message.sampling.min_new_tokens
            for id_ in self._eos.union(item.request.message.sampling.stop_token_ids)
        ]
        return [list(column) for column in zip(*held, strict=True)]

    def _indices(self, values: list[list[int]]) -> tuple[torch.Tensor, ...]:
        return to_device(values, torch.int64, self._device).unbind(0)


def _row_sampling(item: BatchItem) -> RowSampling:
    params = item.request.message.sampling
    row = RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, 0.0)
    if row.is_greedy:
        return row
    return RowSampling(
        params.temperature, params.top_k, params.top_p, params.min_p, uniform(params.seed, item.output_index)
    )
