"""What becomes of the fields of a body, and of a model's own defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.messages import SamplingParams
from server.errors import ApiError
from server.openai_protocol import CompletionRequest
from server.validation import (
    SamplingDefaults,
    check_range,
    decode_body,
    decode_prompts,
    load_sampling_defaults,
    sampling_params,
    with_seed,
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1]}, SamplingDefaults(0.6, 0.95, 20, 0.0)),
        ({"top_k": 0}, SamplingDefaults()),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, SamplingDefaults(0.7, repetition_penalty=1.05)),
        ({"temperature": 0.7, "repetition_penalty": 0}, SamplingDefaults()),
        ({"temperature": None}, SamplingDefaults()),
        ({"temperature": "warm"}, SamplingDefaults()),
        ({"temperature": -0.5}, SamplingDefaults()),
        ({"temperature": float("nan")}, SamplingDefaults()),
        ({"top_p": 0}, SamplingDefaults()),
        ({"top_k": -2}, SamplingDefaults()),
        ({"min_p": 1.5}, SamplingDefaults()),
        ([], SamplingDefaults()),
    ],
)
def test_sampling_defaults_of_a_model(tmp_path: Path, content: Any, expected: SamplingDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert load_sampling_defaults(str(tmp_path)) == expected


def test_a_model_without_defaults(tmp_path: Path) -> None:
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults()


def test_what_the_request_says_comes_before_defaults() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.1)
    body = CompletionRequest(prompt=msgspec.Raw(b'""'), temperature=1.5, top_k=-1)
    found = sampling_params(body, defaults, 100, max_tokens=5, max_tokens_field="max_tokens")
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1.5, -1, 0.9, 0.1)
    assert 0 <= found.seed < 2**63


@pytest.mark.parametrize(("given", "expected"), [(None, 1.05), (1.0, 1.0), (1.3, 1.3)])
def test_a_models_repetition_penalty_holds_where_the_request_has_none(given: float | None, expected: float) -> None:
    body = CompletionRequest(prompt=msgspec.Raw(b'""'), repetition_penalty=given)
    defaults = SamplingDefaults(repetition_penalty=1.05)
    found = sampling_params(body, defaults, 100, max_tokens=5, max_tokens_field="max_tokens")
    assert found.repetition_penalty == expected


def test_seeds_of_samples() -> None:
    params = SamplingParams(max_new_tokens=1, seed=2**63 - 1)
    seeds = [with_seed(params, number).seed for number in range(128)]
    assert seeds[0] == params.seed
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [with_seed(params, number).seed for number in range(128)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (' "a" ', (["a"], False)),
        ('[ "a"]', (["a"], True)),
        (" [ 1, 2 ] ", ([[1, 2]], False)),
        ("[[1],\n[2]]", ([[1], [2]], True)),
    ],
)
def test_prompt_forms(raw: str, expected: Any) -> None:
    assert decode_prompts(msgspec.Raw(raw.encode()), "prompt") == expected


def test_paths_name_the_field() -> None:
    decoder = msgspec.json.Decoder(CompletionRequest)
    with pytest.raises(ApiError) as error:
        decode_body(decoder, b'{"prompt": "a", "stop": ["a", 1]}')
    assert error.value.param == "stop[1]"
    with pytest.raises(ApiError) as error:
        decode_prompts(msgspec.Raw(b"[[1], [2, true]]"), "prompt")
    assert error.value.param == "prompt[1][1]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1])
def test_ranges_hold_for_everything_that_is_not_inside(value: float) -> None:
    with pytest.raises(ApiError, match="min_p"):
        check_range("min_p", value, 0, 1)


def test_the_api_process_does_without_the_heavy_libraries() -> None:
    code = "import sys, server.app, server.tokenizer; sys.exit(' '.join({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == ""
