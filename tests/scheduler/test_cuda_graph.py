"""Decode graphs. What captures or replays one needs a CUDA device and is collected only where there is one."""

from __future__ import annotations

import pytest
import torch

from scheduler.cuda_graph import DecodeGraphs, graph_sizes


def test_graph_sizes_end_at_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(2) == [1, 2]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-5:] == [128, 160, 192, 224, 256]
    for largest in (3, 8, 100, 511, 512, 700):
        sizes = graph_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest


if torch.cuda.is_available():
    from torch import nn

    from layers.attention.base import Attention
    from layers.attention.triton_backend import TritonAttention
    from layers.forward_batch import ForwardBatch, ForwardMode
    from layers.kv_cache import KVCache, KVSpec
    from scheduler.recorder import CudaRecorder

    HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 8, 2, 64, 300, 2
    CONTEXT, PAGE, REQUESTS = 512, 16, 12

    class TinyDecoder(nn.Module):
        """Embedding, two attention layers and an output matrix: enough for every input tensor to matter."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            self.position = nn.Embedding(CONTEXT, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            self.head = nn.Linear(HEADS * HEAD_DIM, VOCAB, bias=False)
            self.attention = nn.ModuleList(
                Attention(layer, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5) for layer in range(LAYERS)
            )

        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            qkv = self.embed(batch.input_ids) + self.position(batch.positions)
            q, k, v = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
            q, k, v = q.unflatten(-1, (HEADS, -1)), k.unflatten(-1, (KV_HEADS, -1)), v.unflatten(-1, (KV_HEADS, -1))
            for layer in self.attention:
                q = q + layer(q, k, v, batch)
            return self.head(q.flatten(1)).float()

    def make_cache() -> tuple[torch.Tensor, KVCache]:
        """A request table whose rows 1.. own shuffled pages, and a cache of random contents."""
        generator = torch.Generator().manual_seed(1)
        pages = torch.randperm(REQUESTS * CONTEXT // PAGE, generator=generator) + 1
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, CONTEXT)
        table = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int64), slots]).to("cuda", torch.int32)
        spec = KVSpec(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM)
        cache = KVCache(spec, (REQUESTS * CONTEXT // PAGE + 1) * PAGE, torch.float32, "cuda")
        for layer in range(LAYERS):
            for tensor in (cache.k(layer), cache.v(layer)):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return table, cache

    def decode_batch(
        lengths: list[int], table: torch.Tensor, cache: KVCache, attention: TritonAttention, seed: int
    ) -> ForwardBatch:
        generator = torch.Generator().manual_seed(seed)
        count = len(lengths)
        rows = (torch.randperm(REQUESTS, generator=generator)[:count] + 1).cuda()
        seq_lens = torch.tensor(lengths, device="cuda")
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=torch.randint(0, VOCAB, (count,), generator=generator).cuda(),
            positions=seq_lens - 1,
            slots=table[rows, seq_lens - 1].long(),
            request_table=table,
            request_rows=rows,
            seq_lens=seq_lens.int(),
            extend_lens=torch.ones(count, dtype=torch.int32, device="cuda"),
            query_start=torch.arange(count + 1, dtype=torch.int32, device="cuda"),
            seq_lens_cpu=lengths,
            extend_lens_cpu=[1] * count,
            kv_cache=cache,
            attention=attention,
        )

    @pytest.mark.gpu
    @torch.inference_mode()
    def test_replays_equal_eager_passes_of_any_size_in_any_order() -> None:
        model = TinyDecoder().cuda()
        attention = TritonAttention()
        table, cache = make_cache()
        eager_table, eager_cache = make_cache()
        graphs = DecodeGraphs(model, table, cache, attention, REQUESTS, VOCAB)
        graphs.record_all(CudaRecorder(table.device))
        assert graphs.sizes == [1, 2, 4, 8, 12]
        for seed, lengths in enumerate(
            [[300], [1, 2, 3], [512] * 12, [5, 400, 17], [64, 65, 66, 67, 68], [200] * 9, [33, 1], [7]]
        ):
            batch = decode_batch(lengths, table, cache, attention, seed)
            logits = graphs.replay(batch, graphs.size_for(batch))
            eager = decode_batch(lengths, eager_table, eager_cache, attention, seed)
            attention.plan(eager)
            torch.testing.assert_close(logits, model(eager), rtol=1e-4, atol=1e-4)
            for layer in range(LAYERS):
                # Slot 0 takes the padding rows; every other slot must hold what the eager pass wrote.
                torch.testing.assert_close(cache.k(layer)[PAGE:], eager_cache.k(layer)[PAGE:], rtol=0, atol=0)

    @pytest.mark.gpu
    @torch.inference_mode()
    def test_batches_that_no_graph_fits() -> None:
        model = TinyDecoder().cuda()
        attention = TritonAttention()
        table, cache = make_cache()
        graphs = DecodeGraphs(model, table, cache, attention, 2, VOCAB)
        assert graphs.size_for(decode_batch([4, 5], table, cache, attention, 0)) == 2
        assert graphs.size_for(decode_batch([4, 5, 6], table, cache, attention, 0)) == 0
        extend = decode_batch([4, 5], table, cache, attention, 0)
        extend.mode = ForwardMode.EXTEND
        assert graphs.size_for(extend) == 0
