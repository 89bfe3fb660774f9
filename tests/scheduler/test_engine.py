"""The engine on tiny models: the same greedy tokens however requests are batched, chunked, cached or retracted."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from layers.process_groups import ALONE, HostGroup
from scheduler.config import EngineConfig
from scheduler.engine import Engine, EngineError, Generation
from scheduler.messages import GenerateRequest, SamplingParams
from tests.rank_processes import Place, run_ranks

PRESETS = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v3"]
VARIANTS = {
    "defaults": {},
    "overlap": {"disable_overlap_schedule": False},
    "small chunks": {"chunked_prefill_size": 7},
    "overlap, small chunks": {"disable_overlap_schedule": False, "chunked_prefill_size": 13},
    "no chunks": {"chunked_prefill_size": -1},
    "page of one": {"page_size": 1},
    "big pages": {"page_size": 64},
    "no prefix cache": {"disable_radix_cache": True},
    "retraction": {"max_total_tokens": 160, "context_length": 128, "schedule_conservativeness": 0.0},
    "overlap, retraction": {
        "max_total_tokens": 160,
        "context_length": 128,
        "schedule_conservativeness": 0.0,
        "disable_overlap_schedule": False,
    },
    "lpm": {"schedule_policy": "lpm"},
    "torch attention": {"attention_backend": "torch"},
    "two at a time": {"max_running_requests": 2},
}


def make_engine(preset: str, **settings: object) -> Engine:
    base = {"dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "num_threads": 1, "log_level": "error"}
    return Engine(EngineConfig(model_path=preset, **{**base, **settings}))


def make_prompts() -> list[list[int]]:
    rng = random.Random(7)
    stem = [rng.randrange(256) for _ in range(37)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 5, 16, 33, 70)]
    return [*prompts, stem, [*stem, 3, 1, 4], [*stem[:20], 9], stem]


def greedy(count: int = 24) -> SamplingParams:
    return SamplingParams(count, 0, temperature=0.0, ignore_eos=True)


def adjusted(count: int = 24) -> list[SamplingParams]:
    """For `make_prompts`: penalties and bias in several mixtures, greedy and sampled, and a request without any."""
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": 0.4},
        {"presence_penalty": 0.6},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"logit_bias": tuple((token, -100.0) for token in range(128))},
        {"logit_bias": ((65, 3.5), (66, 3.0)), "frequency_penalty": 0.7, "presence_penalty": -0.1},
        {"frequency_penalty": -0.5, "temperature": 0.7, "top_p": 0.9},
        {},
        {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    ]
    return [
        SamplingParams(count, 50 + i, **{"temperature": 0.0, "ignore_eos": True, **params})
        for i, params in enumerate(settings)
    ]


@cache
def adjusted_reference(preset: str) -> list[list[int]]:
    """As `reference`, with `adjusted`; tests/topology/test_one_process.py holds this loop against transformers."""
    engine = make_engine(preset, attention_backend="torch", disable_radix_cache=True, disable_overlap_schedule=True)
    pairs = zip(make_prompts(), adjusted(), strict=True)
    return [engine.generate([prompt], [params])[0].token_ids for prompt, params in pairs]


@cache
def reference(preset: str) -> list[Generation]:
    """Each prompt alone in a fresh memory, attention in plain torch, the plain loop."""
    engine = make_engine(preset, attention_backend="torch", disable_radix_cache=True, disable_overlap_schedule=True)
    return [engine.generate([prompt], [greedy()])[0] for prompt in make_prompts()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-deepseek-v3"])
def test_same_greedy_tokens_in_every_variant(preset: str, variant: str) -> None:
    engine = make_engine(preset, **VARIANTS[variant])
    prompts = make_prompts()
    got = engine.generate(prompts, [greedy()] * len(prompts))
    assert [generation.token_ids for generation in got] == [generation.token_ids for generation in reference(preset)]
    assert ("retraction" in variant) == (engine.scheduler.retractions_total > 0)
    engine.scheduler.check_memory()
    assert engine.scheduler.flush_cache()
    assert engine.memory.allocator.num_free == engine.memory.allocator.num_pages


@pytest.mark.parametrize(
    "variant", ["overlap", "small chunks", "retraction", "overlap, retraction", "two at a time", "defaults"]
)
def test_penalties_in_every_variant(variant: str) -> None:
    engine = make_engine("tiny-llama", **VARIANTS[variant])
    prompts = make_prompts()
    expected = adjusted_reference("tiny-llama")
    plain = [generation.token_ids for generation in reference("tiny-llama")]
    assert [one == other for one, other in zip(expected, plain, strict=True)] == [i == 7 for i in range(len(prompts))]
    for _ in range(2):  # the second time from the prefix cache
        got = engine.generate(prompts, adjusted())
        assert [generation.token_ids for generation in got] == expected
    assert ("retraction" in variant) == (engine.scheduler.retractions_total > 0)
    assert [generation.token_ids for generation in engine.generate(prompts, [greedy()] * len(prompts))] == plain
    assert engine.runner.sampler.counts.num_slots == 0


def test_log_probabilities_know_nothing_of_penalties() -> None:
    engine = make_engine("tiny-llama", disable_overlap_schedule=False)
    prompt, params = make_prompts()[0], adjusted()[0]
    got = engine.generate([prompt], [params], logprobs=True, top_logprobs=2)[0]
    scored = engine.generate(
        [prompt + got.token_ids], [greedy(0)], logprobs=True, top_logprobs=2, prompt_logprobs_start=len(prompt)
    )[0]
    assert scored.prompt_logprobs is not None
    assert got.logprobs == pytest.approx(scored.prompt_logprobs.logprobs, abs=1e-4)
    assert any(token != top[0][0] for token, top in zip(got.token_ids, got.top_logprobs, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_family_batches_like_it_runs_alone(preset: str) -> None:
    engine = make_engine(preset, chunked_prefill_size=32)
    prompts = make_prompts()
    got = engine.generate(prompts, [greedy()] * len(prompts))
    assert [generation.token_ids for generation in got] == [generation.token_ids for generation in reference(preset)]


def test_second_run_reads_the_prefix_cache_and_says_the_same() -> None:
    engine = make_engine("tiny-llama", page_size=8)
    prompts = make_prompts()
    first = engine.generate(prompts, [greedy()] * len(prompts))
    second = engine.generate(prompts, [greedy()] * len(prompts))
    assert [g.token_ids for g in second] == [g.token_ids for g in first]
    assert [g.cached_tokens for g in second] == [(len(prompt) - 1) // 8 * 8 for prompt in prompts]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_seeded_samples_do_not_depend_on_the_batch(overlap: bool) -> None:
    engine = make_engine("tiny-qwen3", disable_overlap_schedule=not overlap)
    prompts = make_prompts()
    settings = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}]
    params = [
        SamplingParams(16, 40 + i, temperature=0.8, ignore_eos=True, **settings[i % len(settings)])
        for i in range(len(prompts))
    ]
    together = engine.generate(prompts, params)
    alone = [engine.generate([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    other_seed = engine.generate([prompts[4]], [SamplingParams(16, 999, temperature=0.8, ignore_eos=True)])[0]
    assert other_seed.token_ids != alone[4].token_ids


@pytest.mark.parametrize("chunk", [None, 9])
def test_logprobs_of_prompt_and_output_match_a_forward_pass(chunk: int | None) -> None:
    engine = make_engine("tiny-llama", chunked_prefill_size=chunk)
    prompt = make_prompts()[4]
    got = engine.generate([prompt], [greedy(6)], logprobs=True, top_logprobs=3, prompt_logprobs_start=0)[0]
    scored = engine.generate(
        [prompt + got.token_ids], [greedy(0)], logprobs=True, top_logprobs=3, prompt_logprobs_start=0
    )[0]
    assert scored.token_ids == []
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs.token_ids == prompt + got.token_ids
    assert scored.prompt_logprobs.logprobs[0] is None
    both = (got.prompt_logprobs.logprobs + got.logprobs)[1:]
    assert both == pytest.approx(scored.prompt_logprobs.logprobs[1:], abs=1e-4)
    for token, logprob, top in zip(got.token_ids, got.logprobs, got.top_logprobs, strict=True):
        assert top[0] == (token, pytest.approx(logprob, abs=1e-6))  # greedy: the likeliest
        assert len(top) == 3


def test_prompt_logprobs_from_a_later_start_use_the_cache_before_it() -> None:
    engine = make_engine("tiny-llama", page_size=8)
    prompt = make_prompts()[4]
    whole = engine.generate([prompt], [greedy(1)], prompt_logprobs_start=0)[0]
    tail = engine.generate([prompt], [greedy(1)], prompt_logprobs_start=50)[0]
    assert tail.cached_tokens == 48
    assert tail.prompt_logprobs.token_ids == prompt[50:]
    assert tail.prompt_logprobs.logprobs == pytest.approx(whole.prompt_logprobs.logprobs[50:], abs=1e-4)


def test_min_new_tokens_keeps_stop_ids_away_exactly_so_long() -> None:
    engine = make_engine("tiny-llama")
    prompt = make_prompts()[3]
    free = engine.generate([prompt], [greedy(12)])[0].token_ids
    stop = (free[0],)
    for minimum in (0, 1, 2, 5):
        params = SamplingParams(12, 0, temperature=0.0, ignore_eos=True, stop_token_ids=stop, min_new_tokens=minimum)
        tokens = engine.generate([prompt], [params])[0].token_ids
        assert stop[0] not in tokens[:minimum]
        if minimum == 0:
            assert tokens == free[:1]


def test_nan_logits_end_that_request_alone() -> None:
    engine = make_engine("tiny-llama", disable_radix_cache=True)
    poison = 250
    prompts = [prompt for prompt in make_prompts() if poison not in prompt]
    expected = [generation.token_ids for generation in engine.generate(prompts, [greedy()] * len(prompts))]
    assert poison not in {token for tokens in expected for token in tokens}
    with torch.no_grad():
        engine.runner.model.model.embed_tokens.weight[poison] = float("nan")
        if engine.runner.model.lm_head.weight is engine.runner.model.model.embed_tokens.weight:
            pytest.fail("the preset must not tie its embeddings for this test")
    got = engine.generate([[1, poison, 2], *prompts], [greedy()] * (1 + len(prompts)))
    assert (got[0].finish.reason, got[0].finish.status) == ("abort", 500)
    assert "NaN" in got[0].finish.message
    assert [generation.token_ids for generation in got[1:]] == expected


def test_overlap_loop_is_one_step_behind() -> None:
    engine = make_engine("tiny-llama", disable_overlap_schedule=False)
    engine.submit(GenerateRequest("a", [1, 2, 3], greedy(2)))
    assert engine.step() == []
    assert [len(output.token_ids) for output in engine.step()] == [1]
    assert [output.finish.reason for output in engine.step()] == ["length"]
    assert engine.is_idle


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 10**6}, "--context-length 1000000 is above the model's limit, 2048"),
        ({"max_total_tokens": 8, "page_size": 16}, "8 KV tokens do not make one page of 16 tokens"),
        (
            {"max_total_tokens": 2**31 - 1, "device": "cpu"},
            "2147483632 KV tokens and the tables of .* requests take .* GiB",
        ),
        ({"max_running_requests": 10**9, "device": "cpu"}, "lower --max-total-tokens or --max-running-requests"),
        ({"device": "cuda"}, "--device cuda: torch finds no CUDA device"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, object], message: str) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        settings = {"device": "cuda", "mem_fraction_static": 1e-9}
        message = "--mem-fraction-static 1e-09 leaves no memory for KV"
    with pytest.raises(EngineError, match=message):
        make_engine("tiny-llama", **settings)


@pytest.mark.parametrize(
    ("taker", "message"),
    [
        ("models.load_model", "the weights of tiny-llama do not fit in the memory that is free on the GPU"),
        ("KVCache", "more than the GPU has left: lower --max-total-tokens or --max-running-requests"),
    ],
)
def test_what_a_gpu_has_no_memory_for_is_named(monkeypatch: pytest.MonkeyPatch, taker: str, message: str) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"scheduler.engine.{taker}", allocate)
    with pytest.raises(EngineError, match=message):
        make_engine("tiny-llama")


@dataclass(frozen=True)
class OtherHasLess(HostGroup):
    """The world of rank 0 of two. other: KV tokens, bytes taken and bytes of memory of rank 1, the poorer one."""

    other: tuple[int, int, int] = (0, 0, 0)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        assert values[0] > self.other[0]
        return [list(values), list(self.other)]


def engine_beside(other: tuple[int, int, int]) -> Engine:
    config = EngineConfig(model_path="tiny-llama", dtype="float32", device="cpu", num_threads=1)
    return Engine(config, groups=replace(ALONE, world=OtherHasLess(0, 2, other=other)))


def test_the_rank_with_the_least_memory_sets_the_pages_of_all() -> None:
    engine = engine_beside((100, 0, 0))
    assert (engine.memory.total_tokens, engine.context_length) == (96, 96)
    message = "--mem-fraction-static 0.85 leaves no memory for KV on rank 1: 9.0 GiB of 10.0 GiB are taken"
    with pytest.raises(EngineError, match=message):
        engine_beside((15, 9 << 30, 10 << 30))


def compiler_is_imported(_: Place, preset: str) -> bool:
    make_engine(preset).generate([[1, 2, 3]], [greedy(2)])
    return "torch._dynamo" in sys.modules


def test_a_start_does_without_the_compiler_of_torch() -> None:
    """Importing it takes as long as importing torch, on every rank."""
    assert run_ranks(compiler_is_imported, 1, "tiny-deepseek-v3", timeout=100.0) == [False]
