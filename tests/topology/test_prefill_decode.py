"""Prefill and decode in two engines say what one engine says, whatever the prompt, the settings and the sampling."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from disagg.bootstrap_client import FAKE_BOOTSTRAP_HOST
from disagg.fake import first_token
from disagg.registry import KV_MANAGERS
from scheduler.engine import Engine
from scheduler.messages import STATUS_UNFIT, Bootstrap, SamplingParams
from tests.models.support import make_checkpoint
from tests.scheduler.test_engine import (
    PRESETS,
    adjusted,
    adjusted_reference,
    greedy,
    make_engine,
    make_prompts,
    reference,
)
from tests.topology.pair import joined, pair_of, wait_for_state

pytestmark = pytest.mark.timeout(240)
REAL = [name for name in KV_MANAGERS if name != "fake"]
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "overlap on both sides": {
        "prefill": {"disable_overlap_schedule": False},
        "decode": {"disable_overlap_schedule": False},
    },
    "small chunks": {"prefill": {"chunked_prefill_size": 7}},
    "overlap, small chunks": {
        "prefill": {"chunked_prefill_size": 13, "disable_overlap_schedule": False},
        "decode": {"disable_overlap_schedule": False},
    },
    "page of one": {"prefill": {"page_size": 1}, "decode": {"page_size": 1}},
    "big pages": {"prefill": {"page_size": 64}, "decode": {"page_size": 64}},
    "decode keeps prefixes": {"decode": {"disaggregation_decode_enable_radix_cache": True}},
    "prefill keeps none": {"prefill": {"disable_radix_cache": True}},
    "little prefill memory": {"prefill": {"max_total_tokens": 112, "context_length": 96}},
    "little decode memory": {"decode": {"max_total_tokens": 160, "context_length": 128}},
    "retraction": {"decode": {"max_total_tokens": 160, "context_length": 128, "num_reserved_decode_tokens": 0}},
    "overlap, retraction": {
        "decode": {
            "max_total_tokens": 160,
            "context_length": 128,
            "num_reserved_decode_tokens": 0,
            "disable_overlap_schedule": False,
        }
    },
    "two at a time": {"prefill": {"max_running_requests": 2}, "decode": {"max_running_requests": 2}},
    "checksum": {"prefill": {"disaggregation_checksum": True}},
}


def expected(preset: str) -> list[list[int]]:
    return [generation.token_ids for generation in reference(preset)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_family(preset: str) -> None:
    prompts = make_prompts()
    with pair_of(preset) as pair:
        for _ in range(2):  # the second time the prefill side has the prompts in its cache
            got = pair.generate(prompts, [greedy()] * len(prompts))
            assert [generation.token_ids for generation in got] == expected(preset)
        assert got[4].cached_tokens == 64
        pair.check_drained()


@pytest.mark.parametrize("backend", REAL)
def test_every_backend(backend: str) -> None:
    prompts = make_prompts()
    with pair_of("tiny-qwen3-moe", backend) as pair:
        got = pair.generate(prompts, [greedy()] * len(prompts))
        assert [generation.token_ids for generation in got] == expected("tiny-qwen3-moe")
        pair.check_drained()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting(variant: str) -> None:
    prompts = make_prompts()
    with pair_of("tiny-llama", **VARIANTS[variant]) as pair:
        for _ in range(2):
            got = pair.generate(prompts, [greedy()] * len(prompts), in_order="retraction" in variant)
            assert [generation.token_ids for generation in got] == expected("tiny-llama")
        if "retraction" in variant:
            assert pair.decode_scheduler.retractions_total > 0
        if variant == "decode keeps prefixes":
            assert pair.decode_scheduler.memory.cache.num_pages > 0
        pair.check_drained()


SAMPLING = {
    "temperature": SamplingParams(20, 11, temperature=0.9),
    "top k": SamplingParams(20, 12, temperature=1.3, top_k=5),
    "top p": SamplingParams(20, 13, temperature=1.1, top_p=0.7),
    "min p": SamplingParams(20, 14, temperature=1.5, min_p=0.1),
    "penalties": SamplingParams(20, 15, temperature=0.9, frequency_penalty=0.4, presence_penalty=0.3),
    "repetition penalty": SamplingParams(20, 16, temperature=0.0, repetition_penalty=1.5),
    "logit bias": SamplingParams(20, 17, temperature=0.0, logit_bias=((65, 3.5), (66, 3.0)), frequency_penalty=0.7),
    "one token": SamplingParams(1, 0, temperature=0.0),
    "no token": SamplingParams(0, 0),
}


@pytest.fixture(scope="module")
def single() -> Engine:
    return make_engine("tiny-llama")


@pytest.mark.parametrize("name", SAMPLING)
def test_every_way_to_sample(name: str, single: Engine) -> None:
    prompts = make_prompts()
    params = [SAMPLING[name]] * len(prompts)
    options = {"logprobs": True, "top_logprobs": 3}
    want = single.generate(prompts, params, **options)
    with pair_of("tiny-llama") as pair:
        got = pair.generate(prompts, params, **options)
        pair.check_drained()
    for one, two in zip(want, got, strict=True):
        assert (one.token_ids, one.finish) == (two.token_ids, two.finish)
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        assert [[id_ for id_, _ in top] for top in one.top_logprobs] == [
            [id_ for id_, _ in top] for top in two.top_logprobs
        ]


@pytest.mark.parametrize("variant", ["overlap, small chunks", "overlap, retraction"])
def test_penalties_hold_across_the_hand_over(variant: str) -> None:
    prompts = make_prompts()
    with pair_of("tiny-llama", **VARIANTS[variant]) as pair:
        got = pair.generate(prompts, adjusted(), in_order="retraction" in variant)
        assert [generation.token_ids for generation in got] == adjusted_reference("tiny-llama")
        assert ("retraction" in variant) == (pair.decode_scheduler.retractions_total > 0)
        pair.check_drained()


def test_stop_token_as_the_first_token_ends_on_the_decode_side(single: Engine) -> None:
    prompt = make_prompts()[3]
    first = single.generate([prompt], [greedy()])[0].token_ids[0]
    params = SamplingParams(24, 0, temperature=0.0, stop_token_ids=(first,))
    with pair_of("tiny-llama") as pair:
        (got,) = pair.generate([prompt], [params])
        assert (got.token_ids, got.finish.reason, got.finish.matched) == ([first], "stop", first)
        assert pair.decode_scheduler.batches_launched == 0
        pair.check_drained()


def test_prompt_logprobs_arrive_on_the_decode_side(single: Engine) -> None:
    prompt = make_prompts()[4]
    options = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs_start": 0}
    (want,) = single.generate([prompt], [greedy(4)], **options)
    with pair_of("tiny-llama", prefill={"chunked_prefill_size": 16}) as pair:
        (got,) = pair.generate([prompt], [greedy(4)], **options)
        pair.check_drained()
    assert want.prompt_logprobs is not None and got.prompt_logprobs is not None
    assert got.prompt_logprobs.token_ids == prompt
    assert got.prompt_logprobs.logprobs[1:] == pytest.approx(want.prompt_logprobs.logprobs[1:], abs=1e-4)
    assert len(got.prompt_logprobs.top[5]) == 2


def test_prefill_side_says_one_token_and_length(single: Engine) -> None:
    prompt = make_prompts()[4]
    with pair_of("tiny-llama") as pair:
        request = pair.request("r", prompt, greedy())
        pair.submit(request)
        pair.run()
        said = joined(pair.prefill_outputs["r"])
        got = joined(pair.decode_outputs["r"])
        assert (said.token_ids, said.finish.reason) == (got.token_ids[:1], "length")
        assert got.token_ids == single.generate([prompt], [greedy()])[0].token_ids


def test_pages_go_out_while_later_chunks_compute() -> None:
    prompt = make_prompts()[4]  # 70 tokens, pages of 16
    with pair_of("tiny-llama", prefill={"chunked_prefill_size": 20}) as pair:
        pair.submit(pair.request("r", prompt, greedy()))
        wait_for_state(pair, "r", "prefilling")
        sent = []
        while "r" in pair.prefill_scheduler.requests:
            outgoing = pair.prefill_scheduler.requests["r"].transfer
            sent.append(outgoing.pages_sent)
            pair.step()
        assert sorted(set(sent)) == [1, 2, 3, 5]  # after 20, 40, 60 and 70 tokens
        pair.run()
        assert joined(pair.decode_outputs["r"]).token_ids == expected("tiny-llama")[4]


def test_fake_path_needs_no_peer_and_leaves_nothing() -> None:
    """Statement 17 of the hand-over: a request with the fake host works on both roles of a real backend."""
    prompt = make_prompts()[3]
    with pair_of("tiny-llama") as pair:
        probe = pair.request("probe", prompt, greedy(6), bootstrap=Bootstrap(FAKE_BOOTSTRAP_HOST, 0, 7))
        pair.submit(probe)
        pair.run()
        got = joined(pair.decode_outputs["probe"])
        assert got.token_ids[0] == first_token("probe", pair.decode.info.vocab_size)
        assert len(got.token_ids) == 6
        assert joined(pair.prefill_outputs["probe"]).token_ids == expected("tiny-llama")[3][:1]
        pair.check_drained()


def test_fake_backend_serves_without_prefill() -> None:
    prompts = make_prompts()
    with pair_of("tiny-llama", "fake") as pair:
        for i, prompt in enumerate(prompts):
            pair.decode.submit(pair.request(f"r{i}", prompt, greedy(5)))
        pair.run()
        for i in range(len(prompts)):
            got = joined(pair.decode_outputs[f"r{i}"])
            assert got.token_ids[0] == first_token(f"r{i}", pair.decode.info.vocab_size)
            assert (len(got.token_ids), got.finish.reason) == (5, "length")
        pair.check_drained()


def test_other_weights_under_the_same_configuration_are_refused_with_both_values(tmp_path: Path) -> None:
    """One projection of one layer is another; norms and everything else are alike."""
    make_checkpoint("llama", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.01
    save_file(tensors, file, {"format": "pt"})
    with pair_of(str(tmp_path / "one"), decode={"model_path": str(tmp_path / "other")}) as pair:
        pair.decode.submit(pair.request("refused", [5, 6, 7], greedy()))
        pair.run()
        finish = pair.decode_outputs["refused"][-1].finish
        pair.check_drained()
    assert finish is not None and finish.status == STATUS_UNFIT
    found = re.findall(r"'LlamaForCausalLM, configuration (\w+), weights (\w+)'", finish.message)
    assert len(found) == 2, finish.message
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    assert "start both servers with the same --model-path and the same files there" in finish.message
