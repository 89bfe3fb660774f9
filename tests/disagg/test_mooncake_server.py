"""A prefill server and a decode server over mooncake answer as one process does."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.server_process import ServerProcess

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
MODEL = "tiny-qwen3"
FLAGS = ("--model-path", MODEL, "--device", "cpu", "--num-threads", "1", "--max-total-tokens", "4096")
LONG = [(31 * i * i + 7 * i) % 500 for i in range(300)]
BODIES: list[dict[str, object]] = [
    {"prompt": "Once upon a time", "max_tokens": 24, "logprobs": 2},
    # More than one chunk, and then the same prefix again out of the cache.
    {"prompt": LONG, "max_tokens": 16},
    {"prompt": [*LONG[:200], 5, 6, 7], "max_tokens": 16},
    {"prompt": [LONG[:40], LONG[40:99]], "max_tokens": 8, "temperature": 0.8, "seed": 3, "n": 2},
]


def test_texts_are_those_of_one_process(launch_server: Callable[..., ServerProcess]) -> None:
    chunks = ("--chunked-prefill-size", "64")
    servers = [
        launch_server(*FLAGS, *chunks, "--disaggregation-transfer-backend", "mooncake"),
        launch_server(*FLAGS, *chunks),
    ]
    answers = []
    for server in servers:
        url = server.wait_ready()
        made = []
        for body in BODIES:
            body = {"model": MODEL, "temperature": 0, "ignore_eos": True} | body
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert response.status_code == 200, response.text
            made.append([(choice["text"], choice["logprobs"]) for choice in response.json()["choices"]])
        answers.append(made)
    for apart, together in zip(*answers, strict=True):
        assert [text for text, _ in apart] == [text for text, _ in together]
    (apart, together) = (made[0][0][1] for made in answers)
    assert apart["tokens"] == together["tokens"]
    assert apart["token_logprobs"] == pytest.approx(together["token_logprobs"], abs=1e-4)
