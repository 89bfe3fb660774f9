"""Whom to admit next, and how much memory to hold back for the output of those already admitted."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.memory import KVMemory
from scheduler.radix_cache import PageKey, page_keys
from scheduler.request import Request

# A request may announce a huge output and stop early: no more than so many tokens of it are held back for.
_MAX_RESERVED_OUTPUT = 4096
# Longest-prefix order costs a walk of the tree for each waiting request; beyond so many it is not worth it.
_LPM_MAX_WAITING = 128


class OutputReserve:
    """Adaptive share of the announced output that admission holds back.

    Starts cautious, decays while decoding goes well, jumps to what was really used when memory ran out. The constants
    are those of SGLang's `new_token_ratio` (0.7 at first, a seventh of it in the end, over 600 steps).
    """

    def __init__(self, conservativeness: float) -> None:
        """conservativeness: 0 holds nothing back at first, 1 is usual."""
        self._initial = min(0.7 * conservativeness, 1.0)
        self._minimum = 0.14 * self._initial
        self._decay = (self._initial - self._minimum) / 600
        self.ratio = self._initial

    def after_decode_step(self) -> None:
        self.ratio = max(self._minimum, self.ratio - self._decay)

    def after_retraction(self, survivors: Iterable[Request]) -> None:
        kept = list(survivors)
        produced = sum(request.launched for request in kept)
        announced = sum(min(request.max_new_tokens, _MAX_RESERVED_OUTPUT) for request in kept)
        self.ratio = min(1.0, (produced + 20 * len(kept)) / (announced + 1))

    def when_idle(self) -> None:
        self.ratio = self._initial

    def held_back(self, requests: Iterable[Request]) -> float:
        """Tokens to leave for the requests' further output."""
        return self.ratio * sum(
            min(max(request.max_new_tokens - request.launched, 0), _MAX_RESERVED_OUTPUT) for request in requests
        )


def usable_prefix(request: Request, memory: KVMemory) -> list[PageKey]:
    """Page keys that may be taken from the prefix cache: at least one token, and every wanted logit, is computed."""
    if not memory.use_prefix_cache:
        return []
    limit = request.num_tokens - 1
    if request.wants_prompt_logprobs:
        limit = min(limit, request.first_logit_row())
    return request_keys(request, memory)[: limit // memory.page_size]


def request_keys(request: Request, memory: KVMemory) -> list[PageKey]:
    """Keys of the whole pages of the request's tokens as they were when it was queued."""
    if request.page_keys is None:
        request.page_keys = page_keys(request.tokens(), memory.page_size)
    return request.page_keys


def ordered(waiting: list[Request], policy: str, memory: KVMemory) -> list[Request]:
    """The order in which to try: arrival ("fcfs") or longest cached prefix first ("lpm"), ties by arrival."""
    if policy == "fcfs" or len(waiting) > _LPM_MAX_WAITING:
        return waiting
    return sorted(waiting, key=lambda request: -memory.cache.match_length(usable_prefix(request, memory)))
