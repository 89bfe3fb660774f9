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


def model_args(model: str) -> tuple[str, ...]:
    return ("--model-path", model, "--device=cpu", "--dtype=float32", "--num-threads=1", "--max-total-tokens=4096")


def complete(url: str, model: str) -> list[tuple[str, list[float]]]:
    body = {"model": model, "prompt": PROMPTS, **FIELDS}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, list[tuple[str, list[float]]]]]:
    found = {}
    for model in ("tiny-qwen3-moe", "tiny-deepseek-v3"):
        server = ServerProcess(*model_args(model))
        try:
            found[model] = complete(server.wait_ready(), model)
        finally:
            server.stop()
    yield found


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "backend"),
    [
        ("tiny-qwen3-moe", 1, 2, "tcp"),
        ("tiny-qwen3-moe", 2, 1, "tcp"),
        ("tiny-qwen3-moe", 2, 2, "tcp"),
        ("tiny-deepseek-v3", 2, 1, "tcp"),
        ("tiny-qwen3-moe", 1, 2, "mooncake"),
        ("tiny-qwen3-moe", 2, 1, "nixl"),
    ],
)
def test_sizes(
    model: str, prefill: int, decode: int, backend: str, expected: dict[str, list[tuple[str, list[float]]]]
) -> None:
    chunked = (f"--tp-size={prefill}", "--chunked-prefill-size=64")
    with cluster_of(
        prefill_args=chunked,
        decode_args=(f"--tp-size={decode}",),
        model_args=model_args(model),
        backend=backend,
    ) as cluster:
        for _ in range(2):  # the second time from the prefill server's cache
            got = complete(cluster.url, model)
            for (text, logprobs), (want, want_logprobs) in zip(got, expected[model], strict=True):
                assert text == want
                assert logprobs == pytest.approx(want_logprobs, abs=1e-4)
        cluster.wait_drained()
