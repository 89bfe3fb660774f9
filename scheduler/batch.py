"""What one step works on, decided on the host before anything is launched, and what it produced."""

from __future__ import annotations

from dataclasses import dataclass, field

from layers.forward_batch import ForwardMode
from scheduler.request import Request


@dataclass(frozen=True)
class BatchItem:
    """Rows start..end-1 of one request.

    is_decode: the single row's token is the one sampled last, which only the device may know yet.
    samples: the last row's logits choose output token number `output_index`.
    completes: after this item every known token of the request has its KV.
    epoch: the request's when launched; a different one later means the result is stale.
    """

    request: Request
    epoch: int
    start: int
    end: int
    is_decode: bool
    completes: bool
    samples: bool
    output_index: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def prompt_logprob_rows(self) -> range:
        """Positions of this item whose logits give a wanted prompt log probability (that of the next position)."""
        request = self.request
        if self.is_decode or not request.wants_prompt_logprobs:
            return range(0)
        return range(max(self.start, request.first_logit_row()), min(self.end, request.prompt_length - 1))


@dataclass(frozen=True)
class Batch:
    """Items in row order. DECODE when every item is a decode row, else EXTEND.

    seeds: (request row, token) pairs to set as last sampled tokens first, for requests whose last token was sampled
    elsewhere.
    """

    items: list[BatchItem]
    seeds: list[tuple[int, int]] = field(default_factory=list)

    @property
    def mode(self) -> ForwardMode:
        return ForwardMode.DECODE if all(item.is_decode for item in self.items) else ForwardMode.EXTEND

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def sampling_items(self) -> list[BatchItem]:
        return [item for item in self.items if item.samples]


@dataclass
class ItemResult:
    """token: -1 when the item does not sample. valid: False when its logits held NaN or had no finite maximum.

    logprob, top: of the sampled token, when wanted. prompt_logprobs: (log probability, likeliest) of the positions
    after `BatchItem.prompt_logprob_rows`.
    """

    token: int = -1
    valid: bool = True
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
