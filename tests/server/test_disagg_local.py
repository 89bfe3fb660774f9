"""Local mode with real processes: one command starts a whole group, and the group lives and ends as one."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import httpx
import psutil
import pytest

from server.request_body import MIN_BYTES_PER_SECOND
from tests.server_process import ROOT, ServerProcess, gone, wait_until

pytestmark = pytest.mark.timeout(240)

Launch = Callable[..., ServerProcess]
MODEL = "tiny-qwen3-moe"
TINY = ("--model-path", MODEL, "--device", "cpu", "--num-threads", "1", "--max-total-tokens", "4096")
FAKE = (*TINY, "--disaggregation-transfer-backend", "fake")
READ_TIMEOUT = 3.0
BODY_LIMIT = 4_000_000
BODIES = (f"--request-read-timeout={READ_TIMEOUT}", f"--max-request-bytes={BODY_LIMIT}")
TCP = (*TINY, "--disaggregation-transfer-backend", "tcp")
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
NAMES = {"prefill 0", "decode 0", "router"}


def servers(group: ServerProcess) -> dict[str, psutil.Process]:
    """The servers of a group by name, as far as they have been started."""
    found = {}
    for process in psutil.Process(group.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, StopIteration):
            link = next(word for word in process.cmdline() if word.startswith("--parent-link="))
            found[json.loads(link.removeprefix("--parent-link="))["name"]] = process
    return found


def started(group: ServerProcess) -> dict[str, psutil.Process]:
    wait_until(lambda: set(servers(group)) == NAMES, 60, "all servers have been started")
    return servers(group)


def everything(group: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(group.process.pid).children(recursive=True)


def complete(url: str, **fields: object) -> dict[str, object]:
    response = httpx.post(f"{url}/v1/completions", json=BODY | fields, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


class Stream:
    """A long stream read in a thread. `started` is set with its first event, `lines` holds all of them."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.lines: list[str] = []
        self.started = threading.Event()
        self.error: Exception | None = None
        self._url, self._body = url, BODY | {"max_tokens": max_tokens, "stream": True}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.started.set()
        except httpx.HTTPError as error:
            self.error = error


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two groups started at once: one over `fake`, one over `tcp`."""
    both = (ServerProcess(*FAKE, *BODIES), ServerProcess(*TCP))
    try:
        for group in both:
            group.wait_ready()
        yield both
    finally:
        for group in both:
            group.stop()


def test_fake_answers_and_says_that_it_means_nothing(groups: tuple[ServerProcess, ServerProcess]) -> None:
    group = groups[0]
    while "not meaningful" not in group.stdout_lines[-1]:
        group.next_line(60)
    first, curl, last = group.stdout_lines
    assert first.startswith(f"Lockstep is ready: {MODEL} (float32 on cpu, 1 prefill and 1 decode over fake) at http://")
    assert last == "Outputs are not meaningful: the fake transfer backend moves no KV."
    words = shlex.split(curl)
    headers = {"content-type": "application/json"}
    answer = httpx.post(words[1], content=words[words.index("-d") + 1], headers=headers, timeout=60).json()
    assert 1 <= answer["usage"]["completion_tokens"] <= 64
    assert complete(group.url)["usage"]["completion_tokens"] == 8  # type: ignore[index]
    workers = httpx.get(f"{group.url}/server_info", timeout=60).json()["workers"]
    assert [worker["role"] for worker in workers] == ["prefill", "decode"]
    assert all(worker["server_info"]["outputs_are_meaningful"] is False for worker in workers)


def test_tcp_answers_as_one_process_does(groups: tuple[ServerProcess, ServerProcess], one_process: str) -> None:
    fields = {"prompt": ["Once upon a time", "x" * 100], "n": 2, "temperature": 0.8, "seed": 7, "logprobs": 2}
    expected, found = complete(one_process, **fields), complete(groups[1].url, **fields)
    for one, other in zip(found["choices"], expected["choices"], strict=True):  # type: ignore[call-overload]
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
    assert found["usage"]["completion_tokens"] == 32  # type: ignore[index]


def test_servers_know_their_places(groups: tuple[ServerProcess, ServerProcess]) -> None:
    for group in groups:
        workers = httpx.get(f"{group.url}/server_info", timeout=60).json()["workers"]
        for worker in workers:
            assert worker["url"] == f"http://127.0.0.1:{worker['server_info']['port']}"
        cores = [set(process.cpu_affinity()) for name, process in started(group).items() if name != "router"]
        own = set(psutil.Process().cpu_affinity())
        assert set.union(*cores) == own or len(own) == 1
        assert len(own) == 1 or not set.intersection(*cores)


def test_health_probes_leave_nothing_behind(groups: tuple[ServerProcess, ServerProcess]) -> None:
    url = groups[1].url

    def queues() -> list[int]:
        return [
            sum(value for name, value in load.items() if name.startswith("num_"))
            for load in httpx.get(f"{url}/get_load", timeout=60).json()
        ]

    for _ in range(5):
        assert httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
    wait_until(lambda: queues() == [0, 0], 60, "nothing runs or waits")


def router_and_server(group: ServerProcess) -> tuple[str, str]:
    """URLs of the router and of the decode server behind it."""
    workers = httpx.get(f"{group.url}/workers", timeout=60).json()["workers"]
    return group.url, next(worker["url"] for worker in workers if worker["role"] == "decode")


def send_head(url: str, *headers: str) -> socket.socket:
    """A connection on which the head of a completion has been sent."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    lines = ("POST /v1/completions HTTP/1.1", "host: x", *headers, "", "")
    connection.sendall("\r\n".join(lines).encode())
    return connection


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    message: str


