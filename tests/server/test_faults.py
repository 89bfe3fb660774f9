"""Hostile clients, frozen processes, full memory: real processes, and what is left of them afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import zmq

from scheduler.config import EngineConfig, RankSettings
from scheduler.messages import ControlReply, ControlRequest, Inbound, RankReady, decode_outbound, encode
from server.rank_process import RankProcess
from tests.server_process import ServerProcess, gone, wait_until

pytestmark = pytest.mark.timeout(240)

Launch = Callable[..., ServerProcess]
TINY = ("--model-path", "tiny-llama", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
LONG = {"model": "tiny-llama", "prompt": "hello", "max_tokens": 1900, "ignore_eos": True}
GARBAGE = (b"", b"garbage", b"\xc1" * 10, b"\x93\xa5abort\x01\x02", random.Random(1).randbytes(1000))


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    """A server that decodes at most 4 requests together, for the tests that leave it alive."""
    server = ServerProcess(*TINY, "--max-total-tokens", "8192", "--max-running-requests", "4")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def post(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion has been asked for and nothing has been read."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def live(url: str) -> int:
    """Samples that the engine has, running or waiting."""
    states = httpx.get(f"{url}/server_info", timeout=60).json()["internal_states"]
    return sum(state["running_requests"] + state["waiting_requests"] for state in states)


def probe(url: str) -> list[int]:
    """The tokens of a fixed greedy request."""
    return generate(url, [5, 6, 7], 4)


def generate(url: str, prompt: list[int], length: int) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "leave",
    [socket.socket.close, reset, lambda connection: connection.shutdown(socket.SHUT_WR)],
    ids=["close", "reset", "half-close"],
)
def test_clients_that_leave(running: ServerProcess, stream: bool, leave: Callable[[socket.socket], None]) -> None:
    url, before = running.url, probe(running.url)
    connections = [post(url, LONG | {"stream": stream}) for _ in range(12)]
    try:
        wait_until(lambda: live(url) == 12, 60, "4 requests run and 8 wait")
        for connection in connections:
            leave(connection)
        wait_until(lambda: live(url) == 0, 60, "the engine has none of them")
    finally:
        for connection in connections:
            connection.close()
    assert probe(url) == before


def test_gauges_and_counters_after_a_mass_abort(running: ServerProcess) -> None:
    url = running.url

    def metric(name: str) -> float:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(name))
        return float(value)

    aborted = metric('lockstep_requests_total{finish_reason="abort"}')
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(12) as threads:
        answers = [
            threads.submit(
                client.completions.create,
                model="tiny-llama",
                prompt="hello",
                max_tokens=1900,
                extra_body={"ignore_eos": True, "rid": f"mass-{index}"},
            )
            for index in range(12)
        ]
        wait_until(lambda: live(url) == 12, 60, "4 requests run and 8 wait")
        assert httpx.post(f"{url}/flush_cache", timeout=60).status_code == 400
        (rank,) = running.ranks()
        rank.suspend()  # or some might end before they are aborted
        twice = httpx.post(f"{url}/v1/completions", json=LONG | {"rid": "mass-3"}, timeout=60)
        assert twice.status_code == 400
        assert "mass-3" in twice.json()["error"]["message"]
        for index in [*range(12), 3, 99]:
            assert httpx.post(f"{url}/abort_request", json={"rid": f"mass-{index}"}, timeout=60).status_code == 200
        rank.resume()
        for answer in answers:
            assert answer.result(60).choices[0].finish_reason == "abort"
    for gauge in ("running_requests", "waiting_requests", "waiting_tokens", "used_tokens"):
        wait_until(lambda gauge=gauge: metric(f"lockstep_{gauge}{{") == 0, 20, f"{gauge} is 0")  # type: ignore[misc]
    assert metric('lockstep_requests_total{finish_reason="abort"}') == aborted + 12
    assert httpx.post(f"{url}/flush_cache", timeout=60).status_code == 200


def test_bytes_that_are_not_http(running: ServerProcess) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    rng = random.Random(2)
    wrong_length = b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n"
    for data in (rng.randbytes(5000), b"\x16\x03\x01" + rng.randbytes(500), wrong_length):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(12) in (b"HTTP/1.1 400", b"")
    with socket.create_connection((host, int(port)), timeout=60) as connection:  # leaves in the middle of a body
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt')
    assert len(probe(running.url)) == 4


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", b'{"prompt": [' + b"1," * 9_999_999 + b"1]}", "prompt has 10000000 tokens"),
        ("/generate", b'{"input_ids": [' + b"1," * 9_999_999 + b"1]}", "input_ids has 10000000 tokens"),
        ("/v1/completions", b'{"prompt": "' + b"a" * 30_000_000 + b'"}', "prompt has 30000000 characters"),
        (
            "/v1/chat/completions",
            b'{"messages": [' + b",".join([b'{"role": "user", "content": "a"}'] * 20_000) + b"]}",
            "messages has 20000 messages",
        ),
        ("/v1/completions", b" " * (64 * 1024 * 1024 + 1), "--max-request-bytes"),
    ],
    ids=["ids", "native-ids", "text", "messages", "bytes"],
)
def test_huge_bodies(running: ServerProcess, path: str, body: bytes, message: str) -> None:
    answer = httpx.post(running.url + path, content=body, timeout=60)
    assert answer.status_code == (413 if "bytes" in message else 400)
    assert message in answer.json()["error"]["message"]
    assert len(probe(running.url)) == 4


def test_unreadable_messages_to_the_api_process(running: ServerProcess) -> None:
    before = probe(running.url)
    paths = {item.laddr for item in psutil.Process(running.process.pid).net_connections("unix")}
    (outbound,) = (path for path in paths if path.endswith("/outbound"))
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{outbound}")
        for data in GARBAGE:
            push.send(data)
        wait_until(lambda: running.stderr().count("cannot be read and is dropped") == len(GARBAGE), 60, "all are seen")
    assert probe(running.url) == before
    assert "Traceback" not in running.stderr()


def test_unreadable_messages_to_a_rank(tmp_path: Path) -> None:
    config = EngineConfig(model_path="tiny-llama", device="cpu", num_threads=1, max_total_tokens=256)
    inbound, outbound = f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.bind(inbound)
        pull.bind(outbound)
        rank = RankProcess(RankSettings(config, 0, inbound, outbound, parent_pid=os.getpid()))

        def ask(message: Inbound) -> ControlReply:
            push.send(encode(message))
            while True:
                assert pull.poll(20_000)
                answer = decode_outbound(pull.recv())
                if isinstance(answer, ControlReply):
                    return answer

        try:
            assert pull.poll(60_000)
            assert isinstance(decode_outbound(pull.recv()), RankReady)
            for data in GARBAGE:
                push.send(data)
            assert ask(ControlRequest(7, "ping")) == ControlReply(7, 0, True)
            assert not ask(ControlRequest(8, "dance")).ok
            assert ask(ControlRequest(9, "shutdown")).ok
            wait_until(lambda: rank.returncode() is not None, 60, "the rank has ended")
            assert rank.returncode() == 0
        finally:
            rank.end(grace=0)


def test_rank_that_stops_answering_ends_the_server(launch_server: Launch) -> None:
    server = launch_server(*TINY, "--dp-size", "2", "--watchdog-timeout", "2")
    url = server.wait_ready()
    ranks = server.ranks()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    fields = {"ignore_eos": True, "routed_dp_rank": 1}
    options = {"model": "tiny-llama", "prompt": "hello", "max_tokens": 1900, "extra_body": fields}
    with ThreadPoolExecutor(1) as threads:
        stream = client.completions.create(**options, stream=True)
        next(iter(stream))
        whole = threads.submit(lambda: client.completions.create(**options))
        wait_until(lambda: live(url) == 2, 60, "both requests run")
        ranks[1].suspend()
        with pytest.raises(openai.APIError, match="rank 1 has not answered for --watchdog-timeout 2 s"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="rank 1 has not answered for --watchdog-timeout 2 s"):
            whole.result(60)
    assert server.wait(60) == 1
    assert gone(ranks)


def test_a_suspended_api_process_does_not_blame_its_rank(launch_server: Launch) -> None:
    server = launch_server(*TINY, "--watchdog-timeout", "1", "--chunked-prefill-size", "128")
    url = server.wait_ready()
    api = psutil.Process(server.process.pid)
    api.suspend()
    threading.Event().wait(3.5)  # longer than the timeout and its lead, as a laptop that sleeps
    api.resume()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert len(generate(url, [5] * 1500, 2)) == 2  # pings are answered between the chunks of a long prompt
    assert server.process.poll() is None


def test_clients_that_neither_send_nor_read_do_not_disturb_the_end(launch_server: Launch) -> None:
    server = launch_server(*TINY, "--shutdown-timeout", "1", "--max-total-tokens", "65536")
    url = server.wait_ready()
    ranks = server.ranks()
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # bodies that stop half-way
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        # Enough events to fill the socket buffers of both ends.
        reader = stack.enter_context(post(url, LONG | {"stream": True, "n": 16, "logprobs": 5}))
        wait_until(lambda: live(url) == 16, 60, "the stream runs")
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert reader.recv(12) == b"HTTP/1.1 200"
    assert gone(ranks)
    assert "Traceback" not in server.stderr() and "connection(s) are closed" in server.stderr()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--page-size", "1", "--chunked-prefill-size", "1"), marks=pytest.mark.sweep),
        ("--page-size", "16", "--enable-overlap-schedule", "--schedule-policy", "lpm"),
    ],
)
def test_full_memory_changes_no_token_and_nothing_is_compiled_after_ready(
    launch_server: Launch, tmp_path: Path, quick_compiler: Path, flags: tuple[str, ...]
) -> None:
    words = (*TINY, "--max-total-tokens", "64", "--schedule-conservativeness", "0", *flags)
    compiles = {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{quick_compiler}:{os.environ['PATH']}"}
    server = launch_server(*words, env=compiles)
    url = server.wait_ready()
    at_ready = sorted(tmp_path.rglob("*"))
    work = [([5 + (index * 7 + at) % 400 for at in range(1 + index * 3 % 30)], 12 + index) for index in range(16)]
    alone = [generate(url, *item) for item in work]
    sampling = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for _, length in work]
    body = {"input_ids": [prompt for prompt, _ in work], "sampling_params": sampling}

    def state() -> dict[str, Any]:
        (found,) = httpx.get(f"{url}/server_info", timeout=60).json()["internal_states"]
        return dict(found)

    def some_are_retracted() -> bool:
        together = httpx.post(f"{url}/generate", json=body, timeout=60).json()
        assert [answer["output_ids"] for answer in together] == alone
        return bool(state()["retractions_total"] > 0)

    # None is, once in a while, where a loaded machine gives them to the rank one by one.
    wait_until(some_are_retracted, 60, "memory has run out")
    gauges = ("running_requests", "waiting_requests", "used_tokens")
    wait_until(lambda: [state()[gauge] for gauge in gauges] == [0, 0, 0], 60, "nothing is left of them")
    assert "leak" not in server.stderr()
    assert sorted(tmp_path.rglob("*")) == at_ready
