"""What comes before a request is complete: bytes that are no HTTP, and headers that do not end."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from disagg.bootstrap import BootstrapServer
from server.http_server import http_config
from tests.server.conftest import MODEL, Served, serve
from tests.server_process import wait_until

pytestmark = pytest.mark.timeout(180)

TIMEOUT = 2.0
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    with serve(request_read_timeout=TIMEOUT) as running:
        yield running


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Until the connection ends, as it may with a reset when what was sent last has not been read."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def answers(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Status and JSON body of each of the answers that follow one another."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        body, data = rest[: int(length[1])], rest[int(length[1]) :]
        found.append((int(head.split()[1]), json.loads(body) if body else {}))
    return found


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GARBAGE\r\n\r\n", "Invalid method encountered"),
        (b"\x16\x03\x01\x02\x00\x01", "Invalid method encountered"),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "PRI"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "Invalid header token"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", "Invalid char in url"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", "invalid url"),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", "Duplicate Content-Length"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", "invalid url"),
        (b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", "Invalid character in Content-Length"),
    ],
)
def test_what_is_no_http_is_a_400_in_the_shape_of_all_errors(served: Served, data: bytes, reason: str) -> None:
    with connect(served.url) as connection:
        connection.sendall(data)
        raw = read_all(connection)
    ((status, body),) = answers(raw)
    assert status == 400
    assert b"content-type: application/json\r\n" in raw and b"connection: close\r\n" in raw
    error = body["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_http")
    assert error["message"].startswith("this is not an HTTP request: ") and reason in error["message"]


def test_what_is_no_http_does_not_mix_with_an_answer_under_way(served: Served) -> None:
    """More bytes than were announced, while a stream is under way."""
    assert served.rank is not None
    served.rank.hold.set()
    with connect(served.url) as connection:
        connection.sendall(post({"model": MODEL, "prompt": "abc", "max_tokens": 9, "stream": True}))
        served.rank.allow(1)
        data = connection.recv(1 << 16)
        assert data.startswith(b"HTTP/1.1 200")
        connection.sendall(b"}}\r\n\r\n")
        assert b"HTTP/1.1" not in data[1:] + read_all(connection)
    served.rank.hold.clear()
    wait_until(lambda: served.client.num_live == 0)


# What is sent, what follows it a few bytes at a time, and the answers that come before the connection is closed.
CASES: list[tuple[bytes, bytes, list[int]]] = [
    (b"", b"", []),
    (b"\r\n", b"", []),
    (b"", b"\r\n", []),
    (GET + b"\r\n", b"", [200]),
    (b"G", b"", [408]),
    (b"GET /health", b"", [408]),
    (GET, b"", [408]),
    (GET + b"x-name: va", b"", [408]),
    (GET + b"\r\n" + GET, b"", [200, 408]),
    (GET, b"x: y\r\n", [408]),
    (GET + b"x: ", b"y", [408]),
    (GET + b"content-length: 1000000000\r\n\r\n", b"x", [200]),  # a body that is of no use
]


def test_a_connection_on_which_no_head_ends_is_closed(hasty: Served) -> None:
    with contextlib.ExitStack() as stack:
        connections = []
        for sent, _, _ in CASES:
            connections.append(stack.enter_context(connect(hasty.url)))
            connections[-1].sendall(sent)
        over = threading.Event()

        def drip() -> None:
            while not over.wait(TIMEOUT / 20):
                for connection, (_, drop, _) in zip(connections, CASES, strict=True):
                    with contextlib.suppress(OSError):
                        connection.sendall(drop)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            found = [answers(read_all(connection)) for connection in connections]
        finally:
            over.set()
            thread.join(60)
    for (sent, drop, statuses), got in zip(CASES, found, strict=True):
        # A reset for what comes after the end may overtake the answer.
        assert [status for status, _ in got] == statuses or (drop and not got), sent
        if got and statuses[-1] == 408:
            error = got[-1][1]["error"]
            assert error["code"] == "headers_timeout"
            text = f"the headers have not come to their end in {TIMEOUT:g} s (--request-read-timeout)"
            assert error["message"] == text


def test_headers_without_an_end_are_refused_before_their_time_is_over(served: Served) -> None:
    with connect(served.url) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(GET + b"x-name: " + b"v" * (1 << 20))
        raw = read_all(connection)
    if raw:  # a reset may overtake it
        ((status, body),) = answers(raw)
        assert (status, body["error"]["code"]) == (431, "headers_too_long")
    with connect(served.url) as connection:
        connection.sendall(GET + b"x-name: " + b"v" * (1 << 15) + b"\r\nconnection: close\r\n\r\n")
        assert [status for status, _ in answers(read_all(connection))] == [200]


def test_what_is_no_part_of_a_body_is_bounded_too(served: Served) -> None:
    """Chunk extensions, and trailers, one or many."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for rest in (
        b"5;" + b"v" * (1 << 20),
        b"0\r\nx-name: " + b"v" * (1 << 20),
        b"0\r\n" + b"x-name: v\r\n" * (1 << 16),
    ):
        with connect(served.url) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + rest)
            raw = read_all(connection)
        if raw:  # a reset may overtake it
            ((status, body),) = answers(raw)
            text = "the chunk extensions or trailers are longer than 65536 bytes"
            assert (status, body["error"]["code"], body["error"]["message"]) == (431, "headers_too_long", text)


