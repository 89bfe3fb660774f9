"""The bad days: clients that leave, engines that fail, servers that start or stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

from scheduler.messages import Finish
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.service import Service
from server.tokenizer import ByteTokenizer
from server.validation import SamplingDefaults
from tests.server.conftest import ENGINE, MODEL, Served, background, serve
from tests.server_process import wait_until

pytestmark = pytest.mark.timeout(120)

_LONG = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}


def _raw_post(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A connection on which the request has been sent and nothing has been read."""
    data = json.dumps(body).encode()
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_client_that_leaves_while_queued(stream: bool, path: str) -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        body = _LONG | {"stream": stream} if path != "/generate" else {"text": ["a", "b"], "stream": stream}
        connections = [_raw_post(served, body, path) for _ in range(8)]
        expected = 8 if path != "/generate" else 16
        wait_until(lambda: served.rank.num_samples == expected)  # type: ignore[union-attr]
        for connection in connections:
            connection.close()
        wait_until(lambda: served.rank.num_samples == 0)  # type: ignore[union-attr]
        wait_until(lambda: served.client.num_live == 0)
        assert len(served.rank.aborted) == expected


def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        served.rank.allow(1)
        with served.http.stream("POST", "/v1/completions", json=_LONG | {"stream": True}) as response:
            first = next(response.iter_lines())
            assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
            served.rank.allow(2)
        wait_until(lambda: served.rank.num_samples == 0)  # type: ignore[union-attr]
        assert served.rank.steps <= 3
        wait_until(lambda: served.client.num_live == 0)
        assert served.http.get("/health").status_code == 200  # behind the rank's word of the end
        text = served.http.get("/metrics").text
        assert 'lockstep_requests_total{finish_reason="abort"} 1.0' in text
        assert 'lockstep_running_requests{rank="0"} 0.0' in text


def test_nobody_else_is_aborted_when_some_leave() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        leaving = [_raw_post(served, _LONG) for _ in range(5)]
        with background(served, {"prompt": "xy", "max_tokens": 4}) as answers:
            wait_until(lambda: served.rank.num_samples == 6)  # type: ignore[union-attr]
            for connection in leaving:
                connection.close()
            wait_until(lambda: served.rank.num_samples == 1)  # type: ignore[union-attr]
            served.rank.hold.clear()
        assert answers[0].json()["choices"][0]["text"] == "xyxy"


_STATUSES = [400, 500, 503]


