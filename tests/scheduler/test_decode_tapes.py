"""Decode passes of whole engines as tapes, against the same engines without."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from layers.kernels import cpu
from scheduler.config import EngineConfig
from scheduler.decode_tapes import DecodeTapes
from scheduler.engine import Engine, Generation
from scheduler.messages import GenerateRequest, SamplingParams
from tests.models.support import random_ids

PROMPTS = [random_ids(length, seed=length) for length in (12, 3, 30, 1, 7, 21, 2)]
LENGTHS = (9, 12, 4, 1, 6, 8, 3)
GREEDY = [SamplingParams(count, 0, temperature=0.0, ignore_eos=True) for count in LENGTHS]
needs_matrix_kernel = pytest.mark.skipif(
    cpu.library() is None or cpu.library().gemm_level == cpu.GEMM_NONE, reason="the matrix kernel is not for this CPU"
)


def engine(model: str = "tiny-llama", **settings: Any) -> Engine:
    values = {"dtype": "bfloat16", "max_total_tokens": 1024, "max_running_requests": 7, **settings}
    return Engine(EngineConfig(model_path=model, device="cpu", num_threads=1, **values))


def results(generations: list[Generation]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.logprobs, each.finish) for each in generations]


@needs_matrix_kernel
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("settings", [{}, {"disable_overlap_schedule": False}], ids=["plain", "overlap"])
def test_tokens_and_log_probabilities_equal_those_of_eager_steps(model: str, settings: dict[str, Any]) -> None:
    made, eager = engine(model, **settings), engine(model, disable_cuda_graph=True, **settings)
    assert eager.runner.graphs is None
    greedy = [SamplingParams(count, 0, temperature=0.0, ignore_eos=True) for count in LENGTHS]
    sampled = [SamplingParams(count, seed, temperature=0.8, ignore_eos=True) for seed, count in enumerate(LENGTHS)]
    for params in (greedy, sampled, greedy):
        assert results(made.generate(PROMPTS, params)) == results(eager.generate(PROMPTS, params))
    assert isinstance(made.runner.graphs, DecodeTapes)
    # One request warmed it up; then requests end one by one, from six that have more than one token to make.
    assert made.runner.graphs.sizes == [1, 2, 3, 4, 5, 6]


@needs_matrix_kernel
def test_batches_beyond_the_largest_are_eager() -> None:
    made = engine(cuda_graph_max_bs=3)
    assert results(made.generate(PROMPTS, GREEDY)) == results(engine(disable_cuda_graph=True).generate(PROMPTS, GREEDY))
    assert isinstance(made.runner.graphs, DecodeTapes)
    assert made.runner.graphs.sizes == [1, 2, 3]


@pytest.mark.parametrize(
    ("model", "dtype"), [("tiny-qwen3-moe", "bfloat16"), ("tiny-deepseek-v3", "bfloat16"), ("tiny-llama", "float32")]
)
def test_models_that_cannot_be_recorded_go_on_without(model: str, dtype: str) -> None:
    made, eager = engine(model, dtype=dtype), engine(model, dtype=dtype, disable_cuda_graph=True)
    assert made.runner.graphs is None  # since the request that warmed it up
    assert results(made.generate(PROMPTS, GREEDY)) == results(eager.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("settings", "device", "uses"),
    [
        ({}, "cpu", True),
        ({}, "cuda", False),
        ({"disable_cuda_graph": True}, "cpu", False),
        ({"disaggregation_mode": "decode"}, "cpu", True),
        ({"disaggregation_mode": "prefill"}, "cpu", False),
        ({"tp_size": 2}, "cpu", False),
    ],
    ids=str,
)
def test_where_tapes_are_used(settings: dict[str, Any], device: str, uses: bool) -> None:
    assert EngineConfig(model_path="", **settings).uses_decode_tapes(device) is uses


def random_workload(seed: int) -> list[tuple[int, GenerateRequest, bool]]:
    """(step at which it is sent, request, whether it is given up seven steps later)."""
    random = Random(seed)
    workload = []
    for number in range(60):
        sampling = SamplingParams(
            random.randint(1, 60),
            random.randint(0, 9),
            temperature=random.choice([0.0, 0.7, 1.3]),
            top_p=random.choice([1.0, 0.9]),
            frequency_penalty=random.choice([0.0, 0.7]),
            repetition_penalty=random.choice([1.0, 1.2]),
            ignore_eos=True,
        )
        ids = random_ids(random.randint(1, 60), seed=100 * seed + number)
        request = GenerateRequest(str(number), ids, sampling, logprobs=random.random() < 0.3, top_logprobs=2)
        workload.append((random.randint(0, 80), request, random.random() < 0.1))
    return sorted(workload, key=lambda each: each[0])


def outputs(made: Engine, workload: list[tuple[int, GenerateRequest, bool]]) -> dict[str, list[Any]]:
    """(token ids, log probabilities, finish) of the requests that were not given up, a list of each step's."""
    found: dict[str, list[Any]] = {}
    last = max(at for at, _, _ in workload) + 7
    step = 0
    while step <= last or not made.is_idle:
        for at, request, is_given_up in workload:
            if at == step:
                made.submit(request)
            if is_given_up and at + 7 == step:
                made.scheduler.abort(request.rid)
        for output in made.step():
            found.setdefault(output.rid, []).append((output.token_ids, output.logprobs, output.finish))
        step += 1
    made.scheduler.check_memory()
    return {request.rid: found[request.rid] for _, request, is_given_up in workload if not is_given_up}


@needs_matrix_kernel
@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_random_workloads_with_aborts_and_retraction(model: str) -> None:
    settings = {"max_total_tokens": 700, "page_size": 8, "max_running_requests": 24}
    made, eager = engine(model, **settings), engine(model, disable_cuda_graph=True, **settings)
    for seed in range(6):
        workload = random_workload(seed)
        assert outputs(made, workload) == outputs(eager, workload)
    assert isinstance(made.runner.graphs, DecodeTapes)
    assert made.scheduler.load(0).retractions_total > 0
