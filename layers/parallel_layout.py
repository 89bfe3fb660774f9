"""How the ranks of one engine divide its work: which rank holds which part, as pure functions of the sizes.

Ranks are numbered 0 to tp_size - 1. Attention: rank = dp_rank * attention_tp_size + attention_tp_rank, so that the
ranks of one data-parallel group are neighbours. Experts: rank = ep_rank * expert_tp_size + expert_tp_rank.
"""

from __future__ import annotations

from dataclasses import dataclass


class LayoutError(ValueError):
    """Sizes that do not fit together, in one line that names the flags."""


@dataclass(frozen=True)
class RankPlace:
    """Where one rank stands in each division; see the module's text for the numbering."""

    dp_rank: int
    attention_tp_rank: int
    ep_rank: int
    expert_tp_rank: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the divisions of one engine; LayoutError when they do not fit together.

    tp_size: ranks of the engine. dp_size: groups of them that have requests and KV of their own (data-parallel
        attention); within a group attention heads are split.
    ep_size: ranks that the routed experts are spread over; the columns of each expert are split over tp_size / ep_size
        ranks. None spreads whole experts over all ranks.
    dense_tp_size: ranks that the columns of a dense MLP are split over: 1, or None for those of an attention group.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int | None = None
    dense_tp_size: int | None = None

    def __post_init__(self) -> None:
        flags = (("--tp-size", self.tp_size), ("--dp-size", self.dp_size), ("--ep-size", self.ep_size))
        for flag, size in flags:
            if size is not None and size < 1:
                raise LayoutError(f"{flag} {size} must be at least 1")
        if self.tp_size % self.dp_size:
            raise LayoutError(
                f"--tp-size {self.tp_size} is not a multiple of --dp-size {self.dp_size}, and with "
                "--enable-dp-attention each data-parallel group gets an equal share of the ranks"
            )
        if self.tp_size % self.expert_ranks:
            raise LayoutError(
                f"--tp-size {self.tp_size} is not a multiple of --ep-size {self.ep_size}: each expert's columns are "
                "split over tp-size / ep-size ranks"
            )
        if self.dense_tp_size not in (None, 1, self.attention_tp_size):
            raise LayoutError(
                f"--moe-dense-tp-size {self.dense_tp_size} is neither 1 nor the size of an attention group, "
                f"{self.attention_tp_size}"
            )

    @property
    def attention_tp_size(self) -> int:
        """Ranks that split the heads of one request."""
        return self.tp_size // self.dp_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that the routed experts are spread over."""
        return self.tp_size if self.ep_size is None else self.ep_size

    @property
    def expert_tp_size(self) -> int:
        """Ranks that split the columns of one expert."""
        return self.tp_size // self.expert_ranks

    def place(self, rank: int) -> RankPlace:
        dp_rank, attention_tp_rank = divmod(rank, self.attention_tp_size)
        ep_rank, expert_tp_rank = divmod(rank, self.expert_tp_size)
        return RankPlace(dp_rank, attention_tp_rank, ep_rank, expert_tp_rank)

    def leader(self, dp_rank: int) -> int:
        """The rank that speaks for a data-parallel group."""
        return dp_rank * self.attention_tp_size

    # Partitions of the ranks: every rank is in exactly one list of each.

    def attention_groups(self) -> list[list[int]]:
        """Ranks that split the heads of the same requests."""
        return _runs(self.tp_size, self.attention_tp_size)

    def dense_groups(self) -> list[list[int]]:
        """Ranks that split the columns of a dense MLP."""
        return _runs(self.tp_size, self.dense_tp_size or self.attention_tp_size)

    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold different experts and the same columns of them."""
        return _strides(self.tp_size, self.expert_tp_size)

    def expert_tp_groups(self) -> list[list[int]]:
        """Ranks that hold different columns of the same experts."""
        return _runs(self.tp_size, self.expert_tp_size)

    def dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same heads and different requests."""
        return _strides(self.tp_size, self.attention_tp_size)


def _runs(count: int, length: int) -> list[list[int]]:
    return [list(range(start, start + length)) for start in range(0, count, length)]


def _strides(count: int, stride: int) -> list[list[int]]:
    return [list(range(start, count, stride)) for start in range(stride)]
