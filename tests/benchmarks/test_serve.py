"""The load generator against a small HTTP server whose every byte and moment the test decides."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _http, _plot, serve
from benchmarks._stats import RequestRecord, decode_rate, summarize, summarize_ms
from benchmarks._workload import LengthRange, make_workload, parse_length, poisson_arrivals, words_for_ids

pytestmark = pytest.mark.timeout(240)

Send = Callable[[bytes], Awaitable[None]]
Answer = Callable[["FakeServer", int, dict[str, Any], Send], Awaitable[None]]


@dataclass
class FakeServer:
    """Answers POST by `answer(server, number of the request, body, send)`; keeps what it saw and when it sent."""

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: dict[int, list[float]] = field(default_factory=dict)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if lines[0].startswith("GET"):
                    models = json.dumps({"data": [{"id": "fake-model"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
                    continue
                await self._post(json.loads(body), writer)
                if headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _post(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            await self.answer(self, number, body, send)
        finally:
            self.in_flight -= 1


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_event(body: dict[str, Any], text: str, finish: str | None = None) -> bytes:
    content = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return event({"choices": [{"index": 0, "finish_reason": finish, **content}]})


def usage_event(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


async def stream_tokens(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
    """max_tokens pieces, 10 ms before the first and 4 ms before each other one, usage and [DONE]."""
    await send(STREAM_HEAD)
    for position in range(body["max_tokens"]):
        await asyncio.sleep(0.004 if position else 0.010)
        server.sent.setdefault(number, []).append(time.perf_counter())
        finish = "length" if position == body["max_tokens"] - 1 else None
        await send(chunk(text_event(body, f" w{position}", finish)))
    prompt = len(body["prompt"]) if "prompt" in body else 7
    await send(chunk(usage_event(prompt, body["max_tokens"])) + chunk(DONE) + b"0\r\n\r\n")


def options(server: FakeServer, **changes: Any) -> serve.ServeOptions:
    base: dict[str, Any] = {
        "base_url": server.url,
        "num_requests": 6,
        "concurrency": 3,
        "input_len": LengthRange(5, 9),
        "output_len": LengthRange(4, 4),
        "warmup": 0,
        "request_timeout": 60.0,
        "max_seconds": 120.0,
    }
    return serve.ServeOptions(**base | changes)


def run(answer: Answer, **changes: Any) -> tuple[FakeServer, list[RequestRecord], dict[str, Any]]:
    async def session() -> tuple[FakeServer, list[RequestRecord], dict[str, Any]]:
        async with FakeServer(answer) as server:
            return server, *await serve.run_benchmark(options(server, **changes))

    return asyncio.run(session())


def test_counts_bodies_and_concurrency() -> None:
    server, records, summary = run(stream_tokens)
    expected = make_workload(6, LengthRange(5, 9), LengthRange(4, 4), 10000, seed=0)
    by_prompt = sorted(body["prompt"] for body in server.bodies)
    assert by_prompt == sorted(item.prompt_ids for item in expected)
    assert {(b["model"], b["max_tokens"], b["temperature"], b["stream"]) for b in server.bodies} == {
        ("fake-model", 4, 0.0, True)
    }
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in server.bodies)
    assert server.most_in_flight == 3
    assert (summary["completed"], summary["failed"], summary["not_started"]) == (6, 0, 0)
    assert summary["input_tokens"] == sum(len(item.prompt_ids) for item in expected)
    assert summary["output_tokens"] == 24
    assert summary["errors"] == {}
    assert all(len(record.token_times) == 4 for record in records)


def test_latencies_match_the_times_the_server_sent_at() -> None:
    server, records, summary = run(stream_tokens, concurrency=1)
    # One at a time, so the server's requests are in the client's order.
    for number, record in enumerate(records):
        sent = server.sent[number]
        for seen, at in zip(record.token_times, sent, strict=True):
            assert 0 <= seen - at < 30
        assert record.ttft >= 0.010
        assert record.start <= sent[0] <= record.token_times[-1] <= record.end
    ttfts_ms = [1000 * (record.token_times[0] - record.start) for record in records]
    gaps_ms = [
        1000 * (later - earlier) for record in records for earlier, later in itertools.pairwise(record.token_times)
    ]
    for key, values in (("ttft_ms", ttfts_ms), ("itl_ms", gaps_ms)):
        assert summary[key]["mean"] == pytest.approx(np.mean(values), abs=0.001)
        for percent in (50, 90, 99):
            assert summary[key][f"p{percent}"] == pytest.approx(np.percentile(values, percent), abs=0.001)
    duration = records[-1].end - records[0].start
    assert summary["duration_s"] == pytest.approx(duration, abs=0.001)
    assert summary["output_tokens_per_s"] == pytest.approx(24 / duration, rel=0.001)


def test_several_tokens_in_one_piece_count_by_usage() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        await send(STREAM_HEAD + chunk(text_event(body, "a b") + text_event(body, " c d", "length")))
        await send(chunk(usage_event(11, 4)) + chunk(DONE) + b"0\r\n\r\n")

    _, records, summary = run(answer)
    assert (summary["input_tokens"], summary["output_tokens"]) == (66, 24)
    assert all(len(record.token_times) == 2 for record in records)


def answer_without_text(tokens: int) -> Answer:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        await send(STREAM_HEAD + chunk(text_event(body, "", "length")))
        await send(chunk(usage_event(5, tokens)) + chunk(DONE) + b"0\r\n\r\n")

    return answer


def test_tokens_without_text_are_an_answer_whose_only_time_is_its_end() -> None:
    _, records, summary = run(answer_without_text(tokens=4), warmup=1)
    assert (summary["completed"], summary["output_tokens"], summary["itl_ms"]) == (6, 24, None)
    assert all(record.start < record.token_times[0] <= record.end for record in records)


def test_no_tokens_are_no_answer() -> None:
    _, records, _ = run(answer_without_text(tokens=0))
    assert [record.error for record in records] == ["no output"] * 6


def test_events_cut_at_any_byte() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        data = text_event(body, "née") + text_event(body, " b", "stop") + usage_event(3, 2) + DONE
        await send(STREAM_HEAD)
        for position in range(len(data)):
            await send(chunk(data[position : position + 1]))
        await send(b"0\r\n\r\n")

    _, records, summary = run(answer, num_requests=1)
    assert (summary["completed"], summary["output_tokens"], len(records[0].token_times)) == (1, 2, 2)


def test_chat_sends_text_and_reads_deltas() -> None:
    server, _, summary = run(stream_tokens, endpoint="chat", text=True, extra_body={"top_p": 0.5}, ignore_eos=False)
    content = server.bodies[0]["messages"][0]["content"]
    assert 5 <= len(content.split()) <= 9
    assert server.bodies[0]["top_p"] == 0.5
    assert "ignore_eos" not in server.bodies[0]
    assert (summary["completed"], summary["input_tokens"], summary["output_tokens"]) == (6, 42, 24)


def test_warmup_is_not_measured_and_uses_other_prompts() -> None:
    server, records, _ = run(stream_tokens, warmup=2)
    assert len(records) == 6
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 8
    assert len(set(prompts)) == 8


@pytest.mark.parametrize(("new_connection", "connections"), [(True, 7), (False, 1)])
def test_connections(new_connection: bool, connections: int) -> None:
    server, *_ = run(stream_tokens, concurrency=1, new_connection=new_connection)
    # The first asks for the model's name.
    assert server.connections == connections


def test_each_failure_is_counted_by_kind() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        if number == 0:
            refusal = b'{"error": {"message": "queue is full"}}'
            await send(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(refusal), refusal))
        elif number == 1:
            await send(STREAM_HEAD + chunk(text_event(body, "a")))
            raise ConnectionError
        elif number == 2:
            await send(STREAM_HEAD + chunk(text_event(body, "a")) + b"0\r\n\r\n")
        elif number == 3:
            await send(STREAM_HEAD + chunk(event({"error": {"message": "out of memory"}})) + chunk(DONE) + b"0\r\n\r\n")
        else:
            await stream_tokens(server, number, body, send)

    _, records, summary = run(answer, concurrency=1, num_requests=5)
    assert [record.error for record in records] == [
        "HTTP 503",
        "connection",
        "incomplete stream",
        "error event",
        None,
    ]
    assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (1, 4, 4)
    assert {kind: entry["count"] for kind, entry in summary["errors"].items()} == {
        "HTTP 503": 1,
        "connection": 1,
        "incomplete stream": 1,
        "error event": 1,
    }
    assert "queue is full" in summary["errors"]["HTTP 503"]["example"]
    assert summary["errors"]["error event"]["example"] == "out of memory"


async def begin_and_stop(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
    await send(STREAM_HEAD + chunk(text_event(body, "a")))
    await asyncio.Event().wait()


def test_an_answer_that_takes_too_long_is_a_failure() -> None:
    _, records, summary = run(begin_and_stop, num_requests=2, request_timeout=0.3)
    assert [record.error for record in records] == ["timeout"] * 2
    assert (summary["completed"], summary["errors"]["timeout"]["count"]) == (0, 2)


def test_an_answer_may_end_with_its_connection() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        await send(head + text_event(body, "a", "length") + usage_event(5, 1) + DONE)
        raise ConnectionError

    server, records, summary = run(answer, concurrency=1)
    assert (summary["completed"], summary["output_tokens"]) == (6, 6)
    assert server.connections == 6  # the first asked for the model's name before


def test_a_connection_closed_between_answers_is_not_used_again() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        await stream_tokens(server, number, body, send)
        raise ConnectionError

    async def session() -> int:
        async with FakeServer(answer) as server:
            client = _http.HTTPClient(server.url, {})
            for _ in range(3):
                got = _http.Answer()
                await client.post("/v1/completions", json.dumps({"prompt": [1], "max_tokens": 2}).encode(), got)
                assert got.status == 200
                while any(connection.reusable for connection in client._idle):
                    await asyncio.sleep(0.001)  # until it is known that the server has closed it
            return server.connections

    assert asyncio.run(session()) == 3


def test_what_is_not_http_is_a_failure_with_its_reason() -> None:
    async def answer(server: FakeServer, number: int, body: dict[str, Any], send: Send) -> None:
        await send(b"SSH-2.0-OpenSSH_9.6\r\n")

    _, _, summary = run(answer)
    assert summary["errors"]["connection"]["count"] == 6
    assert "not HTTP" in summary["errors"]["connection"]["example"]


def test_answers_too_big_to_keep_are_read_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_UNREAD_BYTES", 1)
    _, records, summary = run(stream_tokens)
    assert (summary["completed"], summary["output_tokens"]) == (6, 24)
    assert all(len(record.token_times) == 4 for record in records)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:30000", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://[::1:80", "http://127.0.0.1:1/\u00e9"],
)
def test_a_base_url_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--base-url", url]) == 2
    assert capsys.readouterr().err.startswith(f"serve.py: --base-url {url} is not the URL of a server")


def test_stops_when_the_time_is_up() -> None:
    _, records, summary = run(begin_and_stop, num_requests=5, concurrency=2, max_seconds=0.3)
    assert [record.error for record in records] == ["stopped", "stopped"]
    assert (summary["failed"], summary["not_started"]) == (2, 3)


def test_an_unreachable_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:  # nobody else is given its port, and nobody listens there
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert serve.main(["--base-url", f"http://127.0.0.1:{port}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"serve.py: no answer from http://127.0.0.1:{port}/v1/models")
    assert message.count("\n") == 1


def test_poisson_times_are_seeded_and_have_the_rate() -> None:
    times = poisson_arrivals(4000, 50.0, seed=3)
    assert times == poisson_arrivals(4000, 50.0, seed=3)
    assert times != poisson_arrivals(4000, 50.0, seed=4)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    # Exponential gaps: mean and standard deviation are both 1 / rate (4000 of them: 1.6% standard error).
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.08)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.08)


def test_requests_start_at_their_poisson_times() -> None:
    _, records, summary = run(stream_tokens, request_rate=100.0, concurrency=None, num_requests=20)
    arrivals = poisson_arrivals(20, 100.0, seed=0)
    by_index = sorted(records, key=lambda record: record.index)
    starts = [record.start - by_index[0].start for record in by_index]
    assert starts == pytest.approx(arrivals, abs=1e-6)
    assert summary["completed"] == 20


def test_a_limit_on_top_of_a_rate_counts_the_wait() -> None:
    server, records, _ = run(stream_tokens, request_rate=10000.0, concurrency=1, num_requests=4)
    assert server.most_in_flight == 1
    # All were due at once, and each answer takes at least 22 ms: the last one waited for three others.
    assert max(record.ttft for record in records) >= 0.066


def test_decode_rate_counts_only_time_in_which_nobody_waits_for_a_first_token() -> None:
    early = RequestRecord(0, 0.0, output_tokens=5, token_times=[1.0, 2.0, 3.0, 4.0, 5.0], end=5.0)
    late = RequestRecord(1, 0.0, output_tokens=3, token_times=[2.5, 3.5, 4.5], end=4.5)
    # From 2.5 to 5.0: tokens at 3.0, 3.5, 4.0, 4.5 and 5.0.
    assert decode_rate([early, late]) == pytest.approx(5 / 2.5)
    assert decode_rate([RequestRecord(0, 0.0, output_tokens=1, token_times=[1.0], end=1.0)]) is None
    assert decode_rate([]) is None


def test_summaries_of_known_values() -> None:
    assert summarize_ms([0.001 * value for value in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.5,
        "p90": 90.1,
        "p99": 99.01,
        "max": 100.0,
    }
    assert summarize_ms([]) is None
    good = RequestRecord(0, 10.0, 8, 3, [10.5, 11.0, 12.0], 12.5)
    bad = RequestRecord(1, 10.0, 8, 1, [10.5], 14.0, error="timeout", error_message="late")
    summary = summarize([good, bad], not_started=2)
    assert (summary["completed"], summary["failed"], summary["not_started"]) == (1, 1, 2)
    assert summary["duration_s"] == 4.0
    assert (summary["output_tokens_per_s"], summary["input_tokens_per_s"]) == (0.75, 2.0)
    assert summary["ttft_ms"]["mean"] == 500.0
    assert summary["tpot_ms"]["mean"] == 750.0
    assert summary["e2e_ms"]["mean"] == 2500.0
    assert summary["errors"] == {"timeout": {"count": 1, "example": "late"}}


def test_workload_is_the_named_one() -> None:
    import random

    random.seed(0)
    expected = []
    for _ in range(3):
        ids = [random.randint(0, 10000) for _ in range(random.randint(100, 1024))]
        expected.append((ids, random.randint(100, 1024)))
    items = make_workload(3, LengthRange(100, 1024), LengthRange(100, 1024), 10000, seed=0)
    assert [(item.prompt_ids, item.output_len) for item in items] == expected
    assert len(words_for_ids([1, 2, 100000]).split()) == 3


@pytest.mark.parametrize("text", ["0", "9:5", "a", "3:", "-4"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="is not a length"):
        parse_length(text)


def test_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        serve.parse_args(["--plot", "run.png"])
    assert "-e '.[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--output", "--plot"])
@pytest.mark.parametrize("path", ["", "missing/run"])
def test_a_place_where_results_cannot_be_written_is_refused_before_the_run(
    flag: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.parse_args([flag, str(tmp_path / path)])
    assert "is not a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["\u043a\u043b\u044e\u0447", "k\r\nX: y"])
def test_a_key_that_no_header_can_hold_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.parse_args(["--api-key", key])
    assert "argument --api-key: an HTTP header cannot hold it" in capsys.readouterr().err


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [RequestRecord(i, 0.0, 5, 4, [0.1 + 0.01 * j for j in range(4)], 0.2 + 0.1 * i) for i in range(3)]
    path = tmp_path / "run.png"
    _plot.plot_run(records, summarize(records), "three requests", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_command_line_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    async def session() -> int:
        async with FakeServer(stream_tokens) as server:
            flags = ["--num-requests", "3", "--concurrency", "2", "--input-len", "4:6", "--output-len", "3"]
            flags += ["--base-url", server.url, "--warmup", "1", "--output", str(path), "--details", "--api-key", "k"]
            return await asyncio.to_thread(serve.main, flags)

    assert asyncio.run(session()) == 0
    results = json.loads(path.read_text())
    assert results["model"] == "fake-model"
    assert results["config"]["input_len"] == "4:6"
    assert results["config"]["api_key"] == "(set)"
    assert (results["completed"], results["output_tokens"]) == (3, 9)
    assert [len(request["token_times"]) for request in results["requests"]] == [3, 3, 3]
