"""What the backends that send single rows to the owners of their experts have in common.

Shape letters: T token rows, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from layers.forward_batch import StepRows
from layers.moe.backend import MoEBackend
from layers.moe.experts import Experts
from layers.moe.router import Routing


class RowSplitBackend(MoEBackend):
    """Ranks of one attention group have the same rows: each sends its share of them, and they exchange the results."""

    def _run(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, rows: StepRows) -> torch.Tensor:
        most = self._most_rows(max(rows.counts))
        attention = self.groups.attention
        if attention.size == 1:
            return self._send(x_TH, routing, experts, most, rows.extends)
        # Some shares are empty where there are fewer rows than ranks; they are sent all the same.
        shares = split_evenly(x_TH.shape[0], attention.size)
        own_TH = x_TH.split(shares)[attention.rank]
        own_routing = Routing(*(part.split(shares)[attention.rank] for part in routing))
        return attention.gather_rows(self._send(own_TH, own_routing, experts, most, rows.extends), shares)

    def _most_rows(self, rows: int) -> int:
        """The largest share of one rank, of `rows` rows of an attention group."""
        return -(-rows // self.groups.attention.size)

    @abstractmethod
    def _send(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, most: int, extends: bool) -> torch.Tensor:
        """Combined rows [T, H] of this rank's rows. most: the most rows that any rank sends now. extends: see StepRows.

        The last two are the same on every rank, and only they may decide what is called.
        """


def split_evenly(total: int, parts: int) -> list[int]:
    """Shares of `total` that differ by at most 1, the larger ones first."""
    share, rest = divmod(total, parts)
    return [share + (part < rest) for part in range(parts)]
