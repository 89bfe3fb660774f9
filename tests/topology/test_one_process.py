"""The one-process engine says what `transformers` says: the anchor of every other topology's parity test."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams
from tests.models.support import FAMILIES, make_checkpoint, random_ids

PROMPT_LENGTHS = (1, 7, 64, 65, 150)
NEW_TOKENS = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"disable_overlap_schedule": False},
    "chunks of 13": {"chunked_prefill_size": 13},
}


def reference_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Greedy continuation by whole forward passes; the margin between the first two candidates is checked."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            top = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            assert float(top.values[0] - top.values[1]) > 3e-4, "a near tie: choose another prompt"
            tokens.append(int(top.indices[0]))
    return tokens[len(prompt) :]


def adjusted_reference_tokens(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    """As `reference_tokens`: transformers' repetition penalty, then what OpenAI's API says of the others."""
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.tensor([tokens])
            logits = repetition(ids, model(input_ids=ids, use_cache=False).logits[:, -1].clone())[0]
            for token, count in Counter(tokens[len(prompt) :]).items():
                logits[token] -= count * params.frequency_penalty + params.presence_penalty
            for token, bias in params.logit_bias:
                logits[token] += bias
            top = logits.topk(2)
            assert float(top.values[0] - top.values[1]) > 3e-4, "a near tie: choose another prompt"
            tokens.append(int(top.indices[0]))
    return tokens[len(prompt) :]


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            model_path=str(folder), dtype="float32", device="cpu", max_total_tokens=2048, num_threads=1, **settings
        )
    )


def test_penalized_tokens_equal_those_of_transformers_processors(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.3},
        {"presence_penalty": 0.4, "logit_bias": ((3, 1.5), (5, -100.0))},
        {"frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        {"frequency_penalty": -0.2, "repetition_penalty": 1.1, "logit_bias": ((9, 0.5),)},
    ]
    params = [SamplingParams(NEW_TOKENS, 0, temperature=0.0, ignore_eos=True, **extra) for extra in settings]
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    expected = [adjusted_reference_tokens(model, *pair) for pair in zip(prompts, params, strict=True)]
    engine = engine_of(tmp_path, chunked_prefill_size=13, disable_overlap_schedule=False)
    assert [generation.token_ids for generation in engine.generate(prompts, params)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path)
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    expected = [reference_tokens(model, prompt) for prompt in prompts]
    params = [SamplingParams(NEW_TOKENS, 0, temperature=0.0, ignore_eos=True)] * len(prompts)
    for name, settings in VARIANTS.items():
        engine = engine_of(tmp_path, **settings)
        got = engine.generate(prompts, params)
        assert [generation.token_ids for generation in got] == expected, name
