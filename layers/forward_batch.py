"""What one forward pass works on: flat token rows of several requests, and where their KV lives.

Shape letters: T token rows, B requests, R rows of the request table, C longest context, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from layers.attention.base import AttentionBackend
    from layers.kv_cache import KVCache


class ForwardMode(IntEnum):
    """IDLE: no rows. EXTEND: each request adds one or more rows after its cached prefix. DECODE: one row a request."""

    IDLE = 0
    EXTEND = 1
    DECODE = 2


@dataclass(frozen=True)
class StepRows:
    """How many rows each data-parallel rank has in a step: one value, the same on every rank, from what they agreed on.

    global_num_tokens: real rows of each data-parallel rank.
    layout: "sum": a rank's tensors have its real rows and no others. "max": every rank's tensors have
        padded_num_tokens rows, the real ones first; no expert sees the others.
    extends: whether any rank computes prompt tokens in this step.
    padding_T1: [padded_num_tokens, 1] bool on the device: this rank's padding rows, where the host's number of real
        ones is only that of a recording.
    """

    global_num_tokens: tuple[int, ...]
    layout: Literal["sum", "max"] = "sum"
    padded_num_tokens: int = 0
    extends: bool = True
    padding_T1: torch.Tensor | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each data-parallel rank's tensors."""
        if self.layout == "max":
            return (self.padded_num_tokens,) * len(self.global_num_tokens)
        return self.global_num_tokens


@dataclass
class ForwardBatch:
    """Inputs of one forward pass; rows of one request are contiguous and in position order.

    Tensors live on the model's device. `*_cpu` fields are host copies for planning, so that no backend has to
    synchronise with the device.

    mode: EXTEND or DECODE (DECODE means every extend_len is 1 and T == B) or IDLE (T == B == 0).
    input_ids [T] int64, positions [T] int64.
    slots [T] int64: KV slot that each row's key and value are written to; slot 0 is padding.
    request_table [R, C] int32: KV slot of each position of each request row; row 0 is padding.
    request_rows [B] int64: the requests' rows in `request_table`.
    seq_lens [B] int32: positions visible to the request's last row (cached prefix plus this pass's rows).
    extend_lens [B] int32: rows of this pass per request.
    query_start [B+1] int32: offsets of the requests in the T rows.
    seq_lens_cpu, extend_lens_cpu: the same as lists of int.
    kv_cache: this rank's key/value tensors. attention: the backend that reads and writes them.
    rows: the rows of all data-parallel ranks; None where there is one such rank, or the model has no experts.
    plan: whatever `attention.plan(batch)` derived for its kernels.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    request_table: torch.Tensor
    request_rows: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    query_start: torch.Tensor
    seq_lens_cpu: list[int]
    extend_lens_cpu: list[int]
    kv_cache: KVCache
    attention: AttentionBackend
    rows: StepRows | None = None
    plan: Any = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def step_rows(self) -> StepRows:
        """`rows`, or those of this rank alone."""
        if self.rows is not None:
            return self.rows
        return StepRows((self.num_tokens,), extends=self.mode is not ForwardMode.DECODE)

    @property
    def batch_size(self) -> int:
        return self.request_rows.shape[0]

    @property
    def last_rows(self) -> torch.Tensor:
        """[B] int64: index of each request's last row."""
        return self.query_start[1:].long() - 1
