"""The router's part of a request: what servers get, what the client gets, and the endpoints beside generation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.config import StartupError
from server.errors import ApiError
from server.router_body import bootstrap_host, chat_samples, completion_samples, generate_samples
from server.router_config import server_url
from tests.server.conftest import MODEL, Served
from tests.server.router_support import DONE, Cluster, cluster, decode_ok, event, prefill_ok, stream
from tests.server_process import wait_until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hé"}], "temperature": 0.10}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture
def both(shared: Cluster) -> Cluster:
    """One cluster for all tests that leave nothing behind."""
    wait_until(lambda: shared.in_flight == 0)  # prefill may end after the answer
    for stub, handler in ((shared.prefill[0], prefill_ok), (shared.decode[0], decode_ok)):
        stub.handler = handler
        for kept in (stub.bodies, stub.headers, stub.calls):
            kept.clear()
    return shared


def rooms(both: Cluster) -> Any:
    (sent,) = both.decode[0].bodies
    return sent["bootstrap_room"]


def test_both_servers_get_the_body_with_the_place_where_they_meet(both: Cluster) -> None:
    answer = both.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    (sent,) = both.prefill[0].bodies
    assert both.decode[0].bodies == [sent]
    room = sent.pop("bootstrap_room")
    assert isinstance(room, int) and 1 <= room < 2**63
    assert sent == CHAT | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001}
    assert answer.json()["by"] == "decode"
    assert both.prefill[0].calls == both.decode[0].calls == ["POST /v1/chat/completions"]


def test_port_that_was_not_given_is_null() -> None:
    with cluster(bootstrap_port=None) as running:
        running.http.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
        assert running.decode[0].bodies[0]["bootstrap_port"] is None


@pytest.mark.parametrize("values", [(5, "other", 1), ("x" * 99, "a..b", -1), ([], {}, [[None]]), (None, None, None)])
def test_what_a_client_says_of_rooms_is_replaced(both: Cluster, values: tuple[object, object, object]) -> None:
    given = {"prompt": "a"} | dict(zip(("bootstrap_room", "bootstrap_host", "bootstrap_port"), values, strict=True))
    both.http.post("/v1/completions", json=given).raise_for_status()
    (sent,) = both.decode[0].bodies
    assert sent["bootstrap_room"] != values[0] and 1 <= sent["bootstrap_room"] < 2**63
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 9001)


def test_values_pass_as_they_were_written(both: Cluster) -> None:
    both.prefill[0].handler = both.decode[0].handler = stream(event({"x": 1}), DONE)
    body = b'{"prompt":"a", "big":123456789012345678901234567890,"f":1e400, "e":1.10,"u":"\\u00e9"}'
    assert both.http.post("/v1/completions", content=body).status_code == 200
    (sent,) = both.decode[0].bodies
    assert (sent["big"], sent["e"], sent["u"]) == (123456789012345678901234567890, 1.1, "é")


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", CHAT | {"n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 1}, 2),
        ("/v1/completions", {"prompt": "a", "n": 2}, 2),
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 2}}, 4),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 4}]}, 5),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, 2),
    ],
)
def test_every_sample_has_a_room_of_its_own(both: Cluster, path: str, body: dict[str, Any], count: int) -> None:
    both.http.post(path, json=body).raise_for_status()
    (sent,) = both.decode[0].bodies
    assert len(set(sent["bootstrap_room"])) == len(sent["bootstrap_room"]) == count
    assert all(1 <= room < 2**63 for room in sent["bootstrap_room"])
    assert sent["bootstrap_host"] == ["127.0.0.1"] * count
    assert sent["bootstrap_port"] == [9001] * count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": ["a"], "n": None}),
        ("/generate", {"input_ids": [7, 8]}),
        ("/generate", {"text": "a", "sampling_params": {}}),
    ],
)
def test_one_sample_has_one_room(both: Cluster, path: str, body: dict[str, Any]) -> None:
    both.http.post(path, json=body).raise_for_status()
    assert isinstance(rooms(both), int)


COUNTED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": [1]}),
    ("/v1/completions", {"prompt": [[1]]}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 3}),
    ("/v1/completions", {"prompt": " [1", "n": 2}),
    ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}),
    ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": None}),
    ("/generate", {"input_ids": [1, 2]}),
]
COUNTERS = {
    "/v1/chat/completions": chat_samples,
    "/v1/completions": completion_samples,
    "/generate": generate_samples,
}


@pytest.mark.parametrize(("path", "body"), COUNTED)
def test_samples_are_counted_as_the_server_counts_them(served: Served, path: str, body: dict[str, Any]) -> None:
    limit = {"sampling_params": body.get("sampling_params") or {}} if path == "/generate" else {"max_tokens": 1}
    if path == "/generate":
        given = limit["sampling_params"]
        entries = [entry | {"max_new_tokens": 1} for entry in (given if isinstance(given, list) else [given])]
        limit = {"sampling_params": entries if isinstance(given, list) else entries[0]}
    answer = served.http.post(path, json=body | limit | {"model": MODEL}).raise_for_status().json()
    made = answer if path == "/generate" else answer["choices"]
    assert COUNTERS[path](json.dumps(body).encode()) == (len(made) if isinstance(made, list) else 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 0}),
        ("/v1/chat/completions", CHAT | {"n": 129}),
        ("/v1/chat/completions", CHAT | {"n": "2"}),
        ("/v1/chat/completions", []),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ["a"] * 1000, "n": 128}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}),
        ("/generate", {"text": "a", "rid": 5}),
    ],
)
def test_bodies_that_cannot_be_counted_reach_no_server(both: Cluster, path: str, body: Any) -> None:
    answer = both.http.post(path, json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert both.prefill[0].bodies == both.decode[0].bodies == []


def test_what_is_not_json_is_refused(both: Cluster) -> None:
    answer = both.http.post("/generate", content=b'{"text": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_body_that_is_too_long_is_refused() -> None:
    with cluster(max_request_bytes=100) as running:
        assert running.http.post("/generate", content=b" " * 101).status_code == 413


def test_stream_passes_byte_for_byte_however_it_is_cut(both: Cluster) -> None:
    whole = event({"a": "é\\n"}) + b": comment\n\n" + event({"b": "x" * 70000}) + DONE
    cuts = [0, 1, 7, 13, 14, 15, 20, 30, 100, len(whole) - 20, len(whole) - 15, len(whole) - 1, len(whole)]
    both.decode[0].handler = stream(*(whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)))
    answer = both.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert answer.status_code == 200
    assert answer.content == whole
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-own"] == "kept"


def test_first_event_arrives_before_the_stream_ends(both: Cluster) -> None:
    both.decode[0].handler = stream(event({"token": 1}), then="hang")
    both.decode[0].gone.clear()
    with both.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert next(answer.iter_bytes()) == event({"token": 1})
    assert both.decode[0].gone.wait(60)


def test_streams_with_other_line_ends_pass_too(both: Cluster) -> None:
    whole = b'data: {"a": 1}\r\n\r\ndata: [DONE]\r\n\r\n'
    both.decode[0].handler = stream(whole[:9], whole[9:17], whole[17:])
    assert both.http.post("/generate", json={"text": "a", "stream": True}).content == whole


def test_headers_of_the_client_reach_both_servers(both: Cluster) -> None:
    given = {
        "authorization": "Bearer own",
        "x-request-id": "id-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "connection": "close",
    }
    answer = both.http.post("/v1/completions", json={"prompt": "a"}, headers=given)
    assert answer.headers["x-request-id"] == "id-1"
    for stub in (*both.prefill, *both.decode):
        (seen,) = stub.headers
        assert {name: seen[name] for name in given if name != "connection"} == {
            name: value for name, value in given.items() if name != "connection"
        }
        assert seen.get("connection") != "close"
        assert "accept-encoding" not in seen


def test_request_without_an_id_gets_one(both: Cluster) -> None:
    answers = [both.http.post("/v1/completions", json={"prompt": "a"}) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[0] != ids[1]
    assert [seen["x-request-id"] for seen in both.prefill[0].headers] == ids


def test_concurrent_requests_never_share_a_room(both: Cluster) -> None:
    answers: list[Any] = []

    def post(nonce: int) -> None:
        body = {"prompt": f"nonce {nonce}", "rid": "same"}
        answers.append((nonce, both.http.post("/v1/completions", json=body).json()["echo"]))

    threads = [threading.Thread(target=post, args=(nonce,)) for nonce in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(answers) == 64
    assert all(echo["prompt"] == f"nonce {nonce}" for nonce, echo in answers)
    assert len({echo["bootstrap_room"] for _, echo in answers}) == 64


def test_key_is_asked_for_and_passed_on() -> None:
    with cluster(api_key="secret") as running:
        assert running.http.post("/generate", json={"text": "a"}).status_code == 401
        assert running.http.get("/health").status_code == 200
        key = {"authorization": "Bearer secret"}
        assert running.http.post("/generate", json={"text": "a"}, headers=key).status_code == 200
        assert running.decode[0].headers[0]["authorization"] == "Bearer secret"
        settings = running.http.get("/server_info", headers=key).json()
        assert settings["api_key"] == "***"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a/b", "/model_info", "/get_model_info?x=1"])
def test_models_are_those_of_the_servers(both: Cluster, path: str) -> None:
    answer = both.http.get(path).raise_for_status().json()
    assert (answer["path"], answer["role"]) == (path.split("?")[0], "decode")
    assert both.decode[0].calls == [f"GET {path}"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"])
def test_tokens_are_those_of_the_servers(both: Cluster, path: str) -> None:
    assert json.loads(both.http.post(path, json={"prompt": "a"}).json()["sent"]) == {"prompt": "a"}


def test_controls_reach_every_server() -> None:
    with cluster(num_prefill=2, num_decode=2) as running:
        assert running.http.post("/flush_cache").status_code == 200
        assert running.http.post("/abort_request", json={"rid": "r"}).json() == {"aborted": 4}
        assert running.http.post("/abort_request", json={}).status_code == 400
        for stub in running.prefill + running.decode:
            assert stub.calls == ["POST /flush_cache", "POST /abort_request"]
        loads = running.http.get("/get_load").json()
        assert [load["role"] for load in loads] == ["prefill"] * 2 + ["decode"] * 2
        assert [load["server"] for load in loads] == [stub.url for stub in running.prefill + running.decode]
        assert running.http.get("/v1/loads").json()["loads"] == loads
        info = running.http.get("/server_info").json()
        assert info["internal_states"] == [{"of": "decode"}] * 2
        assert [worker["healthy"] for worker in info["workers"]] == [True] * 4
        assert running.http.get("/health_generate").status_code == 200


def test_unknown_paths_and_methods_say_so(both: Cluster) -> None:
    assert both.http.get("/nowhere").json()["error"]["message"] == "there is no /nowhere"
    assert both.http.get("/generate").status_code == 405


def test_metrics_count_requests(both: Cluster) -> None:
    before = both.metric('lockstep_router_requests_total{outcome="ok"}')
    both.http.post("/generate", json={"text": "a"}).raise_for_status()
    assert both.metric('lockstep_router_requests_total{outcome="ok"}') == before + 1
    assert both.metric(f'lockstep_router_healthy{{role="prefill",server="{both.prefill[0].url}"}}') == 1
    assert both.metric("lockstep_router_queued") == 0
    wait_until(lambda: both.in_flight == 0)


def test_openai_client_reads_streams_and_errors(both: Cluster) -> None:
    chunk = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
    choice = {"index": 0, "text": "hi", "finish_reason": None, "logprobs": None}
    both.decode[0].handler = stream(event(chunk | {"choices": [choice]}), DONE)
    with openai.OpenAI(base_url=both.url + "/v1", api_key="k", max_retries=0, timeout=60) as api:
        parts = api.completions.create(model="m", prompt="a", stream=True)
        assert [part.choices[0].text for part in parts] == ["hi"]
        with pytest.raises(openai.BadRequestError, match="n is 0"):
            api.completions.create(model="m", prompt="a", n=0)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1/", "http://a:1"),
        ("a:1", "http://a:1"),
        ("https://a", "https://a"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_addresses_of_servers(text: str, url: str) -> None:
    assert server_url(text, "--prefill") == url


@pytest.mark.parametrize("text", ["http://", "ftp://a", "http://a:0", "http://a:x", "http://a?b", ""])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="^--decode"):
        server_url(text, "--decode")


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://10.0.0.1:3", "10.0.0.1"), ("http://[fd00::1]:3", "[fd00::1]"), ("http://node-a", "node-a")],
)
def test_prefill_servers_host_is_that_of_its_url(url: str, host: str) -> None:
    assert bootstrap_host(url) == host


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ApiError, match="at most 4096"):
        completion_samples(json.dumps({"prompt": ["a"] * 100, "n": 100}).encode())


def test_request_is_refused_while_draining() -> None:
    with cluster() as running:
        running.loop.call_soon_threadsafe(running.state.start_draining)
        answer = httpx.post(running.url + "/generate", json={"text": "a"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert running.http.get("/ready").status_code == 503


def test_a_line_for_each_request_is_logged_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="server.router_exchange")
    with cluster(log_requests=True) as running:
        running.http.post("/generate", json={"text": "a"}, headers={"x-request-id": "id-7"}).raise_for_status()
        wait_until(lambda: any("id-7" in text for text in caplog.messages))  # it is written after the answer
        (line,) = [text for text in caplog.messages if "id-7" in text]
        assert f"{running.prefill[0].url} and decode server {running.decode[0].url}: ok after" in line
