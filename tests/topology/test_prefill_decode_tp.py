"""Prefill and decode servers of different tensor-parallel sizes say what one process says."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server_process import ServerProcess
from tests.topology.cluster import cluster_of

pytestmark = pytest.mark.timeout(240)
PROMPTS = [[(7 * i + 31 * j) % 251 for i in range(length)] for j, length in enumerate((1, 16, 33, 90, 300))]
FIELDS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
PENALTIES = {"frequency_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {"65": 3.5, "66": 3.0}}
Answers = list[tuple[str, list[float]]]


def model_args(model: str) -> tuple[str, ...]:
    return ("--model-path", model, "--device=cpu", "--dtype=float32", "--num-threads=1", "--max-total-tokens=4096")


def complete(url: str, model: str, **fields: object) -> Answers:
    body = {"model": model, "prompt": PROMPTS, **FIELDS, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, tuple[Answers, Answers]]]:
    """Without and with penalties, by model."""
    found = {}
    for model in ("tiny-qwen3-moe", "tiny-deepseek-v3"):
        server = ServerProcess(*model_args(model))
        try:
            url = server.wait_ready()
            found[model] = complete(url, model), complete(url, model, **PENALTIES)
            for plain, penalized in zip(*found[model], strict=True):
                assert plain[0] != penalized[0]
        finally:
            server.stop()
    yield found


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "backend"),
    [
        ("tiny-qwen3-moe", 1, 2, "tcp"),
        ("tiny-deepseek-v3", 2, 1, "tcp"),
        ("tiny-qwen3-moe", 1, 2, "mooncake"),
        pytest.param("tiny-qwen3-moe", 2, 1, "nixl", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 1, "tcp", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 2, "tcp", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 2, 1, "mooncake", marks=pytest.mark.sweep),
        pytest.param("tiny-qwen3-moe", 1, 2, "nixl", marks=pytest.mark.sweep),
    ],
)
def test_sizes(
    model: str, prefill: int, decode: int, backend: str, expected: dict[str, tuple[Answers, Answers]]
) -> None:
    chunked = (f"--tp-size={prefill}", "--chunked-prefill-size=64")
    with cluster_of(
        prefill_args=chunked,
        decode_args=(f"--tp-size={decode}",),
        model_args=model_args(model),
        backend=backend,
    ) as cluster:
        # The second time from the prefill server's cache.
        for fields, answers in zip(({}, PENALTIES), expected[model], strict=True):
            got = complete(cluster.url, model, **fields)
            for (text, logprobs), (want, want_logprobs) in zip(got, answers, strict=True):
                assert text == want
                assert logprobs == pytest.approx(want_logprobs, abs=1e-4)
        cluster.wait_drained()
