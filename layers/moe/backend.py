"""How rows get to the ranks that hold their experts and back: the door that all backends share.

Shape letters: T token rows, K experts of a token, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from layers.forward_batch import StepRows
from layers.moe.experts import Experts
from layers.moe.router import Routing
from layers.parallel import ParallelGroups

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RecordingLimit(NamedTuple):
    """rows: the most that a data-parallel rank can have in a decode step that a CUDA graph holds; 0 where none can.
    reason: what sets it, naming the flag.
    """

    rows: int
    reason: str


class MoEBackend(ABC):
    """Rows in, combined rows out. Every rank of the engine makes the same calls in the same order, with zero rows too.

    What a backend does next may depend on `StepRows`, on its options and on nothing else of the step: every rank sees
    the same values there, so no rank ever waits for one that took another turn.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups

    def forward(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, rows: StepRows) -> torch.Tensor:
        """[T, H] in x's dtype: each token's sum of its experts' outputs times their weights.

        routing: logical experts; ids of any integer dtype, weights of any float dtype, which include the model's
        routed scaling factor, so that no backend applies one. ValueError for another kind of tensor, and where x does
        not have this rank's rows of the step.
        """
        routing = admit(x_TH, routing, rows, self.groups.data.rank)
        if experts.placement is not None:
            routing = experts.placement.admit(routing)
        return self._run(x_TH, routing, experts, rows)

    def reserve(self, rows: int, experts: Experts, top_k: int) -> None:  # noqa: B027 - not all backends need to know
        """Called on every rank before the first step, for buffers that are there from then on.

        rows: the most that a data-parallel rank can have in a step; ValueError when the settings allow fewer. top_k:
        experts of a token.
        """

    @property
    def recording_limit(self) -> RecordingLimit | None:
        """Up to how many rows nothing waits for the device. None: any number. A matter of options and layout, and so
        the same on every rank; asked after `reserve`."""
        return None

    @abstractmethod
    def _run(self, x_TH: torch.Tensor, routing: Routing, experts: Experts, rows: StepRows) -> torch.Tensor:
        """The same for an admitted routing, whose ids are physical experts."""


def admit(x_TH: torch.Tensor, routing: Routing, rows: StepRows, data_rank: int) -> Routing:
    """The routing as every backend wants it: ids int32, weights float32, and for padding rows ids -1 and weights 0."""
    ids_TK, weights_TK = routing
    if ids_TK.dtype not in _INTEGERS or not weights_TK.dtype.is_floating_point:
        raise ValueError(
            f"routing has ids of {ids_TK.dtype} and weights of {weights_TK.dtype}; expected an integer and a float type"
        )
    num_rows = x_TH.shape[0]
    if ids_TK.shape[0] != num_rows or ids_TK.shape != weights_TK.shape:
        raise ValueError(
            f"{num_rows} rows have ids of shape {list(ids_TK.shape)} and weights of shape {list(weights_TK.shape)}"
        )
    if rows.counts[data_rank] != num_rows:
        raise ValueError(
            f"data-parallel rank {data_rank} has {num_rows} rows, and the step {rows.counts[data_rank]} for it"
        )
    ids_TK, weights_TK = ids_TK.int(), weights_TK.float()
    padding_T1, real = rows.padding_T1, rows.global_num_tokens[data_rank]
    if padding_T1 is None and real < num_rows:
        padding_T1 = torch.arange(num_rows, device=x_TH.device)[:, None] >= real
    if padding_T1 is not None:
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    return Routing(ids_TK, weights_TK)
