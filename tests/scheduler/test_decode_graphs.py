"""Recorded decode passes of whole engines, with a recorder for CPUs; `test_cuda_graph.py` has CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layers.forward_batch import ForwardBatch, ForwardMode, StepRows
from layers.moe import Experts
from scheduler.config import EngineConfig
from scheduler.cuda_graph import DecodeGraphs
from scheduler.engine import Engine, EngineError, Generation
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.scheduler.eager_recorder import EagerRecorder

PROMPTS = [random_ids(length, seed=length) for length in (12, 3, 30, 1, 7, 21, 2)]
PARAMS = [SamplingParams(count, 0, temperature=0.0, ignore_eos=True) for count in (9, 12, 4, 1, 6, 8, 3)]


def engine(recorder: EagerRecorder | None, model: str = "tiny-qwen3-moe", **settings: Any) -> Engine:
    values = {"max_total_tokens": 1024, "max_running_requests": 7, **settings}
    config = EngineConfig(model_path=model, dtype="float32", device="cpu", num_threads=1, **values)
    return Engine(config, recorder=recorder)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def graphs_of(made: Engine) -> DecodeGraphs:
    assert isinstance(made.runner.graphs, DecodeGraphs)
    return made.runner.graphs


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_tokens_equal_those_of_eager_steps(model: str) -> None:
    recorder = EagerRecorder()
    recording = engine(recorder, model)
    assert graphs_of(recording).sizes == [1, 2, 4, 7]
    assert recorder.replays == 1  # the request that warms the engine up
    got = recording.generate(PROMPTS, PARAMS)
    assert tokens(got) == tokens(engine(None, model).generate(PROMPTS, PARAMS))
    # All prompts fit the first step, so the longest output takes as many decode steps as it has further tokens.
    assert recorder.replays == 1 + 11


def test_a_replay_reads_what_the_tensors_hold_then() -> None:
    """Other tokens, positions, requests and numbers of them, and each first batch again after the others."""
    recording = engine(EagerRecorder())
    runner, graphs = recording.runner, graphs_of(recording)
    # Keys and values of three requests at places that their rows of the table say.
    lengths = torch.tensor([5, 9, 2])
    for row, length in enumerate(lengths.tolist(), start=1):
        runner.memory.table[row, :length] = 16 * row + torch.arange(length, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for layer in range(runner.kv_cache.spec.num_layers):
        for cache in (runner.kv_cache.k(layer), runner.kv_cache.v(layer)):
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def decode(rows: list[int], ids: list[int]) -> ForwardBatch:
        rows_B = torch.tensor(rows)
        seq_lens = lengths[rows_B - 1]
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=torch.tensor(ids),
            positions=seq_lens - 1,
            slots=16 * rows_B + seq_lens - 1,
            request_table=runner.memory.table,
            request_rows=rows_B,
            seq_lens=seq_lens.int(),
            extend_lens=torch.ones(len(rows), dtype=torch.int32),
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
            seq_lens_cpu=seq_lens.tolist(),
            extend_lens_cpu=[1] * len(rows),
            kv_cache=runner.kv_cache,
            attention=runner.attention,
        )

    batches = [
        decode(*batch) for batch in (([1], [7]), ([2], [7]), ([2], [8]), ([3, 1, 2], [7, 8, 9]), ([2, 3], [9, 7]))
    ]
    with torch.inference_mode():
        eager = []
        for batch in batches:
            runner.attention.plan(batch)
            eager.append(runner.model.logits(runner.model.forward(batch)))
        for i in (*range(len(batches)), *reversed(range(len(batches)))):
            for size in graphs.sizes:
                if size >= batches[i].batch_size:
                    logits = graphs.replay(batches[i], size)
                    torch.testing.assert_close(logits, eager[i], rtol=1e-5, atol=1e-5)
    # Nothing above was equal for want of differences.
    assert all((one[:1] - other[:1]).abs().max() > 1e-2 for one, other in zip(eager, eager[1:], strict=False))


def test_padding_rows_reach_no_expert() -> None:
    """Whatever the number of real rows, and whatever an earlier and longer step left."""
    settings: dict[str, Any] = {"enable_eplb": True, "eplb_rebalance_num_iterations": 10**6}
    recording = engine(EagerRecorder(), **settings)
    eager = engine(None, **settings)
    for made in (recording, eager):
        made.generate(PROMPTS, PARAMS)
    assert loads(recording) == loads(eager)
    # A rank without requests, as its peers have some: what it replays is padding alone.
    before = loads(recording)
    recording.runner.launch_idle(StepRows((0,), "max", 4, extends=False))
    assert loads(recording) == before


def loads(made: Engine) -> list[list[int]]:
    """Rows that went to each expert of each layer."""
    model = made.runner.model
    assert isinstance(model, torch.nn.Module)
    placements = [module.placement for module in model.modules() if isinstance(module, Experts)]
    return [placement.load_E.tolist() for placement in placements if placement is not None]


@pytest.mark.parametrize(
    ("settings", "sizes", "line"),
    [
        ({}, [1, 2, 4, 7], None),
        ({"cuda_graph_max_bs": 4}, [1, 2, 4], None),
        ({"moe_a2a_backend": "megamoe"}, [1, 2, 4, 7], None),
        ({"moe_a2a_backend": "deepep"}, [1, 2, 4, 7], None),
        (
            {"moe_a2a_backend": "deepep", "deepep_max_tokens_per_rank": 3},
            [1, 2, 3],
            "decode graphs for at most 3 requests, not 7: --deepep-max-tokens-per-rank is 3",
        ),
        (
            {"moe_a2a_backend": "deepep", "deepep_mode": "normal"},
            [],
            "no decode graphs: --deepep-mode normal waits for counts of rows",
        ),
        ({"attention_backend": "torch"}, [], "no decode graphs: --attention-backend torch waits for lengths"),
    ],
    ids=str,
)
def test_what_is_recorded(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], sizes: list[int], line: str | None
) -> None:
    """No more than each step can do without learning numbers of rows or lengths on the host; else a line says why."""
    recorder = EagerRecorder()
    with caplog.at_level("INFO", "scheduler.engine"):
        made = engine(recorder, **settings)
    lines = [record.getMessage() for record in caplog.records if "decode graphs" in record.getMessage()]
    assert [said for said in lines if not said.startswith("captured")] == ([] if line is None else [line])
    assert ([] if made.runner.graphs is None else graphs_of(made).sizes) == sizes
    assert tokens(made.generate(PROMPTS, PARAMS)) == tokens(engine(None).generate(PROMPTS, PARAMS))
    assert (recorder.replays > 1) == bool(sizes)


def test_too_little_memory_for_recordings_is_one_line() -> None:
    class Full(EagerRecorder):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    message = "--mem-fraction-static 0.85 leaves too little memory for decode graphs of up to 7 requests"
    with pytest.raises(EngineError, match=message):
        engine(Full())


@pytest.mark.parametrize(
    ("settings", "device", "uses"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"disable_cuda_graph": True}, "cuda", False),
        ({"disaggregation_mode": "decode"}, "cuda", True),
        ({"disaggregation_mode": "prefill"}, "cuda", False),
        ({"tp_size": 2}, "cuda", True),
        ({"tp_size": 2, "dp_size": 2}, "cuda", True),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "cuda", True),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "cpu", False),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "disable_cuda_graph": True}, "cuda", False),
    ],
    ids=str,
)
def test_where_cuda_graphs_are_used(settings: dict[str, Any], device: str, uses: bool) -> None:
    assert EngineConfig(model_path="", **settings).uses_cuda_graphs(device) is uses
