"""A prefill server and a decode server over an optional backend answer as one process does, and leave in order."""

from __future__ import annotations

import signal
from collections.abc import Callable

import httpx
import pytest

from tests.server_process import ServerProcess

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
MODEL = "tiny-qwen3-moe"
FLAGS = ("--model-path", MODEL, "--device=cpu", "--dtype=float32", "--num-threads=1", "--max-total-tokens=4096")
CHUNKS = "--chunked-prefill-size=64"
LONG = [(31 * i * i + 7 * i) % 500 for i in range(300)]
BODIES: list[dict[str, object]] = [
    {"prompt": "Once upon a time", "max_tokens": 24, "logprobs": 2},
    # More than one chunk, and then the same prefix again out of the cache.
    {"prompt": LONG, "max_tokens": 16},
    {"prompt": [*LONG[:200], 5, 6, 7], "max_tokens": 16},
    {"prompt": [LONG[:40], LONG[40:99]], "max_tokens": 8, "temperature": 0.8, "seed": 3, "n": 2},
]
Answers = tuple[list[list[str]], list[float]]


def answers(url: str) -> Answers:
    """The texts of all choices of each answer, and the log probabilities of the first."""
    choices = []
    for body in BODIES:
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True} | body
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        choices.append(response.json()["choices"])
    return [[choice["text"] for choice in made] for made in choices], choices[0][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_texts_are_those_of_one_process(
    launch_server: Callable[..., ServerProcess], one_process: str, backend: str
) -> None:
    together = answers(one_process)
    apart = launch_server(*FLAGS, CHUNKS, "--disaggregation-transfer-backend", backend)
    texts, logprobs = answers(apart.wait_ready())
    assert texts == together[0]
    assert logprobs == pytest.approx(together[1], abs=1e-4)
    apart.process.send_signal(signal.SIGTERM)
    assert apart.process.wait(90) == 0, apart.stderr()
