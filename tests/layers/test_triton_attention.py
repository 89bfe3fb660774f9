"""The Triton attention kernels against the torch reference: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from layers.attention.base import Attention
from layers.attention.torch_backend import TorchAttention
from layers.attention.triton_backend import TritonAttention
from layers.forward_batch import ForwardBatch, ForwardMode
from layers.kernels.triton_decode import MIN_SPLIT_TOKENS, choose_splits, decode_blocks
from layers.kernels.triton_prefill import list_tiles
from layers.kernels.triton_widths import HeadWidths
from layers.kv_cache import KVCache, KVSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies the bit patterns of bfloat16 matrices; it gets them as a cache under float32 queries.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    value_in_key: bool = False


def make_batch(
    shape: Shape,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Attention, ForwardBatch, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A batch of (cached prefix, new rows) requests over a cache of random contents with shuffled pages."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    seq_lens = [prefix + extend for prefix, extend in lengths]
    extend_lens = [extend for _, extend in lengths]
    pages = [-(-length // PAGE) for length in seq_lens]
    free = list(range(1, 1 + sum(pages)))
    rng.shuffle(free)
    table = torch.zeros(len(lengths) + 3, max(pages) * PAGE, dtype=torch.int32)
    rows = rng.sample(range(1, len(lengths) + 3), len(lengths))
    slots: list[int] = []
    for (prefix, extend), count, row in zip(lengths, pages, rows, strict=True):
        mine = [page * PAGE + i for page in (free.pop() for _ in range(count)) for i in range(PAGE)]
        # Every slot of the last page is filled in, as positions past the end must not matter.
        table[row, : count * PAGE] = torch.tensor(mine, dtype=torch.int32)
        slots += mine[prefix : prefix + extend]
    spec = KVSpec(2, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.value_in_key)
    cache = KVCache(spec, (1 + sum(pages)) * PAGE, cache_dtype or dtype, DEVICE)
    for layer in range(2):
        cache.k(layer).copy_(normal(*cache.k(layer).shape))
        if not shape.value_in_key:
            cache.v(layer).copy_(normal(*cache.v(layer).shape))
    total = sum(extend_lens)
    starts = [0]
    for extend in extend_lens:
        starts.append(starts[-1] + extend)
    batch = ForwardBatch(
        mode=ForwardMode.DECODE if all(extend == 1 for extend in extend_lens) else ForwardMode.EXTEND,
        input_ids=torch.zeros(total, dtype=torch.int64, device=DEVICE),
        positions=torch.tensor([p + i for p, n in lengths for i in range(n)], device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
        request_table=table.to(DEVICE),
        request_rows=torch.tensor(rows, device=DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        extend_lens=torch.tensor(extend_lens, dtype=torch.int32, device=DEVICE),
        query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        kv_cache=cache,
        attention=TorchAttention(),
    )
    scale = shape.head_dim**-0.5
    layer = Attention(1, shape.heads, shape.kv_heads, shape.head_dim, scale, shape.v_head_dim)
    # Rows as the models give them: views into one projection's output. Exact in the cache's dtype: rounding to bfloat16
    # is not the interpreter's strength either.
    q_width, k_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    packed = normal(total, q_width + k_width + shape.kv_heads * shape.v_head_dim).to(cache_dtype or dtype).to(dtype)
    q = packed[:, :q_width].view(total, shape.heads, shape.head_dim)
    k = packed[:, q_width : q_width + k_width].view(total, shape.kv_heads, shape.head_dim)
    v = packed[:, q_width + k_width :].view(total, shape.kv_heads, shape.v_head_dim)
    return layer, batch, q, k, None if shape.value_in_key else v


def check(
    shape: Shape,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    num_sms: int = 4,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """The same call through both backends, each on its own copy of the cache: equal outputs and equal caches."""
    outputs = []
    caches = []
    for backend in (TorchAttention(), TritonAttention(num_sms)):
        layer, batch, q, k, v = make_batch(shape, lengths, dtype, seed, cache_dtype)
        batch.attention = backend
        backend.plan(batch)
        outputs.append(layer(q, k, v, batch).float())
        caches.append(batch.kv_cache)
    assert outputs[1].shape == (sum(n for _, n in lengths), shape.heads, shape.v_head_dim)
    for layer_id in range(2):
        assert torch.equal(caches[0].k(layer_id), caches[1].k(layer_id))
        assert torch.equal(caches[0].v(layer_id), caches[1].v(layer_id))
    difference = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert difference.item() < TOLERANCE[dtype]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=4 * TOLERANCE[dtype])


GQA = [Shape(4, 4, 64, 64), Shape(9, 3, 64, 64), Shape(8, 2, 32, 32), Shape(8, 1, 128, 128)]
ODD = [Shape(2, 1, 96, 96), Shape(2, 1, 80, 80), Shape(2, 1, 256, 256), Shape(3, 1, 192, 128)]
LATENT = [Shape(16, 1, 576, 512, True), Shape(4, 1, 48, 32, True), Shape(20, 1, 96, 64, True)]


@pytest.mark.parametrize("shape", GQA + ODD + LATENT, ids=str)
def test_decode_shapes(shape: Shape) -> None:
    check(shape, [(0, 1), (14, 1), (15, 1), (16, 1), (99, 1)], torch.float32)


@pytest.mark.parametrize("shape", GQA + ODD + LATENT, ids=str)
def test_prefill_shapes(shape: Shape) -> None:
    check(shape, [(0, 15), (0, 1), (16, 17), (83, 17)], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 400])
def test_decode_lengths(length: int, dtype: torch.dtype) -> None:
    check(Shape(6, 2, 64, 64), [(length - 1, 1)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("prefix", "extend"), [(0, 1), (0, 16), (15, 2), (0, 100), (300, 40)])
def test_prefill_lengths(prefix: int, extend: int, dtype: torch.dtype) -> None:
    check(Shape(6, 2, 64, 64), [(prefix, extend), (3, 2)], dtype)


@pytest.mark.parametrize("lengths", [[(16, 1), (40, 1)], [(16, 9), (0, 20)]], ids=["decode", "prefill"])
def test_bfloat16_cache_under_float32_queries(lengths: list[tuple[int, int]]) -> None:
    check(Shape(4, 2, 64, 64), lengths, torch.float32, cache_dtype=torch.bfloat16)


@pytest.mark.parametrize("num_sms", [1, 8, 132])
def test_decode_result_does_not_depend_on_the_number_of_splits(num_sms: int) -> None:
    check(Shape(4, 2, 32, 32), [(0, 1), (63, 1), (64, 1), (299, 1)], torch.float32, num_sms)


def test_mixed_batch_of_decoding_and_prefilling_requests() -> None:
    check(Shape(8, 2, 64, 64), [(69, 1), (0, 40), (32, 33), (15, 1), (0, 1)], torch.float32, seed=3)


def test_padding_rows_of_a_decode_batch_change_nothing_else() -> None:
    shape = Shape(4, 2, 64, 64)
    backend = TritonAttention(8)
    layer, batch, q, k, v = make_batch(shape, [(20, 1), (130, 1)], torch.float32, 0)
    backend.plan(batch)
    batch.attention = backend
    alone = layer(q, k, v, batch)
    padded = ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=torch.cat([batch.input_ids, batch.input_ids.new_zeros(2)]),
        positions=torch.cat([batch.positions, batch.positions.new_zeros(2)]),
        slots=torch.cat([batch.slots, batch.slots.new_zeros(2)]),
        request_table=batch.request_table,
        request_rows=torch.cat([batch.request_rows, batch.request_rows.new_zeros(2)]),
        seq_lens=torch.cat([batch.seq_lens, batch.seq_lens.new_ones(2)]),
        extend_lens=torch.ones(4, dtype=torch.int32, device=DEVICE),
        query_start=torch.arange(5, dtype=torch.int32, device=DEVICE),
        seq_lens_cpu=[*batch.seq_lens_cpu, 1, 1],
        extend_lens_cpu=[1] * 4,
        kv_cache=batch.kv_cache,
        attention=backend,
    )
    backend.plan(padded)
    out = layer(torch.cat([q, q]), torch.cat([k, k]), torch.cat([v, v]) if v is not None else None, padded)
    torch.testing.assert_close(out[:2], alone, rtol=0, atol=1e-6)
    assert out.isfinite().all()


def test_an_idle_batch_gives_no_rows() -> None:
    shape = Shape(4, 2, 64, 64)
    backend = TritonAttention(8)
    layer, batch, q, k, v = make_batch(shape, [(20, 1)], torch.float32, 0)
    batch.mode = ForwardMode.IDLE
    batch.input_ids = batch.input_ids[:0]
    batch.attention = backend
    backend.plan(batch)
    assert v is not None
    assert layer(q[:0], k[:0], v[:0], batch).shape == (0, 4, 64)


def test_head_widths_cover_the_head() -> None:
    assert HeadWidths.of(128, 128, False) == HeadWidths(128, 0, 128, False)
    assert HeadWidths.of(96, 96, False) == HeadWidths(64, 32, 128, False)
    assert HeadWidths.of(576, 512, True) == HeadWidths(512, 64, 512, True)
    assert HeadWidths.of(48, 24, True) == HeadWidths(32, 16, 32, False)
    assert HeadWidths.of(8, 8, False) == HeadWidths(16, 0, 16, False)


def test_splits_fill_the_device_and_stay_within_the_context() -> None:
    assert decode_blocks(32, 4) == (16, 4)
    assert decode_blocks(128, 1) == (64, 2)
    assert choose_splits(1, 32, 4, 40960, 132) == 64
    assert choose_splits(1, 32, 4, 2 * MIN_SPLIT_TOKENS, 132) == 2
    assert choose_splits(16, 32, 4, 40960, 132) == 9
    assert choose_splits(132, 32, 4, 40960, 132) == 1
    assert choose_splits(256, 32, 4, 40960, 132) == 1


def test_tiles_cover_every_row_once_with_the_longest_first() -> None:
    tiles = list_tiles([5, 1, 8], 4)
    assert sorted(tiles) == [(0, 0), (0, 4), (1, 0), (2, 0), (2, 4)]
    assert [first for _, first in tiles] == [4, 4, 0, 0, 0]