def read_all(connection: socket.socket) -> Answer:
    """The answer, whole; returns when the connection has ended, and only an orderly end raises nothing."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"])
    return Answer(int(status.split()[1]), headers, json.loads(body).get("error", {}).get("message", ""))


def headless(url: str) -> None:
    """Headers that do not end."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        answer = read_all(connection)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert f"the headers have not come to their end in {READ_TIMEOUT:g} s (--request-read-timeout)" == answer.message


def silent(url: str, chunked: bool) -> None:
    """Headers, the beginning of a body, and nothing more."""
    began = time.monotonic()
    with send_head(url, "transfer-encoding: chunked" if chunked else "content-length: 1000") as connection:
        connection.sendall(b'c\r\n{"prompt": "\r\n' if chunked else b'{"prompt": "')
        answer = read_all(connection)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert answer.message.startswith("the body does not come: 12 bytes")
    assert f"{READ_TIMEOUT:g} s (--request-read-timeout)" in answer.message
    assert time.monotonic() - began > READ_TIMEOUT - 0.1  # clocks count in steps


def dripping(url: str) -> None:
    """Two bytes now and then; the end of the connection is a reset, because more comes after it."""
    over = threading.Event()
    with send_head(url, "content-length: 100000") as connection, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(READ_TIMEOUT / 8):
                    connection.sendall(b"  ")

        threads.submit(drip)
        try:
            assert connection.recv(12) == b"HTTP/1.1 408"
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
        finally:
            over.set()