@pytest.mark.parametrize("status", _STATUSES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_failure_before_the_first_token_has_its_status(served: Served, path: str, stream: bool, status: int) -> None:
    assert served.rank is not None
    served.rank.finish_next = Finish("abort", message="no luck", status=status)
    body = {"prompt": "a", "text": "a", "messages": [{"role": "user", "content": "a"}], "stream": stream}
    body.pop("text" if path != "/generate" else "prompt")
    assert served.error(path, body, status)["message"] == "no luck"


def test_failure_after_the_first_token_is_an_event() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        served.rank.allow(1)
        with served.http.stream("POST", "/v1/completions", json=_LONG | {"stream": True, "n": 2}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            served.rank.finish_next = Finish("abort", message="no luck", status=500)
            served.rank.allow(1)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["message"], error["type"], error["code"]) == ("no luck", "internal_server_error", 500)
        assert not any('"finish_reason":"' in line for line in rest)
        wait_until(lambda: served.client.num_live == 0)


def test_the_openai_client_raises_what_breaks_a_stream() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        served.rank.allow(1)
        stream = served.openai.completions.create(model=MODEL, prompt="a", max_tokens=500, stream=True)
        next(stream)
        served.rank.finish_next = Finish("abort", message="no luck", status=500)
        served.rank.allow(1)
        with pytest.raises(openai.APIError, match="no luck"):
            list(stream)


def test_death_of_the_engine_ends_everything_at_once() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        with background(served, _LONG) as whole, background(served, _LONG | {"stream": True}) as stream:
            wait_until(lambda: served.rank.num_samples == 2)  # type: ignore[union-attr]
            served.call(served.client.fail, "rank 0 ended unexpectedly (signal SIGKILL)")
        for response in (whole[0], stream[0]):
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "rank 0 ended unexpectedly (signal SIGKILL)"
        for path in ("/health", "/ready"):
            assert served.http.get(path).status_code == 503
        assert served.error("/v1/completions", _LONG, 503)["code"] == "engine_failed"
        assert served.http.get("/v1/models").status_code == 200
        assert served.http.get("/metrics").status_code == 200


def test_a_stop_before_the_work_is_done_says_so() -> None:
    """In streams too, as new requests are told: clients may turn to another server."""
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        served.rank.allow(1)
        with served.http.stream("POST", "/v1/completions", json=_LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            with background(served, _LONG) as whole:
                wait_until(lambda: served.rank.num_samples == 2)  # type: ignore[union-attr]
                served.call(served.client.start_draining)
                served.call(served.client.shut_down)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        expected = {
            "message": "the server is shutting down",
            "type": "service_unavailable_error",
            "param": None,
            "code": "shutting_down",
        }
        assert json.loads(rest[-2].removeprefix("data: "))["error"] == expected
        assert (whole[0].status_code, whole[0].json()["error"]) == (503, expected)
        assert served.error("/v1/completions", _LONG, 503) == expected


def test_a_stop_after_a_failure_keeps_the_reason() -> None:
    with serve() as served:
        served.call(served.client.fail, "rank 0 cannot go on: another rank is gone")
        served.call(served.client.shut_down)
        error = served.error("/v1/completions", _LONG, 503)
        assert (error["message"], error["code"]) == ("rank 0 cannot go on: another rank is gone", "engine_failed")


def test_before_the_engine_is_ready() -> None:
    with serve(with_rank=False) as served:
        for path in ("/health", "/ready", "/health_generate"):
            assert served.http.get(path).status_code == 503
        for path in ("/v1/models", "/metrics", "/server_info", "/model_info", "/get_load"):
            assert served.http.get(path).status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
            ("/generate", {"text": "a"}),
        ):
            assert served.error(path, body, 503)["code"] == "starting"


def test_draining_finishes_what_runs() -> None:
    with serve() as served:
        assert served.rank is not None
        served.rank.hold.set()
        with background(served, {"prompt": "xy", "max_tokens": 4}) as answers:
            wait_until(lambda: served.rank.num_samples == 1)  # type: ignore[union-attr]
            served.call(served.client.start_draining)
            assert served.error("/v1/completions", _LONG, 503)["code"] == "shutting_down"
            assert served.http.get("/ready").status_code == 503
            assert served.http.get("/health").status_code == 200
            idle = asyncio.run_coroutine_threadsafe(served.client.wait_idle(), served.loop)
            assert not idle.done()
            served.rank.hold.clear()
        assert answers[0].json()["choices"][0]["text"] == "xyxy"
        idle.result(60)


def test_many_streams_are_served_alike() -> None:
    """256 streams of which each gets its own text, whole."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        prompt = f"{number:03d} "
        body = {"prompt": prompt, "max_tokens": 8, "stream": True}
        response = await http.post("/v1/completions", json=body)
        events = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == prompt * 2

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=256)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(one(http, number) for number in range(256)))

    with serve() as served:
        asyncio.run(main(served.url))
        assert served.rank is not None
        assert served.rank.aborted == []
        assert served.client.num_live == 0


class _SlowTokenizer(ByteTokenizer):
    """Takes until `go` is set for long texts, of which it then sees little."""

    longest_token = 1000

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 1000:
            assert self.go.wait(60)
        return super().encode(text[:4])


def test_a_long_prompt_does_not_hold_up_others() -> None:
    tokenizer = _SlowTokenizer()
    with serve(tokenizer=tokenizer) as served:
        with (
            background(served, {"prompt": "long" * 10_000, "max_tokens": 4}) as one,
            background(served, {"prompt": ["many"] * 1000, "max_tokens": 1}) as batch,
        ):
            answer = served.openai.completions.create(model=MODEL, prompt="short", max_tokens=4)
            assert answer.choices[0].text == "shor"
            assert served.http.get("/health").status_code == 200
            assert not one
            tokenizer.go.set()
        assert one[0].json()["choices"][0]["text"] == "long"
        assert len(batch[0].json()["choices"]) == 1000


class _GatedTokenizer(ByteTokenizer):
    """Each text of 50,000 characters or more needs a permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.waiting: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= 50_000:
            self.waiting.append(text)
            assert self.permits.acquire(timeout=60)
        return super().encode(text[:4])


def test_lists_of_long_prompts_take_turns_with_others() -> None:
    tokenizer = _GatedTokenizer()
    client = EngineClient()
    config = ServerConfig(engine=ENGINE, served_model_name=MODEL)

    async def main() -> None:
        service = Service(config, client, tokenizer, SamplingDefaults())
        many = ["x" * 50_000] * 20
        lists = [asyncio.create_task(service.encode(many, add_special=True)) for _ in range(4)]
        while len(tokenizer.waiting) < 4:  # every thread has a text of a list
            await asyncio.sleep(0.002)
        one = asyncio.create_task(service.encode(["y" * 2000], add_special=True))
        await asyncio.sleep(0)
        tokenizer.permits.release()
        assert [len(ids) for ids in await asyncio.wait_for(one, 60)] == [4]
        tokenizer.permits.release(79)
        assert [[len(ids) for ids in encoded] for encoded in await asyncio.gather(*lists)] == [[4] * 20] * 4
        service.close()

    asyncio.run(main())
    client.close()


def test_aborts_at_any_time() -> None:
    """Requests that are aborted, left or finished at once do no harm to each other."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"{number} ", "max_tokens": 1 + number % 40, "rid": f"r{number}", "stream": number % 2 == 0}
        if number % 4 == 3:
            with contextlib.suppress(httpx.TimeoutException):
                await http.post("/v1/completions", json=body, timeout=0.001 * (number % 29 + 1))
            return
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        if number % 4 == 1:
            await asyncio.sleep(0.0005 * (number % 31))
            assert (await http.post("/abort_request", json={"rid": f"r{number}"})).status_code == 200
        response = await request
        assert response.status_code == 200
        if number % 4 in (0, 2):
            assert '"length"' in response.text

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(one(http, number) for number in range(120)))

    with serve(max_running=16) as served:
        asyncio.run(main(served.url))
        wait_until(lambda: served.rank.num_samples == 0)  # type: ignore[union-attr]
        wait_until(lambda: served.client.num_live == 0)
        assert served.openai.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].text == "aa"
