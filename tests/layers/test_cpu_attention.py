"""CpuAttention against TorchAttention: outputs, caches, and independence of a row from its batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from layers.attention.base import Attention, AttentionBackend
from layers.attention.cpu_backend import CpuAttention
from layers.attention.torch_backend import TorchAttention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels import cpu
from layers.kv_cache import KVCache, KVSpec

needs_kernels = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CONTEXT = 400


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    width: int
    value_width: int
    value_in_key: bool = False


@dataclass
class Case:
    """A layer, a cache of random contents and the projections of every position of every request."""

    heads: Heads
    cache: KVCache
    table: torch.Tensor
    layer: Attention
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def run(self, backend: AttentionBackend, pieces: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One pass over (request, cached prefix, new rows); each piece's output."""
        extend_lens = [rows for _, _, rows in pieces]
        seq_lens = [prefix + rows for _, prefix, rows in pieces]
        requests = torch.tensor([request for request, _, _ in pieces], dtype=torch.int64)
        starts = [0]
        for rows in extend_lens:
            starts.append(starts[-1] + rows)

        def merged(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([tensors[request][prefix : prefix + rows] for request, prefix, rows in pieces])

        batch = ForwardBatch(
            mode=ForwardMode.DECODE if all(rows == 1 for rows in extend_lens) else ForwardMode.EXTEND,
            input_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.cat([torch.arange(prefix, prefix + rows) for _, prefix, rows in pieces]),
            slots=torch.cat([self.table[request, prefix : prefix + rows] for request, prefix, rows in pieces]).long(),
            request_table=self.table,
            request_rows=requests,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            extend_lens=torch.tensor(extend_lens, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens,
            kv_cache=self.cache,
            attention=backend,
        )
        backend.plan(batch)
        # Rows as the models give them: strided views into one projection's output.
        q, k, v = merged(self.q), merged(self.k), merged(self.v)
        packed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        parts = packed.split([x[0][0].numel() for x in (self.q, self.k, self.v)], dim=1)
        q, k, v = (part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (q, k, v), strict=True))
        out = self.layer(q, k, None if self.heads.value_in_key else v, batch)
        assert out.shape == (starts[-1], self.heads.query, self.heads.value_width)
        assert out.dtype == q.dtype
        return list(out.split(extend_lens))


def make_case(heads: Heads, requests: int, dtype: torch.dtype, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    cache = KVCache(
        KVSpec(2, heads.kv, heads.width, heads.value_width, heads.value_in_key), 1 + requests * CONTEXT, dtype, "cpu"
    )
    for layer in range(2):
        cache.k(layer).copy_(normal(*cache.k(layer).shape))
        if not heads.value_in_key:
            cache.v(layer).copy_(normal(*cache.v(layer).shape))
    table = torch.zeros(requests, CONTEXT, dtype=torch.int32)
    table[:] = 1 + torch.randperm(requests * CONTEXT, generator=generator).view(requests, CONTEXT)
    layer = Attention(1, heads.query, heads.kv, heads.width, heads.width**-0.5, heads.value_width)
    q, k, v = (
        [normal(CONTEXT, count, width) for _ in range(requests)]
        for count, width in ((heads.query, heads.width), (heads.kv, heads.width), (heads.kv, heads.value_width))
    )
    return Case(heads, cache, table, layer, q, k, v)


def check(heads: Heads, pieces: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    case = make_case(heads, len(pieces), dtype)
    before = case.cache._k.clone(), case.cache._v.clone()
    expected = case.run(TorchAttention(), pieces)
    written = case.cache._k.clone(), case.cache._v.clone()
    case.cache._k.copy_(before[0])
    if not heads.value_in_key:
        case.cache._v.copy_(before[1])
    actual = case.run(CpuAttention(), pieces)
    assert torch.equal(case.cache._k, written[0])
    assert torch.equal(case.cache._v, written[1])
    for mine, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=TOLERANCE[dtype])


HEADS = [
    Heads(9, 3, 64, 64),
    Heads(4, 4, 32, 32),
    Heads(14, 2, 96, 96),
    Heads(8, 1, 128, 128),
    Heads(5, 5, 33, 47),
    Heads(3, 1, 80, 16),
    Heads(16, 1, 576, 512, value_in_key=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
class TestAgainstTorch:
    def test_decode(self, heads: Heads, dtype: torch.dtype) -> None:
        check(heads, [(2, 0, 1), (0, 63, 1), (3, 64, 1), (1, 200, 1)], dtype)

    def test_prefill_with_and_without_prefix(self, heads: Heads, dtype: torch.dtype) -> None:
        check(heads, [(1, 0, 70), (0, 64, 1), (2, 37, 33), (3, 130, 2)], dtype)


@needs_kernels
class TestIndependence:
    """float32 and bfloat16 alike: bit for bit the same, so that greedy tokens cannot differ."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("heads", [HEADS[0], HEADS[2], HEADS[6]], ids=str)
    def test_prefill_chunks_and_decode_agree(self, heads: Heads, dtype: torch.dtype) -> None:
        rng = random.Random(1)
        case = make_case(heads, 3, dtype)
        whole = case.run(CpuAttention(), [(0, 0, 150)])[0]
        case.run(CpuAttention(), [(1, 0, 90), (2, 0, 40)])
        at, rows = 0, []
        while at < 150:
            length = min(rng.choice([1, 1, 5, 40]), 150 - at)
            company = [(1, 90, rng.choice([1, 20])), (2, 40, 1)]
            rows.append(case.run(CpuAttention(), [company[0], (0, at, length), company[1]])[1])
            at += length
        assert torch.equal(torch.cat(rows), whole)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_many_decoding_requests_and_each_alone_agree(self, heads: Heads, dtype: torch.dtype, threads: int) -> None:
        prefixes = [0, 62, 63, 64, 200, 129, 5]
        case = make_case(heads, len(prefixes), dtype)
        alone = [case.run(CpuAttention(), [(i, prefix, 1)])[0] for i, prefix in enumerate(prefixes)]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            together = case.run(CpuAttention(), [(i, prefix, 1) for i, prefix in enumerate(prefixes)])
        finally:
            torch.set_num_threads(before)
        for mine, expected in zip(together, alone, strict=True):
            assert torch.equal(mine, expected)

    def test_nan_stays_in_its_request(self) -> None:
        case = make_case(HEADS[0], 2, torch.float32)
        case.q[0][20] = float("nan")
        bad, good = case.run(CpuAttention(), [(0, 20, 1), (1, 20, 1)])
        assert bad.isnan().all()
        assert good.isfinite().all()


def test_no_rows() -> None:
    case = make_case(HEADS[0], 1, torch.float32)
    assert case.run(CpuAttention(), [(0, 5, 0)])[0].shape == (0, 9, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_falls_back_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == torch.float32:
        monkeypatch.setattr(cpu, "library", lambda: None)
    check(replace(HEADS[0], width=16), [(0, 3, 20), (1, 40, 1)], dtype)


@needs_kernels
def test_layers_of_unlike_shapes_share_a_plan() -> None:
    case = make_case(HEADS[0], 1, torch.float32)
    expected = case.run(CpuAttention(), [(0, 10, 30)])[0]
    narrow = Attention(1, 3, 3, 64, 0.5, 64)

    class Both(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
            narrow(q[:, :3], k, v, batch)
            return layer(q, k, v, batch)

    layer, case.layer = case.layer, Both()  # type: ignore[assignment]
    assert torch.equal(case.run(CpuAttention(), [(0, 10, 30)])[0], expected)
