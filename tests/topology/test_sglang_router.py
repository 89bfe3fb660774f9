"""Prefill and decode servers behind a router say what one server says: behind ours, and behind sglang-router."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.server_process import ServerProcess, held_port, wait_until

MODEL = "tiny-qwen3"
SERVER = ("--model-path", MODEL, "--max-total-tokens", "4096", "--num-threads", "1", "--context-length", "2048")
FRONTS = ("lockstep", "sglang")
READY_TIMEOUT = 240.0
# Of processes that share the machine with other tests.
PATIENCE = 60.0
# Batches of other shapes round differently.
TOLERANCE = 1e-4
# They differ between two answers to the same request.
VOLATILE = frozenset(("id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details"))

# One for all, because making one takes longer than most requests, and no connection that a server might be closing.
HTTP = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))

pytestmark = pytest.mark.timeout(480)


class Fleet(NamedTuple):
    """Servers by name: "one" does both halves; "lockstep" and "sglang" are routers before the same pair."""

    one: str
    fronts: dict[str, str]
    prefill: ServerProcess
    decode: ServerProcess


@contextlib.contextmanager
def sglang_router(prefill: str, bootstrap_port: int, decode: str) -> Iterator[str]:
    """The published package before one pair; its URL once it takes requests."""
    held = [held_port() for _ in range(2)]
    port, metrics_port = (each.getsockname()[1] for each in held)
    words = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
    words += ["--prefill", prefill, str(bootstrap_port), "--decode", decode]
    words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:

            def ready() -> bool:
                log.seek(0)
                assert process.poll() is None, log.read()
                with contextlib.suppress(httpx.HTTPError):
                    return HTTP.get(url + "/readiness", timeout=5).status_code == 200
                return False

            wait_until(ready, READY_TIMEOUT, "sglang-router takes requests")
            yield url
        finally:
            process.kill()
            process.wait(60)
            for each in held:
                each.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        bootstrap_port = stack.enter_context(held_port()).getsockname()[1]

        def start(*words: str) -> ServerProcess:
            server = ServerProcess(*words)
            stack.callback(server.stop)
            return server

        tcp = ("--disaggregation-transfer-backend", "tcp")
        port = ("--disaggregation-bootstrap-port", str(bootstrap_port))
        one = start(*SERVER)
        prefill = start(*SERVER, *tcp, "--disaggregation-mode", "prefill", *port)
        decode = start(*SERVER, *tcp, "--disaggregation-mode", "decode")
        for server in (one, prefill, decode):
            server.wait_ready(READY_TIMEOUT)
        pair = ("--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url)
        fronts = {"lockstep": start("--disaggregation-mode", "router", *pair).wait_ready(READY_TIMEOUT)}
        if find_spec("sglang_router") is not None:
            fronts["sglang"] = stack.enter_context(sglang_router(prefill.url, bootstrap_port, decode.url))
        yield Fleet(one.url, fronts, prefill, decode)


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest, fleet: Fleet) -> str:
    """The URL of a router."""
    if request.param not in fleet.fronts:
        pytest.skip("the package sglang-router is not installed")
    return fleet.fronts[request.param]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = HTTP.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return stable(answer.json())


def stable(content: Any) -> Any:
    """Without what differs from answer to answer."""
    if isinstance(content, dict):
        return {name: stable(value) for name, value in content.items() if name not in VOLATILE}
    return [stable(entry) for entry in content] if isinstance(content, list) else content


def same(got: Any, wanted: Any) -> bool:
    """Equal, numbers with a fraction nearly so."""
    if isinstance(wanted, float) and isinstance(got, float | int):
        return abs(got - wanted) <= TOLERANCE
    if isinstance(wanted, dict) and isinstance(got, dict):
        return got.keys() == wanted.keys() and all(same(got[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list) and isinstance(got, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return bool(got == wanted)


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which must end with [DONE]."""
    with HTTP.stream("POST", url + path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [stable(json.loads(line.removeprefix("data: "))) for line in lines[:-1]]


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "List three fruits."}], "max_tokens": 12}
TEXT = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12}
NATIVE = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
GREEDY = {"temperature": 0}
RANDOM = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
LONG = " ".join(f"word{index}" for index in range(90))
ANSWERS = {
    "chat": ("/v1/chat/completions", CHAT | GREEDY),
    "chat samples": ("/v1/chat/completions", CHAT | RANDOM | {"n": 3}),
    "chat logprobs": ("/v1/chat/completions", CHAT | GREEDY | {"logprobs": True, "top_logprobs": 3}),
    "chat one token": ("/v1/chat/completions", CHAT | GREEDY | {"max_tokens": 1, "logprobs": True}),
    "chat penalties": (
        "/v1/chat/completions",
        CHAT | RANDOM | {"n": 2, "frequency_penalty": 0.7, "presence_penalty": -0.3, "logit_bias": {"65": 4}},
    ),
    "text": ("/v1/completions", TEXT | GREEDY),
    "text penalties": ("/v1/completions", TEXT | GREEDY | {"repetition_penalty": 1.4, "logit_bias": {"66": 3.5}}),
    "text long prompt": ("/v1/completions", TEXT | GREEDY | {"prompt": LONG}),
    "text samples": ("/v1/completions", TEXT | RANDOM | {"n": 2}),
    "text prompts": ("/v1/completions", TEXT | GREEDY | {"prompt": ["one", "two", "three"]}),
    "text prompts, samples": ("/v1/completions", TEXT | RANDOM | {"prompt": ["one", "two"], "n": 2}),
    "text echo": ("/v1/completions", TEXT | GREEDY | {"echo": True, "logprobs": 3}),
    "native": ("/generate", NATIVE),
    "native penalties": (
        "/generate",
        NATIVE | {"sampling_params": NATIVE["sampling_params"] | {"repetition_penalty": 1.4, "frequency_penalty": 0.5}},
    ),
    "native samples": ("/generate", NATIVE | {"sampling_params": {"max_new_tokens": 8, "n": 2, "sampling_seed": 3}}),
    "native ids": ("/generate", {"input_ids": [5, 6, 7], "sampling_params": NATIVE["sampling_params"]}),
    "native prompts": ("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": NATIVE["sampling_params"]}),
    "native logprobs": ("/generate", NATIVE | {"return_logprob": True, "top_logprobs_num": 2}),
    "native prompt logprobs": (
        "/generate",
        NATIVE | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_are_those_of_one_server(fleet: Fleet, front: str, case: str) -> None:
    path, body = ANSWERS[case]
    wanted = post(fleet.one, path, body)
    got = post(front, path, body)
    assert same(got, wanted), (got, wanted)


@pytest.mark.parametrize("case", ["chat samples", "chat logprobs", "text prompts", "text echo"])
def test_streams_are_those_of_one_server(fleet: Fleet, front: str, case: str) -> None:
    path, body = ANSWERS[case]
    body = body | {"stream_options": {"include_usage": True}}
    assert same(joined(events(front, path, body)), joined(events(fleet.one, path, body)))


def joined(stream: list[Any]) -> dict[int, Any]:
    """Text, log probabilities and end of each choice, and usage under -1: steps may be cut differently."""
    found: dict[int, Any] = {}
    for event in stream:
        assert "error" not in event, event
        for choice in event["choices"]:
            entry = found.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            entry["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            logprobs = choice["logprobs"] or {}
            entry["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            entry["end"] = choice["finish_reason"] or entry["end"]
        if event.get("usage") and not event["choices"]:
            found[-1] = event["usage"]
    return found


@pytest.mark.parametrize("case", ["native", "native prompts", "native prompt logprobs"])
def test_native_streams_end_as_those_of_one_server(fleet: Fleet, front: str, case: str) -> None:
    path, body = ANSWERS[case]

    def last(url: str) -> dict[int, Any]:
        return {event.get("index", 0): event for event in events(url, path, body)}

    got, wanted = last(front), last(fleet.one)
    assert got.keys() == wanted.keys()
    assert all(same(got[index], wanted[index]) for index in wanted), (got, wanted)


def test_stop_strings_and_ids(fleet: Fleet, front: str) -> None:
    text = post(fleet.one, "/v1/completions", TEXT | GREEDY)["choices"][0]["text"]
    ids = post(fleet.one, "/generate", NATIVE)["output_ids"]
    for body in ({"stop": [text[4:6]]}, {"stop_token_ids": [ids[0]]}, {"stop_token_ids": [ids[3]]}):
        wanted = post(fleet.one, "/v1/completions", TEXT | GREEDY | body)
        assert wanted["choices"][0]["finish_reason"] == "stop"
        assert same(post(front, "/v1/completions", TEXT | GREEDY | body), wanted), body


def test_openai_client(fleet: Fleet, front: str) -> None:
    def texts(url: str) -> list[str]:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE) as api:
            whole = api.chat.completions.create(**CHAT, temperature=0)
            parts = api.chat.completions.create(**CHAT, temperature=0, stream=True)
            return [whole.choices[0].message.content or "", "".join(p.choices[0].delta.content or "" for p in parts)]

    got = texts(front)
    assert got[0] == got[1] and got == texts(fleet.one)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_reaches_the_client_with_its_reason(front: str, stream: bool) -> None:
    body = TEXT | {"prompt": "a" * 3000, "stream": stream}
    answer = HTTP.post(front + "/v1/completions", json=body)
    assert "context length" in answer.text
    assert answer.status_code == 400


def test_concurrent_requests_keep_apart(fleet: Fleet, front: str) -> None:
    def ask(url: str, number: int, into: dict[int, Any]) -> None:
        into[number] = post(url, "/v1/completions", TEXT | GREEDY | {"prompt": f"{number} is the number", "seed": 1})

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=ask, args=(front, number, found)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    wanted: dict[int, Any] = {}
    for number in range(16):
        ask(fleet.one, number, wanted)
    assert same([found[number] for number in range(16)], [wanted[number] for number in range(16)])


def is_idle(fleet: Fleet) -> bool:
    """By what the ranks say when they are asked: what they have reported may be half a second old."""
    queues = ("running", "waiting", "bootstrapping", "sending", "connecting", "receiving")
    infos = [HTTP.get(server.url + "/server_info").json() for server in (fleet.prefill, fleet.decode)]
    states = [state for info in infos for state in info["internal_states"]]
    return not any(state[f"{queue}_requests"] for state in states for queue in queues)


def aborted(server: ServerProcess) -> float:
    """Samples of which the client has left."""
    prefix = 'lockstep_requests_total{finish_reason="abort"} '
    lines = HTTP.get(server.url + "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(prefix)).removeprefix(prefix))


def test_client_that_leaves_frees_both_servers(fleet: Fleet, front: str) -> None:
    before = aborted(fleet.decode)
    body = TEXT | GREEDY | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", front + "/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    wait_until(lambda: aborted(fleet.decode) == before + 1, PATIENCE, "decode has ended the request")
    wait_until(lambda: is_idle(fleet), PATIENCE, "both servers are idle")
    assert aborted(fleet.decode) == before + 1
    assert post(front, "/v1/completions", TEXT | GREEDY)["choices"][0]["text"]


def test_controls_of_the_package(fleet: Fleet) -> None:
    if "sglang" not in fleet.fronts:
        pytest.skip("the package sglang-router is not installed")
    url = fleet.fronts["sglang"]
    assert HTTP.get(url + "/get_model_info").json()["model_path"] == MODEL
    wait_until(lambda: is_idle(fleet), PATIENCE, "both servers are idle")
    assert HTTP.post(url + "/flush_cache").status_code == 200
    workers = HTTP.get(url + "/workers").json()["workers"]
    assert sorted((worker["worker_type"], worker["is_healthy"]) for worker in workers) == [
        ("decode", True),
        ("prefill", True),
    ]


def test_what_only_our_router_takes(fleet: Fleet) -> None:
    url = fleet.fronts["lockstep"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", TEXT | GREEDY | {"prompt": [5, 6, 7]}),
        ("/v1/completions", TEXT | GREEDY | {"prompt": [[5, 6], [7]], "n": 2}),
        ("/generate", NATIVE | {"text": ["a", "b"]}),
        ("/generate", NATIVE | {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2, "n": 2, "seed": 1}] * 2}),
    ]
    for path, body in cases:
        assert same(post(url, path, body), post(fleet.one, path, body)), body
    for path in ("/v1/models", "/model_info"):
        assert stable(HTTP.get(url + path).json()) == stable(HTTP.get(fleet.one + path).json())
    assert post(url, "/tokenize", {"prompt": "abc"}) == post(fleet.one, "/tokenize", {"prompt": "abc"})
    assert HTTP.get(url + "/health_generate").status_code == 200
