"""Prefill and decode servers of different tensor-parallel sizes say what one process says."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams
from tests.topology.cluster import cluster_of

pytestmark = pytest.mark.timeout(480)
PROMPTS = [[(7 * i + 31 * j) % 251 for i in range(length)] for j, length in enumerate((1, 16, 33, 90, 300))]
NEW_TOKENS = 12
PENALTIES = {"frequency_penalty": 0.4, "repetition_penalty": 1.3}
BIAS = {65: 3.5, 66: 3.0}
Answers = list[tuple[list[int], list[float]]]  # tokens and log probabilities of each prompt


def model_args(model: str) -> tuple[str, ...]:
    return ("--model-path", model, "--device=cpu", "--dtype=float32", "--num-threads=1", "--max-total-tokens=4096")


def expected(model: str) -> tuple[Answers, Answers]:
    """What one process says, without and with penalties."""
    engine = Engine(EngineConfig(model_path=model, device="cpu", dtype="float32", num_threads=1, max_total_tokens=4096))
    plain = SamplingParams(NEW_TOKENS, 0, temperature=0.0, ignore_eos=True)
    penalized = msgspec.structs.replace(plain, logit_bias=tuple(BIAS.items()), **PENALTIES)
    found = []
    for params in (plain, penalized):
        generations = engine.generate(PROMPTS, [params] * len(PROMPTS), logprobs=True)
        found.append([(generation.token_ids, generation.logprobs) for generation in generations])
    assert all(one[0] != other[0] for one, other in zip(*found, strict=True))
    return found[0], found[1]


def generate(url: str, *, penalized: bool) -> Answers:
    params: dict[str, object] = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    if penalized:
        params |= {**PENALTIES, "logit_bias": {str(token): bias for token, bias in BIAS.items()}}
    body = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    answer = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [
        (choice["output_ids"], [logprob for logprob, *_ in choice["meta_info"]["output_token_logprobs"]])
        for choice in answer.json()
    ]


def assert_same(got: Answers, wanted: Answers) -> None:
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(got, wanted, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "backend"),
    [
        ("tiny-qwen3-moe", 1, 2, "tcp"),
        ("tiny-deepseek-v3", 2, 1, "tcp"),
        pytest.param("tiny-qwen3-moe", 1, 2, "mooncake", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 1, "nixl", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 1, "tcp", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 2, "tcp", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 1, "mooncake", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 1, 2, "nixl", marks=pytest.mark.sweep),
    ],
)
def test_sizes(model: str, prefill: int, decode: int, backend: str) -> None:
    with cluster_of(
        prefill_args=(f"--tp-size={prefill}", "--chunked-prefill-size=64"),
        decode_args=(f"--tp-size={decode}",),
        model_args=model_args(model),
        backend=backend,
    ) as cluster:
        # The second time from the prefill server's cache.
        for penalized, wanted in enumerate(expected(model)):
            assert_same(generate(cluster.url, penalized=bool(penalized)), wanted)
        cluster.wait_drained()
