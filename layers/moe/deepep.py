"""Backend `deepep`: rows to the owners of their experts and back, with counts or in fixed shapes.

Shape letters: T token rows, H hidden size.
"""

from __future__ import annotations

import torch

from layers.moe.backend import RecordingLimit
from layers.moe.deepep_library import DeepEPLibrary
from layers.moe.exchange import CollectiveExchange, RowExchange
from layers.moe.experts import Experts
from layers.moe.grouping import weighted_sum
from layers.moe.peer_memory import PeerExchange, open_exchange
from layers.moe.router import Routing
from layers.moe.row_split import RowSplitBackend
from layers.parallel import ParallelGroups

CAP_FLAG = "--deepep-max-tokens-per-rank"


class DeepEPBackend(RowSplitBackend):
    """The normal layout exchanges counts first and takes any number of rows. The low-latency layout has fixed shapes
    and takes up to deepep_max_tokens_per_rank rows a rank. Mode "auto" uses it where no rank computes prompt tokens
    and every rank's rows fit.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.mode = groups.moe.deepep_mode
        self.cap = groups.moe.deepep_max_tokens_per_rank
        self._collective = CollectiveExchange(groups.experts)
        self._peers: PeerExchange | None = None
        self._library: DeepEPLibrary | None = None

    def low_latency(self, most: int, extends: bool) -> bool:
        """Whether a step in which ranks send up to `most` rows takes that layout; ValueError over its cap."""
        if self.mode == "auto":
            return not extends and most <= self.cap
        self._check(most)
        return self.mode == "low_latency"

    @property
    def recording_limit(self) -> RecordingLimit:
        if self.mode == "normal":
            return RecordingLimit(0, "--deepep-mode normal waits for counts of rows")
        if self._library is not None and self.mode == "auto":
            # A replay would not know of it.
            return RecordingLimit(0, "--deepep-transport library cleans up between the layouts of --deepep-mode auto")
        return RecordingLimit(self.cap * self.groups.attention.size, f"{CAP_FLAG} is {self.cap}")

    def reserve(self, rows: int, experts: Experts, top_k: int) -> None:
        most = self._most_rows(rows)
        self._check(most)
        transport = self.groups.moe.deepep_transport
        if transport == "library":
            self._library = DeepEPLibrary(experts, self.groups.experts, self.cap)
        elif transport == "auto":
            self._peers = open_exchange(self.groups.experts, min(most, self.cap), experts, top_k)

    def _check(self, most: int) -> None:
        if self.mode == "low_latency" and most > self.cap:
            raise ValueError(
                f"{most} rows a rank are more than {CAP_FLAG} {self.cap}, and --deepep-mode low_latency takes no more; "
                "raise the first or use --deepep-mode auto"
            )

    def exchange(self, most: int, extends: bool) -> tuple[RowExchange, int | None]:
        """What carries a step, and its rows a rank where shapes are fixed."""
        if not self.low_latency(most, extends):
            return self._collective, None
        return self._peers or self._collective, most

    def _send(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, most: int, extends: bool) -> torch.Tensor:
        if self._library is not None:
            return self._library.run(x_TH, routing, experts, self.low_latency(most, extends))
        exchange, fixed_rows = self.exchange(most, extends)
        grouped = exchange.run(x_TH, routing.topk_ids, experts, fixed_rows)
        return weighted_sum(grouped, routing.topk_weights, x_TH.dtype)