def slow(url: str) -> None:
    """Longer than the time limit, but at a rate far above the lowest one."""
    rate = 16 * MIN_BYTES_PER_SECOND
    body = json.dumps(BODY).encode().ljust(int(rate * READ_TIMEOUT * 1.5))
    began = time.monotonic()
    with send_head(url, f"content-length: {len(body)}", "connection: close") as connection:
        for start in range(0, len(body), rate // 10):
            connection.sendall(body[start : start + rate // 10])
            threading.Event().wait(0.1)
        assert read_all(connection).status == 200
    assert time.monotonic() - began > READ_TIMEOUT


def test_a_request_may_come_slowly_but_not_stand_still(groups: tuple[ServerProcess, ServerProcess]) -> None:
    clients = [headless, partial(silent, chunked=False), partial(silent, chunked=True), dripping, slow]
    with ThreadPoolExecutor(10) as threads:
        runs = [threads.submit(client, url) for client in clients for url in router_and_server(groups[0])]
        for run in runs:
            run.result(90)
    assert complete(groups[0].url)["usage"]["completion_tokens"] == 8  # type: ignore[index]


@pytest.mark.parametrize("close", [False, True], ids=["keep-alive", "close"])
@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_an_answer_is_read_after_a_body_that_is_too_long(
    groups: tuple[ServerProcess, ServerProcess], close: bool, chunked: bool
) -> None:
    """By a client that sends all of it first."""
    body = b" " * (BODY_LIMIT + (16 << 20))
    headers = ["transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"]
    for url in router_and_server(groups[0]):
        with send_head(url, *headers, *(["connection: close"] if close else [])) as connection:
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
            answer = read_all(connection)
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert f"longer than {BODY_LIMIT} bytes (--max-request-bytes)" in answer.message


def test_the_rest_of_a_refused_body_is_not_waited_for_long(groups: tuple[ServerProcess, ServerProcess]) -> None:
    with contextlib.ExitStack() as stack:
        for url in router_and_server(groups[0]):
            answer = httpx.post(f"{url}/no/such/path", content=b" " * BODY_LIMIT, timeout=60)
            assert (answer.status_code, answer.headers["connection"]) == (404, "close")
        heads = [f"content-length: {BODY_LIMIT + 1}"]
        connections = [stack.enter_context(send_head(url, *heads)) for url in router_and_server(groups[0])]
        for connection in connections:
            connection.settimeout(20)
            connection.sendall(b"{")
        for connection in connections:
            assert read_all(connection).status == 413


def test_ports_in_use_are_one_line(groups: tuple[ServerProcess, ServerProcess]) -> None:
    port = groups[0].url.rsplit(":", 1)[1]
    roles = {
        "--port": ["--disaggregation-transfer-backend", "tcp", "--port", port],
        "--disaggregation-bootstrap-port": ["--disaggregation-mode", "prefill", "--port", "0"]
        + ["--disaggregation-bootstrap-port", port],
    }
    for flag, words in roles.items():
        command = [sys.executable, str(ROOT / "launch.py"), "--model-path", "/no/such", *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert f"port {port} on 127.0.0.1 is in use" in line
        assert flag in line


def test_sigterm_drains(groups: tuple[ServerProcess, ServerProcess]) -> None:
    """Last of those that share the groups: it ends one."""
    group = groups[0]
    processes = everything(group)
    stream = Stream(group.url, max_tokens=400)
    assert stream.started.wait(60)
    group.signal(signal.SIGTERM)
    stream.thread.join(60)
    assert stream.error is None
    assert stream.lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in stream.lines[-2]
    assert group.wait(60) == 0
    wait_until(lambda: gone(processes), 60, "all processes have ended")
    assert "Traceback" not in group.stderr()
    order = [line for line in group.stderr().splitlines() if "stopping" in line]
    assert [name for line in order for name in NAMES if f" {name}: " in line] == ["router", "decode 0", "prefill 0"]


def test_killed_parent_leaves_nothing(groups: tuple[ServerProcess, ServerProcess]) -> None:
    """Ends the other group."""
    group = groups[1]
    processes = everything(group)
    assert len(processes) == 5
    stream = Stream(group.url, max_tokens=1900)
    assert stream.started.wait(60)
    group.signal(signal.SIGKILL)
    assert group.wait(60) == -signal.SIGKILL
    wait_until(lambda: gone(processes), 60, "all processes have ended")
    with socket.create_server(("127.0.0.1", int(group.url.rsplit(":", 1)[1]))):
        pass  # the port is free for the next one


def test_a_lost_server_ends_the_group_and_its_requests(launch_server: Launch) -> None:
    group = launch_server(*FAKE)
    url = group.wait_ready()
    processes = everything(group)
    decode = started(group)["decode 0"]
    stream = Stream(url, max_tokens=1900)
    assert stream.started.wait(60)
    decode.kill()
    assert group.wait(60) == 1
    wait_until(lambda: gone(processes), 60, "all processes have ended")
    stream.thread.join(60)
    assert stream.error is not None or any('"error"' in line for line in stream.lines)
    assert "decode 0 ended unexpectedly (signal SIGKILL); stopping all servers" in group.stderr()
    assert "Traceback" not in group.stderr()


@pytest.mark.parametrize("name", ["prefill 0", "router"])
def test_a_server_lost_at_the_start_ends_the_group(launch_server: Launch, name: str) -> None:
    group = launch_server(*FAKE)
    processes = started(group)
    processes[name].kill()
    assert group.wait(60) == 1
    wait_until(lambda: gone(list(processes.values())), 60, "all servers have ended")
    assert f"{name} ended unexpectedly (signal SIGKILL); stopping all servers" in group.stderr()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_the_start(launch_server: Launch, number: signal.Signals) -> None:
    group = launch_server(*FAKE)
    processes = started(group)
    group.signal(number)
    assert group.wait(60) in (0, 130, 128 + number)
    wait_until(lambda: gone(list(processes.values())), 60, "all servers have ended")


@pytest.mark.sweep
def test_second_signal_stops_at_once(launch_server: Launch) -> None:
    group = launch_server(*FAKE, "--shutdown-timeout", "100")
    url = group.wait_ready()
    processes = everything(group)
    stream = Stream(url, max_tokens=1900)
    assert stream.started.wait(60)
    group.signal(signal.SIGTERM)
    wait_until(lambda: "router: told by the parent process: stopping" in group.stderr(), 60, "the router drains")
    group.signal(signal.SIGINT)
    assert group.wait(60) == 128 + signal.SIGINT
    wait_until(lambda: gone(processes), 60, "all processes have ended")
    assert "local: SIGINT: stopping at once" in group.stderr()
    assert group.stderr().count("SIGINT") == 1  # the servers were not told by whoever sent it


def test_refused_model_ends_the_group_with_status_2() -> None:
    words = ["--disaggregation-transfer-backend", "fake", "--port", "0", "--model-path", "/no/such/model"]
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr.count("/no/such/model") == 1  # both servers refuse it, and one says why
    assert "could not start; stopping all servers" in result.stderr
    assert "Traceback" not in result.stderr
