"""Buffers that GPUs of one host write into each other's memory, and expert layers on top of them.

One buffer of a rank holds, for C rows of each of R ranks: rows [R, C, H] that peers sent, with their experts' numbers
[R, C, K] int32 and factors [R, C, K] float32; and outputs [C * K + 1, H] that peers send back, the last of them zeros.

A step pushes rows, waits for all ranks, runs the experts, pushes outputs, waits, and adds up. Two waits are enough: a
rank is past the second of a layer only when all have read the layer's rows, and past the first of the next only when
all have read the layer's outputs.

Shape letters: see `layers.kernels.triton_moe_peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from layers.moe.experts import Experts
from layers.moe.grouping import Grouped
from layers.parallel import ParallelGroup

_ALIGNMENT = 256
# Rows an expert up to which the fused products win: between 64 and 96 on an H200.
_FUSED_ROWS = 64


@dataclass(frozen=True)
class BufferShape:
    """What all ranks must agree on: where things lie is computed from it, not exchanged."""

    num_ranks: int
    capacity: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Bytes from the buffer's beginning to rows, ids, factors and outputs, and to its end."""
        received = self.num_ranks * self.capacity
        outputs = self.capacity * self.top_k + 1
        row_bytes = self.hidden_size * self.dtype.itemsize
        sizes = (received * row_bytes, received * self.top_k * 4, received * self.top_k * 4, outputs * row_bytes)
        ends = [0]
        for size in sizes:
            ends.append(-(-(ends[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        return ends[0], ends[1], ends[2], ends[3], ends[4]


class PeerBuffer:
    """This rank's buffer and the addresses of all of them.

    buffer: [bytes] uint8. bases: addresses in rank order. barrier: returns, on the current stream, when all ranks have
    come to it and their writes before it can be read.
    """

    def __init__(
        self, shape: BufferShape, rank: int, buffer: torch.Tensor, bases: Sequence[int], barrier: Callable[[], None]
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.barrier = barrier
        self._buffer = buffer
        self.bases_R = torch.tensor(bases, dtype=torch.int64, device=buffer.device)
        rows, ids, factors, outputs, _ = shape.offsets
        ranks, capacity, top_k = shape.num_ranks, shape.capacity, shape.top_k
        self.x_RCH = self._view(rows, shape.dtype, ranks, capacity, shape.hidden_size)
        self.ids_RCK = self._view(ids, torch.int32, ranks, capacity, top_k)
        self.factors_RCK = self._view(factors, torch.float32, ranks, capacity, top_k)
        self.out_PH = self._view(outputs, shape.dtype, capacity * top_k + 1, shape.hidden_size)
        self.out_PH[-1].zero_()

    def _view(self, offset: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        count = dtype.itemsize * torch.Size(sizes).numel()
        return self._buffer[offset : offset + count].view(dtype).view(sizes)


@lru_cache
def open_buffer(group: ParallelGroup, shape: BufferShape, device: torch.device) -> PeerBuffer:
    """The buffer of a group, the same for all layers that ask for one of this shape: they run one after another.

    Called by all ranks at the same time, outside of CUDA graphs. ValueError where there is no such memory.
    """
    size = shape.offsets[-1]
    if group.size == 1:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        return PeerBuffer(shape, 0, buffer, [buffer.data_ptr()], lambda: None)
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    assert group.process_group is not None
    try:
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, group=group.process_group)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the GPUs of this host cannot share a buffer of {size} bytes ({reason}): use --moe-a2a-backend none, or "
            "deepep with --deepep-transport collective"
        ) from error
    buffer.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group=group.process_group)
    return PeerBuffer(shape, group.rank, buffer, handle.buffer_ptrs, lambda: handle.barrier(channel=0))


class PeerExchange:
    """A `RowExchange` of fixed shapes. fused: the products themselves read and write peers' memory, with weights."""

    def __init__(self, buffer: PeerBuffer, fused: bool = False) -> None:
        self.buffer = buffer
        self.fused = fused

    def run(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        experts: Experts,
        fixed_rows: int | None,
        weights_TK: torch.Tensor | None = None,
    ) -> Grouped:
        rows = self.buffer.shape.capacity if fixed_rows is None else fixed_rows
        self.send(x_TH, ids_TK, weights_TK, rows, experts.num_local)
        self.buffer.barrier()
        self.compute(experts, rows, weights_TK is not None)
        self.buffer.barrier()
        return self.result(ids_TK)

    def send(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, rows: int, num_local: int
    ) -> None:
        """Every place of the step is written on every rank, so that none keeps what an earlier, longer step left."""
        from layers.kernels import triton_moe_peers

        buffer = self.buffer
        if rows > buffer.shape.capacity:
            raise ValueError(f"{rows} rows do not fit a buffer for {buffer.shape.capacity}")
        if rows:
            triton_moe_peers.push_rows(
                x_TH,
                ids_TK,
                weights_TK,
                buffer.bases_R,
                buffer.shape.offsets[:3],
                buffer.rank,
                rows,
                buffer.shape.capacity,
                num_local,
            )

    def compute(self, experts: Experts, rows: int, weighted: bool) -> None:
        """Run this rank's experts on all received rows and push what they give."""
        from layers.kernels import triton_moe, triton_moe_fused, triton_moe_peers

        if not rows:
            return
        buffer = self.buffer
        top_k, out_offset = buffer.shape.top_k, buffer.shape.offsets[3]
        ids_P1 = buffer.ids_RCK[:, :rows].reshape(-1, 1)
        pairs_P, _, ends_E = triton_moe.sort_by_expert(ids_P1, experts.num_local)
        # With many rows an expert a library's product is faster than ours, and worth copies of the rows; so is, for
        # float8 weights, ours that copies them.
        few = ids_P1.shape[0] <= _FUSED_ROWS * experts.num_physical
        if self.fused and few and not experts.is_fp8:
            assert weighted
            hidden_PI = triton_moe_fused.gate_up(
                buffer.x_RCH,
                buffer.factors_RCK,
                pairs_P,
                experts.w13_E2IH,
                ends_E,
                rows,
                experts.swiglu_limit,
            )
            triton_moe_fused.down(hidden_PI, pairs_P, experts.w2_EHI, ends_E, buffer.bases_R, out_offset, rows, top_k)
            return
        x_PH = triton_moe_peers.gather_rows(buffer.x_RCH, pairs_P, ends_E, rows, top_k)
        factors_P = buffer.factors_RCK[:, :rows].flatten()[pairs_P] if weighted else None
        y_PH = experts(x_PH, ends_E, factors_P, zero_rest=False)
        triton_moe_peers.push_back(y_PH, pairs_P, ends_E, buffer.bases_R, out_offset, rows, top_k)

    def result(self, ids_TK: torch.Tensor) -> Grouped:
        """An id of -1 has no output, and its place may hold that of an earlier step: the row of zeros stands for it."""
        top_k = self.buffer.shape.top_k
        places_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)
        return Grouped(self.buffer.out_PH, places_TK.masked_fill(ids_TK < 0, self.buffer.shape.capacity * top_k))


def open_exchange(
    group: ParallelGroup, capacity: int, experts: Experts, top_k: int, fused: bool = False
) -> PeerExchange | None:
    """For GPUs of one host; None elsewhere, the same on every rank of the group. Waits for all of them."""
    weight = experts.w2_EHI
    if not weight.is_cuda or not group.one_host:
        return None
    shape = BufferShape(group.size, capacity, experts.hidden_size, top_k, experts.dtype)
    return PeerExchange(open_buffer(group, shape, weight.device), fused)