def test_a_body_may_come_in_chunks_of_one_byte_and_have_trailers(served: Served) -> None:
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 3}).encode() + b" " * (1 << 14)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connect(served.url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunks
            + b"0\r\nx-request-id: one\r\n\r\n"
            + GET
            + b"connection: close\r\n\r\n"
        )
        found = answers(read_all(connection))
    assert [status for status, _ in found] == [200, 200]
    assert found[0][1]["choices"][0]["text"] == "abc"


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: AAAA\r\nsec-websocket-version: 13\r\n"


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_an_upgrade_that_is_offered_is_not_taken(served: Served, offer: bytes, size: int) -> None:
    """Wherever the request is cut; body and answer are HTTP/1.1, and so is what follows on the connection."""
    head, _, body = post({"model": MODEL, "prompt": "abc", "max_tokens": 3}).partition(b"\r\n\r\n")
    request = head + b"\r\n" + offer + b"\r\n" + body
    data = request + GET + offer + b"\r\n" + request + GET + b"connection: close\r\n\r\n"
    with connect(served.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        found = answers(read_all(connection))
    assert [status for status, _ in found] == [200] * 4
    assert [found[i][1]["choices"][0]["text"] for i in (0, 2)] == ["abc", "abc"]


def test_many_offers_in_one_read_are_answered_each(served: Served) -> None:
    count = 1000
    with connect(served.url) as connection:
        connection.sendall(
            (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n") * count + GET + b"connection: close\r\n\r\n"
        )
        found = answers(read_all(connection))
    assert [status for status, _ in found] == [200] * (count + 1)


def test_no_time_runs_while_an_answer_is_made(hasty: Served) -> None:
    """Although the next head has begun."""
    assert hasty.rank is not None
    hasty.rank.hold.set()
    with connect(hasty.url) as connection:
        connection.sendall(post({"model": MODEL, "prompt": "abc", "max_tokens": 3}) + GET)
        wait_until(lambda: hasty.rank is not None and hasty.rank.num_samples == 1)
        connection.settimeout(1.25 * TIMEOUT)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        hasty.rank.hold.clear()
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_bootstrap_server_is_served_alike() -> None:
    server = BootstrapServer("127.0.0.1", 0, http_config=partial(http_config, graceful_seconds=1, read_timeout=TIMEOUT))
    try:
        with connect(f"http://{server.address}") as silent, connect(f"http://{server.address}") as wrong:
            silent.sendall(GET)
            wrong.sendall(b"GARBAGE\r\n\r\n")
            assert [[status for status, _ in answers(read_all(each))] for each in (wrong, silent)] == [[400], [408]]
    finally:
        server.close()
