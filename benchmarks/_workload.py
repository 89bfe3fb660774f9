"""Requests to measure with: seeded prompts and lengths, and arrival times."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class LengthRange:
    """Lengths in tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class WorkItem:
    """One request: prompt token ids and the number of tokens to generate."""

    prompt_ids: list[int]
    output_len: int


def parse_length(text: str) -> LengthRange:
    """An argparse type for "N" or "LOW:HIGH". argparse.ArgumentTypeError on anything else or on lengths below 1."""
    low_text, separator, high_text = text.partition(":")
    try:
        low = int(low_text)
        high = int(high_text) if separator else low
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a length: give N or LOW:HIGH, such as 256 or 100:1024"
        ) from None
    if low < 1 or high < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length: it needs 1 <= LOW <= HIGH")
    return LengthRange(low, high)


def make_workload(
    num_requests: int, input_len: LengthRange, output_len: LengthRange, max_token_id: int, seed: int
) -> list[WorkItem]:
    """Draws per request, in this order: prompt length, its ids from 0 to max_token_id (included), output length.

    The same arguments give the same requests on every machine.
    """
    rng = random.Random(seed)
    items = []
    for _ in range(num_requests):
        length = input_len.draw(rng)
        prompt_ids = [rng.randint(0, max_token_id) for _ in range(length)]
        items.append(WorkItem(prompt_ids, output_len.draw(rng)))
    return items


def poisson_arrivals(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is due: the first at 0, then exponential gaps of mean 1/rate."""
    rng = random.Random(seed)
    arrivals = [0.0]
    while len(arrivals) < num_requests:
        arrivals.append(arrivals[-1] + rng.expovariate(request_rate))
    return arrivals[:num_requests]


_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
_WORDS = _WORD_LIST.split()


def words_for_ids(prompt_ids: list[int]) -> str:
    """A text of one common English word an id, for servers that take no token ids; about one token a word.

    Different ids give different texts with few collisions, so prompts stay new to a prefix cache.
    """
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in prompt_ids)
