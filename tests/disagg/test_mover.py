"""Cutting what one-sided backends write into pieces and batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.mover import Pieces, batches, split


def test_split_keeps_every_byte_in_order() -> None:
    pieces = Pieces(*(np.array(values, dtype=np.uint64) for values in ([100, 5000], [9000, 200], [10, 4])))
    sources, targets, lengths = split(pieces, 4)
    assert sources.tolist() == [100, 104, 108, 5000]
    assert targets.tolist() == [9000, 9004, 9008, 200]
    assert lengths.tolist() == [4, 4, 2, 4]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    piece_bytes=st.integers(1, 60),
    batch_bytes=st.integers(1, 60),
    batch_pieces=st.integers(1, 6),
)
@settings(max_examples=60)
def test_batches_keep_every_byte_in_order_and_the_limits(
    lengths: list[int], piece_bytes: int, batch_bytes: int, batch_pieces: int
) -> None:
    sources = np.cumsum([0, *lengths])[:-1] * 3
    pieces = Pieces(*(np.array(values, dtype=np.uint64) for values in (sources, sources + 10_000, lengths)))
    made = list(batches(pieces, piece_bytes, batch_bytes, batch_pieces))
    for batch in made:
        assert 0 < len(batch.lengths_M) <= batch_pieces
        assert 0 < max(batch.lengths_M) <= piece_bytes
        assert len(batch.lengths_M) == 1 or batch.lengths_M.sum() <= batch_bytes

    def every_byte(parts: list[Pieces]) -> list[tuple[int, int]]:
        return [
            (int(source) + i, int(target) + i)
            for part in parts
            for source, target, length in zip(*part, strict=True)
            for i in range(int(length))
        ]

    assert every_byte(made) == every_byte([pieces])
