"""`python launch.py` as a user meets it: real processes, real signals, the real `openai` client."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from tests.server_process import ROOT, ServerProcess, gone, wait_until

pytestmark = pytest.mark.timeout(240)

Launch = Callable[..., ServerProcess]
TINY = ("--model-path", "tiny-llama", "--device", "cpu", "--num-threads", "1", "--max-total-tokens", "8192")


def run_launch(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *args], capture_output=True, text=True, timeout=timeout, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit status 2 and one line of error with all `parts` in it; log lines may stand before it."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1, result.stderr
    for part in parts:
        assert part in errors[0]
    assert result.stdout == ""


class Stream:
    """A long streaming completion read in a thread. `text` grows; `error` is what ended it, if anything did."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.started = threading.Event()
        self._url, self._max_tokens = url, max_tokens
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0)
        try:
            chunks = client.completions.create(
                model="tiny-llama",
                prompt="Once upon a time",
                max_tokens=self._max_tokens,
                stream=True,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for chunk in chunks:
                self.started.set()
                for choice in chunk.choices:
                    self.text += choice.text
                    self.finish_reason = choice.finish_reason or self.finish_reason
        except Exception as error:
            self.error = error


def wait_for_rank(server: ServerProcess) -> psutil.Process:
    """Of a server that has one: its process, once it runs the rank's program."""
    found: list[psutil.Process] = []

    def find() -> bool:
        found[:] = [process for process in server.ranks() if "scheduler.rank" in process.cmdline()]
        return bool(found)

    wait_until(find, 60, "the rank has been started")
    return found[0]


def health(url: str) -> int:
    """Status of /health; 0 when nobody answers."""
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code
    except httpx.HTTPError:
        return 0


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    """One tiny server for the tests that leave it alive."""
    server = ServerProcess(*TINY)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_ready_line_has_a_curl_that_works(running: ServerProcess) -> None:
    while not running.stdout_lines[-1].startswith("curl"):
        running.next_line(60)
    words = shlex.split(running.stdout_lines[-1])
    assert words[:2] == ["curl", f"{running.url}/v1/chat/completions"]
    headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
    assert headers == {"Content-Type": "application/json"}
    answer = httpx.post(words[1], content=words[words.index("-d") + 1], headers=headers, timeout=60)
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "tiny-llama"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= body["usage"]["completion_tokens"] <= 64


def test_openai_client_chats(running: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    answer = client.chat.completions.create(
        model="tiny-llama", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
    )
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 5
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_port_in_use_is_named_before_the_model_is_looked_at(running: ServerProcess) -> None:
    port = running.url.rsplit(":", 1)[1]
    result = run_launch("--port", port, "--model-path", "/no/such/model")
    assert_refused(result, f"port {port} on 127.0.0.1 is in use", "--port")


def test_log_lines_have_one_format(running: ServerProcess) -> None:
    for line in running.stderr().splitlines():
        assert re.match(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (api|rank \d+): ", line), line


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--prot", "1"], ["unknown flag --prot", "did you mean --port?"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--host", "203.0.113.7", "--port", "0"], ["--host 203.0.113.7", "not an address of this machine"]),
        pytest.param(["--port", "0", "--model-path", "/no/such/model"], ["/no/such/model"], marks=pytest.mark.sweep),
        pytest.param(
            ["--port", "0", *TINY, "--context-length", "1000000"],
            ["--context-length 1000000", "2048"],
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_wrong_settings_are_one_line(args: list[str], parts: list[str]) -> None:
    assert_refused(run_launch(*args), *parts)


def test_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    assert_refused(run_launch("--port", "0", "--model-path", str(tmp_path)), "MambaForCausalLM")


@pytest.fixture(scope="module")
def doomed() -> Iterator[ServerProcess]:
    """A server for two tests, the second of which ends it; at ::1 where there is IPv6."""
    host = "[::1]"
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        host = "127.0.0.1"
    server = ServerProcess(*TINY, "--host", host)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_host_in_ipv6_brackets(doomed: ServerProcess) -> None:
    if "127.0.0.1" in doomed.url:
        pytest.skip("no IPv6 loopback here")
    assert doomed.url.startswith("http://[::1]:")
    assert health(doomed.url) == 200


def test_health_is_503_until_ready_and_ctrl_c_leaves_no_process(launch_server: Launch) -> None:
    server = launch_server(*TINY)
    rank = wait_for_rank(server)
    rank.suspend()  # or it might be ready before the first answer comes
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    (port,) = (connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: health(url) != 0, 60, "HTTP answers")
    assert health(url) == 503
    rank.resume()
    assert server.wait_ready() == url
    assert health(url) == 200
    ranks = server.ranks()
    server.signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert gone(ranks)
    assert "Traceback" not in server.stderr()


def test_sigterm_drains(launch_server: Launch) -> None:
    server = launch_server(*TINY)
    url = server.wait_ready()
    ranks = server.ranks()
    streams = [Stream(url, max_tokens=300) for _ in range(4)]
    for stream in streams:
        assert stream.started.wait(60)
    for rank in ranks:
        rank.suspend()  # or the streams might end, and the server with them, before the next lines are through
    server.signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503, 60, "/ready is 503")
    refused = httpx.post(f"{url}/v1/completions", json={"model": "tiny-llama", "prompt": "x"}, timeout=60)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    for rank in ranks:
        rank.resume()
    for stream in streams:
        stream.thread.join(60)
        assert stream.error is None
        assert stream.finish_reason == "length"
        assert stream.text == streams[0].text
    assert server.wait(60) == 0
    assert gone(ranks)


def test_second_signal_stops_at_once(launch_server: Launch) -> None:
    server = launch_server(*TINY)
    url = server.wait_ready()
    ranks = server.ranks()
    stream = Stream(url, max_tokens=1900)
    assert stream.started.wait(60)
    for rank in ranks:
        rank.suspend()  # or the stream might end before the second signal
    server.signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: finishing 1 request" in server.stderr(), 60, "the drain is logged")
    server.signal(signal.SIGINT)
    assert server.wait(60) == 128 + signal.SIGINT
    stream.thread.join(60)
    assert stream.finish_reason != "length"
    wait_until(lambda: gone(ranks), 60, "the rank has ended")
    assert "Traceback" not in server.stderr()


def test_frozen_rank_is_seen_by_health_and_drain_is_bounded(launch_server: Launch) -> None:
    server = launch_server(*TINY, "--health-timeout", "1", "--shutdown-timeout", "0.5")
    url = server.wait_ready()
    (rank,) = server.ranks()
    wait_until(lambda: health(url) == 200, 60, "/health is 200")
    rank.suspend()
    try:
        wait_until(lambda: health(url) == 503, 60, "/health is 503")
    finally:
        rank.resume()
    wait_until(lambda: health(url) == 200, 60, "/health is 200 again")
    stream = Stream(url, max_tokens=1900)
    assert stream.started.wait(60)
    rank.suspend()  # or the stream might end in its time
    server.signal(signal.SIGTERM)
    wait_until(lambda: "did not finish within --shutdown-timeout 0.5 s" in server.stderr(), 60, "the drain is over")
    rank.resume()
    assert server.wait(60) == 0
    stream.thread.join(60)
    assert isinstance(stream.error, openai.APIError)
    assert stream.error.code == "shutting_down"


def test_ctrl_c_while_modules_load_leaves_no_traceback() -> None:
    """`python -v` tells which module is being imported."""
    words = [sys.executable, "-v", str(ROOT / "launch.py"), "--help"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("import 'msgspec" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == -signal.SIGINT
    assert "Traceback" not in rest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_starting(launch_server: Launch, number: signal.Signals) -> None:
    server = launch_server(*TINY)
    ranks = [wait_for_rank(server)]
    server.signal(number)
    assert server.wait(60) in (0, 130, 128 + number, -number)
    wait_until(lambda: gone(ranks), 60, "the rank has ended")  # which it notices once it has imported everything
    assert "Traceback" not in server.stderr()


def test_killed_api_process_takes_the_rank_along(doomed: ServerProcess) -> None:
    ranks, address = doomed.ranks(), urlsplit(doomed.url)
    doomed.signal(signal.SIGKILL)
    assert doomed.wait(60) == -signal.SIGKILL
    wait_until(lambda: gone(ranks), 60, "the rank has ended")
    assert address.hostname is not None and address.port is not None
    family = socket.AF_INET6 if ":" in address.hostname else socket.AF_INET
    with socket.create_server((address.hostname, address.port), family=family):
        pass  # the port is free for the next server


def test_killed_rank_ends_the_server(running: ServerProcess) -> None:
    """Last of those that share the server."""
    (rank,) = running.ranks()
    stream = Stream(running.url, max_tokens=1900)
    assert stream.started.wait(60)
    rank.kill()
    stream.thread.join(60)
    assert isinstance(stream.error, openai.APIError)
    assert "rank 0 ended unexpectedly (signal SIGKILL)" in str(stream.error)
    assert running.wait(60) == 1
    assert "rank 0 ended unexpectedly (signal SIGKILL); stopping the server" in running.stderr()


@pytest.mark.slow
def test_default_model_answers(launch_server: Launch, smollm2_path: Path) -> None:
    server = launch_server("--served-model-name", "smollm2", "--max-total-tokens", "4096")
    url = server.wait_ready()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "List three fruits."}],
        max_tokens=10,
        temperature=0,
    )
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.startswith("Here are three fruits")
    assert psutil.Process(server.process.pid).children()[0].name().startswith("python")
