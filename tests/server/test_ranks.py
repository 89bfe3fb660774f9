"""A server of several ranks: it answers like one of one rank, and ends as a whole."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.server_process import ServerProcess, gone, wait_until

pytestmark = pytest.mark.timeout(240)

Launch = Callable[..., ServerProcess]
FLAGS = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    server = ServerProcess(*FLAGS, "--tp-size", "2", "--max-total-tokens", "2048")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def generate(url: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def running_requests(url: str) -> int:
    states = httpx.get(f"{url}/server_info", timeout=60).json()["internal_states"]
    return sum(state["running_requests"] for state in states)


def test_concurrent_requests_get_the_tokens_of_one_process(running: ServerProcess) -> None:
    prompts = [random_ids(length, seed=length) for length in (1, 9, 40, 41, 100, 130)]
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    greedy = SamplingParams(16, 0, temperature=0.0, ignore_eos=True)
    expected = [generation.token_ids for generation in engine.generate(prompts, [greedy] * len(prompts))]
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads:
        # Two clients that go away in the middle, so that aborts travel with the others' messages.
        leavers = [threads.submit(leave_after_first_event, running.url) for _ in range(2)]
        answers = list(
            threads.map(lambda ids: generate(running.url, input_ids=ids, sampling_params=params), prompts, timeout=60)
        )
        for leaver in leavers:
            leaver.result(60)
    assert [answer["output_ids"] for answer in answers] == expected
    wait_until(lambda: running_requests(running.url) == 0, 60, "the requests of those who left have ended")
    assert "memory leak" not in running.stderr()


def test_penalties_and_bias_through_the_openai_client(running: ServerProcess) -> None:
    """Only letters may come, so that the text shows the tokens."""
    letters = range(ord("A"), ord("Z") + 1)
    options: dict[str, Any] = {
        "model": "tiny-qwen3-moe",
        "prompt": "AFAR",
        "temperature": 0,
        "max_tokens": 16,
        "logit_bias": {str(letter): 100 for letter in letters},
    }
    cases: list[dict[str, float]] = [
        {},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 2},
        {"frequency_penalty": 0.3, "presence_penalty": -0.2, "repetition_penalty": 1.5},
    ]
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    bias = tuple((letter, 100.0) for letter in letters)
    params = [SamplingParams(16, 0, temperature=0.0, ignore_eos=True, logit_bias=bias, **case) for case in cases]
    generations = engine.generate([list(b"AFAR")] * len(cases), params)
    expected = [bytes(generation.token_ids).decode() for generation in generations]
    assert len(set(expected)) == len(cases)
    assert len(set(expected[2])) == 16
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as api:
        for case, text in zip(cases, expected, strict=True):
            extra = {name: value for name, value in case.items() if name == "repetition_penalty"}
            fields: Any = options | {name: case[name] for name in case.keys() - extra.keys()} | {"extra_body": extra}
            answer = api.completions.create(**fields, n=2)
            assert [choice.text for choice in answer.choices] == [text, text]
            assert "".join(part.choices[0].text for part in api.completions.create(**fields, stream=True)) == text
        with pytest.raises(openai.BadRequestError, match="frequency_penalty is 2.5; it must be at least -2"):
            api.completions.create(**options, frequency_penalty=2.5)


def leave_after_first_event(url: str) -> None:
    with httpx.stream("POST", f"{url}/generate", json={**LONG, "stream": True}, timeout=60) as response:
        next(response.iter_lines())


def test_idle_ranks_sleep(running: ServerProcess) -> None:
    wait_until(lambda: running_requests(running.url) == 0, 60, "the server is idle")
    ranks = [process for process in running.ranks() if "scheduler.rank" in process.cmdline()]
    assert len(ranks) == 2

    def sleep() -> bool:
        for rank in ranks:
            rank.cpu_percent()
        threading.Event().wait(1.5)
        return all(rank.cpu_percent() < 3.0 for rank in ranks)

    wait_until(sleep, 20, "both ranks sleep")  # the first look may still see the end of their work


@pytest.mark.parametrize("flags", [("--tp-size", "2", "--enable-dp-attention"), ()], ids=["groups", "replicas"])
def test_data_parallel_ranks_share_requests_and_nobody_is_left_asleep(
    launch_server: Launch, flags: tuple[str, ...]
) -> None:
    """Short requests around the moments at which all ranks have become idle, to ranks in turn and by name."""
    server = launch_server(*FLAGS, "--dp-size", "2", "--max-total-tokens", "2048", *flags)
    url = server.wait_ready()
    rng = random.Random(4)
    prompts = [random_ids(rng.randrange(1, 40), seed=seed) for seed in range(40)]
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    greedy = SamplingParams(2, 0, temperature=0.0, ignore_eos=True)
    expected = [generation.token_ids for generation in engine.generate(prompts, [greedy] * len(prompts))]
    gaps = [rng.choice([0.0, 0.0, 0.05, 0.3]) for _ in prompts]

    def ask(number: int) -> list[int]:
        time.sleep(gaps[number])
        params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        routed = {"routed_dp_rank": number % 2} if number % 3 == 0 else {}
        ids: list[int] = generate(url, input_ids=prompts[number], sampling_params=params, **routed)["output_ids"]
        return ids

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(len(prompts)), timeout=90)) == expected
    states = httpx.get(f"{url}/server_info", timeout=60).json()["internal_states"]
    assert [state["rank"] for state in states] == [0, 1]
    assert all(state["generated_tokens_total"] >= 25 for state in states)
    assert all(state["decode_graphs"] is False for state in states)  # on CPUs
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0
    assert "memory leak" not in server.stderr()


def test_a_killed_rank_ends_the_server(running: ServerProcess) -> None:
    """Last of those that share the server."""
    check_that_all_end(running, 0)


@pytest.mark.sweep
def test_a_killed_data_parallel_rank_ends_the_server(launch_server: Launch) -> None:
    server = launch_server(*FLAGS, "--tp-size=2", "--max-total-tokens=2048", "--dp-size=2", "--enable-dp-attention")
    server.wait_ready()
    check_that_all_end(server, 1)


def check_that_all_end(server: ServerProcess, killed: int) -> None:
    """With a rank that is killed while a request runs."""
    url, ranks = server.url, server.ranks()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{url}/generate", json=LONG, timeout=60)
        wait_until(lambda: running_requests(url) == 1, 60, "the request runs")
        ranks[killed].kill()
        assert server.wait(60) == 1
        assert answer.result(60).status_code == 500
        assert f"rank {killed} ended unexpectedly (signal SIGKILL)" in answer.result(60).text
    assert gone(ranks)
    assert f"rank {killed} ended unexpectedly (signal SIGKILL); stopping the server" in server.stderr()
    assert "Traceback" not in server.stderr()


def test_a_stopped_rank_is_reported_by_those_that_wait_for_it(launch_server: Launch) -> None:
    server = launch_server(*FLAGS, "--tp-size", "2", "--max-total-tokens", "2048", "--watchdog-timeout", "2")
    url = server.wait_ready()
    ranks = server.ranks()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{url}/generate", json=LONG, timeout=60)
        wait_until(lambda: running_requests(url) == 1, 60, "the request runs")
        ranks[1].suspend()
        assert server.wait(60) == 1
        assert answer.result(60).status_code == 500
    assert gone(ranks)
    assert "error: rank 0: step" in server.stderr()
    assert "has taken more than --watchdog-timeout 2 s and is at the forward pass" in server.stderr()
    assert re.search(r"in all_(reduce|gather)\b", server.stderr())  # the stack says what it waited for


def test_wrong_sizes_are_one_line(launch_server: Launch) -> None:
    server = launch_server(*FLAGS, "--tp-size", "3")
    assert server.wait(120) == 2
    (line,) = server.stderr().splitlines()
    assert line.startswith("error: tiny-qwen3-moe: ") and "over 3 ranks" in line
