"""Servers that fail, stop answering or come back, clients that leave, and more requests than there are places."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.server.router_support import (
    DONE,
    Cluster,
    Handler,
    Stub,
    answer,
    cluster,
    decode_ok,
    die,
    event,
    hang,
    prefill_ok,
    stream,
)
from tests.server_process import wait_until

BODY = {"prompt": "a"}
STREAMED = BODY | {"stream": True}
REFUSAL = {"error": {"message": "prompt is too long", "type": "invalid_request_error", "param": "prompt", "code": 400}}
# Far above what any of these takes, and below the time for which the router waits for a prefill server to end.
SOON = 25.0
pytestmark = pytest.mark.timeout(180)


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def once(first: Handler, then: Handler) -> Handler:
    """`first` for the first request, `then` for the others."""
    handlers = iter((first,))

    async def handler(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(handlers, then)(stub, request, body)

    return handler


def idle(running: Cluster) -> bool:
    stubs = running.prefill + running.decode
    return running.in_flight == 0 and not running.state.live and not any(stub.live for stub in stubs)


def check_served(running: Cluster) -> None:
    """Nothing is left of what went before, and a request is answered."""
    wait_until(lambda: idle(running))
    for stubs, handler in ((running.prefill, prefill_ok), (running.decode, decode_ok)):
        for stub in stubs:
            stub.handler = handler
    assert running.http.post("/v1/completions", json=BODY).json()["by"] == "decode"


def refusal(running: Cluster) -> dict[str, Any]:
    """The error of a request that no server gets."""
    got = running.http.post("/v1/completions", json=BODY)
    assert got.status_code == 503, got.text
    error: dict[str, Any] = got.json()["error"]
    return error


@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_refusal_of_one_server_is_the_answer_and_frees_the_other(role: str, body: dict[str, Any]) -> None:
    with cluster() as running:
        stubs = {"prefill": running.prefill[0], "decode": running.decode[0]}
        failing = stubs.pop(role)
        (other,) = stubs.values()
        failing.handler, other.handler = answer(400, REFUSAL), hang
        with soon():
            got = running.http.post("/v1/completions", json=body)
        assert (got.status_code, got.json()) == (400, REFUSAL)
        assert got.headers["content-type"] == "application/json"
        assert len(failing.bodies) == 1
        assert not other.bodies or other.gone.wait(SOON)
        check_served(running)


@pytest.mark.parametrize(
    ("fault", "levels"),
    [
        (answer(400, REFUSAL), {"DEBUG"}),
        (answer(404, {}), {"DEBUG"}),
        (answer(500, {}), {"WARNING"}),
        (die, {"WARNING"}),
    ],
)
def test_only_what_servers_do_wrong_is_warned_of(
    fault: Handler, levels: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "server.router_exchange")
    with cluster(retries=0) as running:
        running.decode[0].handler, running.prefill[0].handler = fault, hang
        assert running.http.post("/v1/completions", json=BODY).status_code >= 400
        wait_until(lambda: idle(running))
    records = [record for record in caplog.records if "decode server" in record.getMessage()]
    assert {record.levelname for record in records} == levels


@pytest.mark.parametrize("fault", [answer(500, {"error": {"message": "gone"}}), answer(503, {}), answer(429, {}), die])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_failure_before_the_first_byte_is_tried_again_with_a_new_room(role: str, fault: Handler) -> None:
    with cluster() as running:
        stub = (running.prefill if role == "prefill" else running.decode)[0]
        stub.handler = once(fault, stub.handler)
        with soon():
            assert running.http.post("/v1/completions", json=BODY).json()["by"] == "decode"
        rooms = [body["bootstrap_room"] for body in stub.bodies]
        assert len(set(rooms)) == len(rooms) == 2
        assert running.decode[0].bodies[-1] == running.prefill[0].bodies[-1]
        assert running.metric(f'lockstep_router_retries_total{{role="{role}"}}') == 1
        check_served(running)


def test_another_attempt_goes_to_another_pair() -> None:
    with cluster(num_prefill=2, num_decode=2, policy="round_robin") as running:
        failing, other = running.prefill
        failing.handler = answer(500, {})
        for _ in range(4):
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        assert len(other.bodies) == 4
        assert len(failing.bodies) == running.metric('lockstep_router_retries_total{role="prefill"}') > 0


UNFIT = {"error": {"message": "page_size differs"}}


def test_servers_that_do_not_fit_are_an_error_at_once() -> None:
    with cluster(retries=5) as running:
        running.prefill[0].handler, running.decode[0].handler = hang, answer(501, UNFIT)
        with soon():
            got = running.http.post("/v1/completions", json=BODY)
        assert (got.status_code, got.json()) == (501, UNFIT)
        assert len(running.decode[0].bodies) == 1
        check_served(running)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), (2, 1), (2, 2)])
def test_servers_that_do_not_fit_are_tried_with_others(num_prefill: int, num_decode: int) -> None:
    with cluster(num_prefill=num_prefill, num_decode=num_decode, retries=5) as running:
        odd = running.prefill[0] if num_prefill > 1 else running.decode[0]

        async def decode(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            def asked(prefill: Stub) -> bool:
                return any(body["bootstrap_room"] == other["bootstrap_room"] for other in prefill.bodies)

            while not any(asked(prefill) for prefill in running.prefill):
                await asyncio.sleep(0.001)
            is_odd = stub is odd or asked(odd)
            return await (answer(501, UNFIT) if is_odd else decode_ok)(stub, request, body)

        for stub in running.decode:
            stub.handler = decode
        if num_prefill > 1:
            odd.handler = hang
        for _ in range(3):
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        check_served(running)


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_attempts_are_counted_and_the_last_failure_is_the_answer(retries: int, attempts: int) -> None:
    with cluster(retries=retries) as running:
        running.decode[0].handler = answer(500, {"error": {"message": "the transfer failed"}})
        got = running.http.post("/v1/completions", json=STREAMED)
        assert (got.status_code, got.json()) == (500, {"error": {"message": "the transfer failed"}})
        assert len(running.decode[0].bodies) == attempts
        check_served(running)


def test_server_that_breaks_every_connection_is_named() -> None:
    with cluster() as running:
        running.prefill[0].handler, running.decode[0].handler = die, hang
        with soon():
            got = running.http.post("/v1/completions", json=BODY)
        assert got.status_code == 502
        assert got.json()["error"]["message"] == f"prefill server {running.prefill[0].url}: the connection broke"
        check_served(running)


def test_prefill_error_ends_the_wait_for_decode() -> None:
    with cluster(retries=0) as running:
        running.prefill[0].handler, running.decode[0].handler = answer(500, {"error": "broken"}), hang
        with soon():
            assert running.http.post("/v1/completions", json=BODY).status_code == 500
        check_served(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_closed_port_is_an_error_at_once_and_used_again_when_open(role: str) -> None:
    with cluster() as running:
        stub = (running.prefill if role == "prefill" else running.decode)[0]
        running.run(stub.kill())
        with soon():
            got = running.http.post("/v1/completions", json=BODY)
        assert got.status_code == 503
        assert got.json()["error"]["code"] == f"no_{role}_server"
        assert got.headers["retry-after"] == "1"
        # A check that was under way when the connections broke says that first.
        wait_until(lambda: f"{stub.url}: cannot connect (Connection refused)" in refusal(running)["message"])
        assert running.http.get("/health").status_code == 503
        running.run(stub.start())
        wait_until(lambda: running.http.get("/health").status_code == 200)
        check_served(running)


@pytest.mark.parametrize(("role", "mode"), [("prefill", "decode"), ("decode", "prefill"), ("decode", "null")])
def test_server_of_another_role_gets_no_requests(role: str, mode: str) -> None:
    with cluster() as running:
        stub = (running.prefill if role == "prefill" else running.decode)[0]
        stub.mode = mode
        wait_until(lambda: running.http.get("/health").status_code == 503)
        error = refusal(running)
        assert error["code"] == f"no_{role}_server"
        assert f"--disaggregation-mode {mode}, but the router was given it as --{role}" in error["message"]
        stub.mode = role
        wait_until(lambda: running.http.get("/health").status_code == 200)
        check_served(running)


def test_servers_that_do_not_fit_are_told_apart_before_any_request() -> None:
    """The one of two that fits gets everything; while none does, the router is not ready and says what differs."""
    with cluster(num_decode=2) as running:
        (prefill,), (odd, other) = running.prefill, running.decode
        prefill.terms = {"model": "a", "--page-size": "16"}
        odd.terms = {"model": "a", "--page-size": "32"}
        name = f'lockstep_router_healthy{{role="decode",server="{odd.url}"}}'
        wait_until(lambda: running.metric(name) == 0)
        for _ in range(4):
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        assert len(other.bodies) == 4 and not odd.bodies
        other.terms = {"model": "b"}
        # Once the decode servers are known not to fit, the prefill server does not fit them either.
        wait_until(lambda: not any(worker.healthy for worker in running.state.dispatcher.workers))
        assert running.http.get("/ready").status_code == 503
        problem = f"model differs: it has 'a', decode server {other.url} has 'b'"
        assert f"no prefill server is healthy ({prefill.url}: {problem})" in refusal(running)["message"]
        problems = [worker["problem"] for worker in running.http.get("/workers").json()["workers"]]
        assert problems == [
            problem,
            f"--page-size differs: it has '32', prefill server {prefill.url} has '16'",
            f"model differs: it has 'b', prefill server {prefill.url} has 'a'",
        ]
        odd.terms = {"model": "a", "--page-size": "16"}
        wait_until(lambda: running.http.get("/ready").status_code == 200)
        check_served(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_go_round_a_dead_server(role: str) -> None:
    with cluster(num_prefill=2, num_decode=2, health_interval=30) as running:
        dead, alive = running.prefill if role == "prefill" else running.decode
        running.run(dead.kill())
        for _ in range(4):
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        assert len(alive.bodies) == 4
        name = f'lockstep_router_healthy{{role="{role}",server="{dead.url}"}}'
        assert running.metric(name) == 0


def test_server_that_says_it_is_not_ready_gets_nothing_new_and_finishes_what_it_has() -> None:
    with cluster(num_decode=2) as running:
        first, second = running.decode
        first.handler = second.handler = stream(event(1), then="hang")
        with running.http.stream("POST", "/v1/completions", json=STREAMED) as got:
            chunks = got.iter_bytes()
            assert next(chunks) == event(1)
            busy, other = (first, second) if first.live else (second, first)
            busy.healthy = False
            name = f'lockstep_router_healthy{{role="decode",server="{busy.url}"}}'
            wait_until(lambda: running.metric(name) == 0)
            other.handler = decode_ok
            for _ in range(3):
                assert running.http.post("/v1/completions", json=BODY).status_code == 200
            assert busy.live == 1 and len(busy.bodies) == 1


@pytest.mark.parametrize("chunks", [(), (b'data: {"half',)])
@pytest.mark.parametrize("then", ["end", "abort"])
def test_stream_that_breaks_before_its_first_event_is_tried_again(chunks: tuple[bytes, ...], then: str) -> None:
    with cluster() as running:
        running.decode[0].handler = once(stream(*chunks, then=then), stream(event(1), DONE))
        got = running.http.post("/v1/completions", json=STREAMED)
        assert got.content == event(1) + DONE
        check_served(running)


@pytest.mark.parametrize("half", [(), (b'data: {"tok',)])
@pytest.mark.parametrize("then", ["end", "abort"])
def test_stream_that_breaks_ends_with_an_error_event(half: tuple[bytes, ...], then: str) -> None:
    with cluster() as running:
        running.decode[0].handler = stream(event(1), event(2), *half, then=then)
        with soon():
            got = running.http.post("/v1/completions", json=STREAMED)
        assert got.status_code == 200
        assert got.content.startswith(event(1) + event(2)) and got.content.endswith(DONE)
        (data,) = got.content.removeprefix(event(1) + event(2)).removesuffix(DONE).strip().split(b"\n")
        error = json.loads(data.removeprefix(b"data: "))["error"]
        assert error["code"] == "server_failed"
        assert running.decode[0].url in error["message"]
        assert len(running.decode[0].bodies) == 1
        assert running.metric('lockstep_router_requests_total{outcome="broken"}') == 1
        check_served(running)


def test_body_that_breaks_is_tried_again() -> None:
    async def broken(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    with cluster() as running:
        running.decode[0].handler = once(broken, decode_ok)
        assert running.http.post("/v1/completions", json=BODY).json()["by"] == "decode"


@pytest.mark.parametrize("fault", [die, answer(500, {}), answer(400, REFUSAL)])
def test_prefill_that_fails_after_the_hand_over_disturbs_nothing(fault: Handler) -> None:
    failed = threading.Event()
    with cluster() as running:

        async def late(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.to_thread(failed.wait, SOON)
            return await fault(stub, request, body)

        async def decode(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(event(1))
            await asyncio.sleep(0.1)
            failed.set()
            await asyncio.sleep(0.1)
            await response.write(event(2) + DONE)
            return response

        running.prefill[0].handler, running.decode[0].handler = late, decode
        assert running.http.post("/v1/completions", json=STREAMED).content == event(1) + event(2) + DONE
        check_served(running)


def test_answer_does_not_wait_for_prefill_to_end() -> None:
    with cluster() as running:

        async def slow(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            stub.handed_over(body).set()
            return await hang(stub, request, body)

        running.prefill[0].handler = slow
        with soon():
            assert running.http.post("/v1/completions", json=BODY).status_code == 200
        assert running.prefill[0].live == 1


@contextmanager
def leaving(running: Cluster, body: dict[str, Any], wait_for: Callable[[], bool]) -> Iterator[None]:
    """A client that closes its connection once `wait_for` is true."""
    with httpx.Client(base_url=running.url, timeout=60) as http:
        request = http.build_request("POST", "/v1/completions", json=body)
        thread = threading.Thread(target=lambda: _ignore(lambda: http.send(request, stream=True)))
        thread.start()
        wait_until(wait_for)
        # Closing the client does not end a read under way; closing its socket does.
        connection = http._transport._pool.connections[0]._connection  # type: ignore[attr-defined]
        connection._network_stream._sock.shutdown(2)
        thread.join(60)
    yield


def _ignore(call: Callable[[], Any]) -> None:
    with suppress(httpx.HTTPError):
        call()


@pytest.mark.parametrize("body", [BODY, STREAMED])
def test_both_connections_close_when_the_client_leaves_before_the_answer(body: dict[str, Any]) -> None:
    with cluster() as running:
        running.prefill[0].handler = running.decode[0].handler = hang
        with leaving(running, body, lambda: running.prefill[0].live + running.decode[0].live == 2):
            assert running.prefill[0].gone.wait(SOON) and running.decode[0].gone.wait(SOON)
        wait_until(lambda: running.metric('lockstep_router_requests_total{outcome="abort"}') == 1)
        assert len(running.decode[0].bodies) == 1
        check_served(running)


def test_both_connections_close_when_the_client_leaves_a_stream() -> None:
    with cluster() as running:
        running.prefill[0].handler = hang
        running.decode[0].handler = stream(event(1), then="hang")
        with httpx.stream("POST", running.url + "/v1/completions", json=STREAMED, timeout=60) as got:
            assert next(got.iter_bytes()) == event(1)
            wait_until(lambda: running.prefill[0].live == 1)
        assert running.prefill[0].gone.wait(SOON) and running.decode[0].gone.wait(SOON)
        check_served(running)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("started", [False, True])
def test_server_that_stops_answering_is_given_up(role: str, started: bool) -> None:
    """As a stopped process does: connections stay open and nothing comes."""
    with cluster(retries=0, health_timeout=0.4) as running:
        stub = (running.prefill if role == "prefill" else running.decode)[0]
        running.prefill[0].handler = hang
        running.decode[0].handler = stream(event(1), then="hang") if started else hang
        got: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: got.append(running.http.post("/v1/completions", json=STREAMED)), daemon=True
        )
        thread.start()
        wait_until(lambda: running.prefill[0].live + running.decode[0].live == 2)
        if started:
            wait_until(lambda: running.metric("lockstep_router_first_byte_seconds_count") == 1)
        stub.healthy = None
        if started and role == "prefill":
            name = f'lockstep_router_healthy{{role="prefill",server="{stub.url}"}}'
            with httpx.Client(base_url=running.url, timeout=60) as http:
                wait_until(lambda: f"{name} 0.0" in http.get("/metrics").text)
            thread.join(0.2)
            assert thread.is_alive()
            assert running.decode[0].live == 1
            running.run(running.decode[0].kill())
            thread.join(SOON)
            return
        thread.join(SOON)
        (response,) = got
        if started:
            assert response.status_code == 200
            assert b"has failed 2 health checks" in response.content and response.content.endswith(DONE)
        else:
            assert response.status_code == 502
            assert "has failed 2 health checks" in response.json()["error"]["message"]
        stub.healthy = True
        wait_until(lambda: running.http.get("/health").status_code == 200)
        check_served(running)


def test_request_that_takes_too_long_ends() -> None:
    with cluster(request_timeout=1.0) as running:
        running.decode[0].handler = hang
        got = running.http.post("/v1/completions", json=BODY)
        assert (got.status_code, got.json()["error"]["code"]) == (504, "timeout")
        running.decode[0].handler = stream(event(1), then="hang")
        got = running.http.post("/v1/completions", json=STREAMED)
        assert got.content.startswith(event(1)) and b"--request-timeout" in got.content
        check_served(running)


@contextmanager
def posted(running: Cluster, count: int, body: dict[str, Any] = BODY) -> Iterator[list[httpx.Response]]:
    """So many requests in threads; the list has their answers when the block ends."""
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(running.http.post("/v1/completions", json=body)))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(90)
    assert len(answers) == count


def gate(opened: threading.Event) -> Handler:
    async def handler(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while not opened.is_set():
            await asyncio.sleep(0.005)
        stub.handed_over(body).set()
        return web.json_response({"by": stub.role})

    return handler


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_for_places_and_too_many_are_turned_away(role: str) -> None:
    opened = threading.Event()
    limit = {"max_prefill_requests": 2} if role == "prefill" else {"max_decode_requests": 2}
    with cluster(max_queued_requests=3, **limit) as running:
        stub = (running.prefill if role == "prefill" else running.decode)[0]
        stub.handler = gate(opened)
        with posted(running, 5) as answers:
            wait_until(lambda: running.state.dispatcher.queued == 3 and stub.live == 2)
            assert running.metric("lockstep_router_queued") == 3
            assert running.metric(f'lockstep_router_in_flight{{role="{role}",server="{stub.url}"}}') == 2
            assert running.http.get("/ready").status_code == 503
            got = running.http.post("/v1/completions", json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "queue_full")
            assert got.headers["retry-after"] == "1"
            opened.set()
        assert [response.status_code for response in answers] == [200] * 5
        assert len(stub.bodies) == 5
        check_served(running)


def test_burst_at_a_small_limit_is_served_in_the_order_of_arrival() -> None:
    with cluster(max_prefill_requests=2, max_decode_requests=5) as running:
        with posted(running, 60) as answers:
            pass
        assert [response.status_code for response in answers] == [200] * 60
        check_served(running)


def test_wait_for_a_place_has_an_end() -> None:
    with cluster(max_decode_requests=1, queue_timeout=0.2) as running:
        opened = threading.Event()
        running.decode[0].handler = gate(opened)
        with posted(running, 1) as answers:
            wait_until(lambda: running.decode[0].live == 1)
            got = running.http.post("/v1/completions", json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "queue_timeout")
            opened.set()
        assert answers[0].status_code == 200
        check_served(running)


def test_client_that_leaves_the_queue_takes_no_place() -> None:
    opened = threading.Event()
    with cluster(max_decode_requests=1) as running:
        running.decode[0].handler = gate(opened)
        with posted(running, 1):
            wait_until(lambda: running.decode[0].live == 1)
            with leaving(running, BODY, lambda: running.state.dispatcher.queued == 1):
                wait_until(lambda: running.state.dispatcher.queued == 0)
            opened.set()
        assert len(running.decode[0].bodies) == 1
        check_served(running)


def test_those_who_wait_are_told_when_the_last_server_goes() -> None:
    with cluster(max_decode_requests=1) as running:
        running.decode[0].handler = hang
        with posted(running, 3) as answers:
            wait_until(lambda: running.state.dispatcher.queued == 2)
            running.run(running.decode[0].kill())
        codes = {response.json()["error"]["code"] for response in answers}
        assert [response.status_code for response in answers] == [503] * 3
        assert codes == {"no_decode_server"}
        running.run(running.decode[0].start())
        wait_until(lambda: running.http.get("/health").status_code == 200)
        check_served(running)


def test_abort_ends_what_waits_and_keeps_from_trying_again() -> None:
    with cluster(max_decode_requests=1) as running:
        opened = threading.Event()

        async def fail(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await gate(opened)(stub, request, body)
            return web.json_response({"error": {"message": "aborted"}}, status=500)

        running.decode[0].handler = fail
        with posted(running, 1, BODY | {"rid": "mine"}) as first:
            wait_until(lambda: running.decode[0].live == 1)
            with posted(running, 1, BODY | {"rid": "mine"}) as second:
                wait_until(lambda: running.state.dispatcher.queued == 1)
                assert running.http.post("/abort_request", json={"rid": "other"}).status_code == 200
                assert running.state.dispatcher.queued == 1
                running.http.post("/abort_request", json={"rid": "mine"})
            assert (second[0].status_code, second[0].json()["error"]["code"]) == (400, "aborted")
            opened.set()
        assert first[0].status_code == 500
        assert len(running.decode[0].bodies) == 1
        check_served(running)


def test_end_of_the_router_ends_streams_with_the_reason() -> None:
    with cluster() as running:
        running.decode[0].handler = stream(event(1), then="hang")
        with posted(running, 2, STREAMED) as answers:
            wait_until(lambda: running.metric("lockstep_router_first_byte_seconds_count") == 2)
            running.loop.call_soon_threadsafe(running.state.fail, "the router is shutting down")
        for response in answers:
            assert response.content.startswith(event(1)) and response.content.endswith(DONE)
            assert b"the router is shutting down" in response.content
        running.run(running.state.wait_idle())
        wait_until(lambda: idle(running))
