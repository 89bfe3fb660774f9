"""Which prefill rank sends which key/value heads to which decode rank; sizes of the two sides may differ.

One size must be a multiple of the other. With more decode ranks, rank d asks prefill rank d // (decode / prefill); with
more prefill ranks, rank d asks the prefill / decode ranks from d * (prefill / decode) on. A model with fewer KV heads
than ranks (in the extreme the one latent "head" of MLA) keeps copies of a head on several ranks; of prefill ranks that
hold the same heads only the first sends, the others have an empty leg: they take part in the room and move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg.pages import Slices


@dataclass(frozen=True)
class Leg:
    """What one prefill rank sends one decode rank: `num_heads` heads from `first_head` on, in the model's numbering.

    first: this is the decode rank's first leg. The metadata row and state that every rank holds alike come with it.
    """

    prefill_rank: int
    first_head: int
    num_heads: int
    first: bool


def sizes_refusal(prefill_size: int, decode_size: int) -> str | None:
    """Why two TP sizes cannot be joined, None if they can."""
    if prefill_size % decode_size and decode_size % prefill_size:
        return f"tp_size of one side must be a multiple of the other: prefill {prefill_size}, decode {decode_size}"
    return None


def heads_of(rank: int, tp_size: int, total_heads: int) -> range:
    """KV heads that a rank holds, in the model's numbering."""
    if total_heads >= tp_size:
        share = total_heads // tp_size
        return range(rank * share, (rank + 1) * share)
    first = rank * total_heads // tp_size
    return range(first, first + 1)


def legs_of(decode_rank: int, decode_size: int, prefill_size: int, total_heads: int) -> list[Leg]:
    """The legs of one decode rank in the order of prefill ranks; together they carry each of its heads once."""
    if decode_size >= prefill_size:
        ranks = range(decode_rank // (decode_size // prefill_size), decode_rank // (decode_size // prefill_size) + 1)
    else:
        share = prefill_size // decode_size
        ranks = range(decode_rank * share, (decode_rank + 1) * share)
    wanted = heads_of(decode_rank, decode_size, total_heads)
    legs = []
    covered = wanted.start
    for rank in ranks:
        held = heads_of(rank, prefill_size, total_heads)
        start, end = max(held.start, covered), min(held.stop, wanted.stop)
        legs.append(Leg(rank, start, max(0, end - start), rank == ranks.start))
        covered = max(covered, end)
    return legs


def num_claimants(prefill_size: int, decode_size: int) -> int:
    """Decode ranks that ask one prefill rank for a room."""
    return max(1, decode_size // prefill_size)


def leg_between(prefill_rank: int, prefill_size: int, decode_rank: int, decode_size: int, total_heads: int) -> Leg:
    """ValueError when the plan has nothing between the two ranks."""
    for leg in legs_of(decode_rank, decode_size, prefill_size, total_heads):
        if leg.prefill_rank == prefill_rank:
            return leg
    raise ValueError(
        f"decode rank {decode_rank} of {decode_size} has no business with prefill rank {prefill_rank} of {prefill_size}"
    )


def head_slices(
    leg: Leg, source_heads: range, target_heads: range, rows: int, source_item_lens: Sequence[int]
) -> Slices:
    """The leg's heads inside items of `rows` token rows, each row all heads of its rank one after the other.

    `source_item_lens` are the prefill rank's; bytes of one head follow from them.
    """
    head_bytes_R = np.asarray(source_item_lens, dtype=np.int64) // (rows * len(source_heads))
    if leg.num_heads == len(source_heads) == len(target_heads):
        return Slices.whole(source_item_lens)
    return Slices(
        rows=rows,
        source_offsets_R=(leg.first_head - source_heads.start) * head_bytes_R,
        target_offsets_R=(leg.first_head - target_heads.start) * head_bytes_R,
        lengths_R=leg.num_heads * head_bytes_R,
    )


def replicated_slices(leg: Leg, item_lens: Sequence[int]) -> Slices:
    """Items that every rank holds alike: whole from the first leg, nothing from the others."""
    return Slices.whole(item_lens) if leg.first else Slices.whole([0] * len(item_lens))
