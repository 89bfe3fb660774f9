"""An engine split over processes gives the tokens of the one-process engine, whatever is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from scheduler.config import EngineConfig
from scheduler.messages import SamplingParams
from tests.models.mixtral_from_dense import convert
from tests.models.support import make_checkpoint, random_ids
from tests.topology.engine_rank import Result, Scenario, run_on_ranks, run_scenario

# With four ranks Llama's two key/value heads are repeated, and DeepSeek's latent is whole on each.
FAMILIES = ("llama", "qwen3_moe", "mixtral", "deepseek_v3")
LENGTHS = (1, 7, 64, 65, 90)
NEW_TOKENS = 12


def greedy(new_tokens: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(new_tokens, 0, temperature=0.0, ignore_eos=True)


def with_each(params: list[SamplingParams], changes: list[dict[str, Any]]) -> list[SamplingParams]:
    return [msgspec.structs.replace(one, **change) for one, change in zip(params, changes, strict=True)]


def scenarios(folder: Path, seed: int) -> dict[str, Scenario]:
    def config(**settings: Any) -> EngineConfig:
        values: dict[str, Any] = {"max_total_tokens": 2048, **settings}
        return EngineConfig(model_path=str(folder), dtype="float32", device="cpu", num_threads=1, **values)

    prompts = [random_ids(length, seed=100 * seed + length) for length in LENGTHS]
    params = [greedy()] * len(prompts)
    penalties: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {},
        {"presence_penalty": 0.5, "logit_bias": ((5, 2.0),)},
    ]
    sampled = [SamplingParams(NEW_TOKENS, 7 + i, temperature=0.8, top_p=0.9, ignore_eos=True) for i in range(5)]
    few = prompts[2:]
    return {
        "twice, the second time from the cache": Scenario(config(), [prompts, prompts], params),
        "chunks of 13, overlapping steps": Scenario(
            config(chunked_prefill_size=13, disable_overlap_schedule=False), [prompts], with_each(params, penalties)
        ),
        "sampled, in a pool too small for all": Scenario(
            config(max_total_tokens=304, schedule_conservativeness=0.0),
            [prompts[:2] + few],
            with_each(sampled, penalties),
        ),
        "log probabilities": Scenario(
            config(), [few], params[:3], {"logprobs": True, "top_logprobs": 3, "prompt_logprobs_start": 0}
        ),
    }


def assert_same(got: Result, expected: Result, what: str) -> None:
    assert got.retractions == expected.retractions, what
    for one, other in zip(got.generations, expected.generations, strict=True):
        assert one.token_ids == other.token_ids, what
        assert (one.finish, one.cached_tokens) == (other.finish, other.cached_tokens), what
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), what
        if other.prompt_logprobs is not None:
            assert one.prompt_logprobs is not None
            assert one.prompt_logprobs.logprobs[1:] == pytest.approx(other.prompt_logprobs.logprobs[1:], abs=1e-4)


@pytest.mark.timeout(600)
def test_tokens_equal_those_of_one_process(tmp_path: Path) -> None:
    named: dict[str, Scenario] = {}
    for seed, family in enumerate(FAMILIES):
        folder = tmp_path / family
        make_checkpoint(family, folder)
        named |= {f"{family}: {name}": scenario for name, scenario in scenarios(folder, seed).items()}
    expected = {name: run_scenario(scenario) for name, scenario in named.items()}
    for name, result in expected.items():
        if "cache" in name:
            assert [g.cached_tokens for g in result.generations[5:]] == [0, 0, 48, 64, 80], name
        if "too small" in name:
            assert result.retractions > 0, name
    four = {name: named[name] for name in named if name.startswith(("llama", "deepseek_v3")) and "pool" not in name}
    for size, chosen in ((2, named), (4, four)):
        for rank, results in enumerate(run_on_ranks(list(chosen.values()), tp_size=size)):
            for name, got in zip(chosen, results, strict=True):
                assert_same(got, expected[name], f"{name}, rank {rank} of {size}")


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_text_of_a_real_model_with_experts(smollm2_path: Path, tmp_path: Path) -> None:
    """SmolLM2 as a mixture of three experts equal to its MLP, its nine heads and three experts over three ranks."""
    convert(smollm2_path, tmp_path / "moe", num_experts=3)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Water boils at", "1, 2, 3, 4,")]
    scenario = Scenario(
        EngineConfig(
            model_path=str(tmp_path / "moe"),
            dtype="float32",
            device="cpu",
            num_threads=1,
            max_total_tokens=256,
            context_length=64,
        ),
        [prompts],
        [SamplingParams(8, 0, temperature=0.0)] * len(prompts),
    )
    dense = msgspec.structs.replace(
        scenario, config=msgspec.structs.replace(scenario.config, model_path=str(smollm2_path))
    )
    expected = [generation.token_ids for generation in run_scenario(dense).generations]
    assert " Paris" in tokenizer.decode(expected[0])
    for results in run_on_ranks([scenario], tp_size=3):
        assert [generation.token_ids for generation in results[0].generations] == expected
