"""Experts with known weights on any layout, a float64 reference, and steps with rows on several ranks.

Shape letters: T token rows, K experts of a token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from layers.forward_batch import ForwardBatch, ForwardMode, StepRows
from layers.moe import Experts, Routing, make_backend
from layers.parallel import ParallelGroups
from layers.quantization import dequantize_block_fp8, quantize_block_fp8
from models.block_fp8 import keep_quantized

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 32, 16, 3


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In which parameters are made. It is that of all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def expert_weight(expert: int, name: str) -> torch.Tensor:
    """The checkpoint's matrix of one projection of one expert."""
    shape = (HIDDEN, INTERMEDIATE) if name == "down_proj" else (INTERMEDIATE, HIDDEN)
    seed = 10 * expert + ("gate_proj", "up_proj", "down_proj").index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[1] ** 0.5


def make_experts(groups: ParallelGroups, dtype: torch.dtype = torch.float32, limit: float | None = None) -> Experts:
    """This rank's share, filled as a checkpoint fills it."""
    experts = Experts(NUM_EXPERTS, HIDDEN, INTERMEDIATE, groups, swiglu_limit=limit)
    for part in experts.weight_parts("mlp.experts"):
        _, _, expert, name, _ = part.name.split(".")
        whole = expert_weight(int(expert), name)
        part.target.copy_(whole[tuple(slice(*span) for span in part.source)])
    return experts.to(dtype)


def make_fp8_experts(groups: ParallelGroups, block: tuple[int, int], limit: float | None = None) -> Experts:
    """The same of a checkpoint in block-fp8, dequantised or kept as groups.moe.quantization says."""
    experts = Experts(NUM_EXPERTS, HIDDEN, INTERMEDIATE, groups, swiglu_limit=limit, fp8_block=block)
    for part in experts.weight_parts("mlp.experts"):
        _, _, expert, name, _ = part.name.split(".")
        whole = expert_weight(int(expert), name)
        if part.scales is not None:
            keep_quantized(whole, [part], SimpleNamespace(fp8_block=block))  # type: ignore[arg-type]
            continue
        whole = dequantize_block_fp8(*quantize_block_fp8(whole, block), block)
        part.target.copy_(whole[tuple(slice(*span) for span in part.source)])
    return experts


def make_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def make_routing(count: int, kind: str = "random", seed: int = 0, scale: float = 1.0) -> Routing:
    """kind: "random"; "one": all rows to the last K experts; "skewed": 19 of 20 rows to the last K."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :TOP_K]
    if kind != "random":
        crowded = count if kind == "one" else count * 19 // 20
        ids[:crowded] = torch.arange(NUM_EXPERTS - TOP_K, NUM_EXPERTS)
    return Routing(ids, scale * torch.rand(count, TOP_K, generator=generator))


def reference(x: torch.Tensor, routing: Routing, limit: float | None = None) -> torch.Tensor:
    """[T, H] float64, token by token; an id of -1 counts for nothing."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(routing.topk_ids[token].tolist(), routing.topk_weights[token], strict=True):
            if expert < 0:
                continue
            gate, up, down = (expert_weight(expert, name).double() for name in ("gate_proj", "up_proj", "down_proj"))
            gated, straight = gate @ x[token].double(), up @ x[token].double()
            if limit is not None:
                gated, straight = gated.clamp(max=limit), straight.clamp(-limit, limit)
            out[token] += weight.double() * (down @ (F.silu(gated) * straight))
    return out


def run_step(
    groups: ParallelGroups,
    experts: Experts,
    counts: Sequence[int],
    kind: str = "random",
    padded: int | None = None,
    extends: bool = True,
    seed: int = 0,
    nan_rank: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on one rank: (its output, the reference of its real rows).

    counts: real rows of each data-parallel rank. padded: rows of every rank's tensors, the others filled with garbage.
    nan_rank: the data-parallel rank whose first row is not a number.
    """
    rank = groups.data.rank
    count = counts[rank]
    x, routing = make_rows(count, 10 * seed + rank), make_routing(count, kind, 10 * seed + rank)
    if nan_rank == rank:
        x[0] = torch.nan
    wanted = reference(x, routing)
    rows = StepRows(tuple(counts), extends=extends)
    if padded is not None:
        rows = StepRows(tuple(counts), "max", padded, extends)
        garbage = padded - count
        x = torch.cat((x, torch.full((garbage, HIDDEN), torch.nan)))
        ids = torch.cat((routing.topk_ids, torch.full((garbage, TOP_K), NUM_EXPERTS - 1)))
        routing = Routing(ids, torch.cat((routing.topk_weights, torch.full((garbage, TOP_K), 1e9))))
    out = make_backend(groups).forward(x, routing, experts, rows)
    assert out.shape == x.shape
    return out[:count], wanted


def batch_of(rows: int) -> ForwardBatch:
    """A batch of which a MoE layer sees the number of rows."""
    none = torch.empty(0, dtype=torch.int64)
    ids = torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(ForwardMode.EXTEND, ids, *(none,) * 7, [], [], None, None)  # type: ignore[arg-type]
