"""The bootstrap table over HTTP, and what is particular to the fake manager."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from disagg.base import KVPoll
from disagg.bootstrap import BootstrapServer
from disagg.bootstrap_client import (
    FAKE_BOOTSTRAP_HOST,
    BootstrapClient,
    BootstrapNotReady,
    BootstrapRefused,
    Registration,
)
from disagg.description import KVDescription
from disagg.fake import FakeKVManager, first_token
from disagg.tcp import TcpKVManager
from tests.disagg.support import OPTIONS, Memory, ints

pytestmark = pytest.mark.timeout(240)
DESCRIPTION = KVDescription.of(Memory(pages=4).args())


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    made = BootstrapServer("127.0.0.1", 0)
    yield made
    made.close()


def rank(dp: int, tp: int, incarnation: str = "a", **changes: object) -> Registration:
    fields = {"dp_size": 2, "tp_size": 2, "host": "h", "port": 10 * dp + tp, "description": DESCRIPTION} | changes
    return Registration(incarnation=incarnation, dp_rank=dp, tp_rank=tp, **fields)  # type: ignore[arg-type]


def test_route_waits_for_all_ranks_of_one_incarnation(server: BootstrapServer) -> None:
    client = BootstrapClient(server.address, timeout=60)
    with pytest.raises(BootstrapNotReady, match="still to register: all"):
        client.route(0, 0)
    for dp, tp in ((0, 0), (0, 1), (1, 0), (1, 0)):
        client.register(rank(dp, tp), patience=60)
    with pytest.raises(BootstrapNotReady, match="503: prefill ranks still to register: 1"):
        client.route(0, 0)
    client.register(rank(1, 1), patience=60)
    assert client.route(1, 1).registration.port == 11
    with pytest.raises(BootstrapRefused, match="no prefill rank dp 2 tp 0"):
        client.route(2, 0)
    client.register(rank(0, 0, incarnation="b"), patience=60)
    with pytest.raises(BootstrapNotReady, match="still to register: 3"):
        client.route(1, 1)


def test_a_rank_that_differs_is_refused_with_both_values(server: BootstrapServer) -> None:
    client = BootstrapClient(server.address, timeout=60)
    client.register(rank(0, 0), patience=60)
    for field, value in (("model", "m"), ("page_size", 64), ("kv_dtype", "float8"), ("kv_layout", "x")):
        other = msgspec.structs.replace(DESCRIPTION, **{field: value})
        text = f"{field} differs: this rank has {value!r}, .* has {getattr(DESCRIPTION, field)!r}"
        with pytest.raises(BootstrapRefused, match=text):
            client.register(rank(0, 1, description=other), patience=60)
    with pytest.raises(BootstrapRefused, match="tp_size differs: this rank has 4, .* has 2"):
        client.register(rank(0, 1, tp_size=4), patience=60)
    with pytest.raises(BootstrapRefused, match="rank dp 0 tp 5 is outside"):
        client.register(rank(0, 5), patience=60)


def test_health_and_requests_that_cannot_be(server: BootstrapServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    for method, path, body, status in (
        ("GET", "/health", None, 200),
        ("GET", "/route?dp_rank=0", None, 400),
        ("PUT", "/route", b"{}", 400),
        ("DELETE", "/route", None, 405),
    ):
        connection.request(method, path, body)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()


def test_a_registration_that_does_not_come_is_not_waited_for(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.bootstrap._MAX_REGISTRATION_BYTES", 1000)
    cases = ((b"{", 0.2, "it does not come: 1 bytes in 0.2 s"), (b" " * 1001, 60, "it has more than 1000 bytes"))
    for body, seconds, reason in cases:
        monkeypatch.setattr("disagg.bootstrap._REGISTRATION_SECONDS", seconds)
        with socket.create_connection((server.host, server.port), timeout=60) as connection:
            connection.sendall(b"PUT /route HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + body)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(msgspec.json.encode({"error": f"registration: {reason}"}))


def test_prefill_that_cannot_register_does_not_start() -> None:
    options = replace(OPTIONS, bootstrap_timeout=0.2)
    with socket.socket() as silent:  # nobody else is given its port, and nobody listens there
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BootstrapNotReady, match=f"{address} does not answer"):
            TcpKVManager(Memory(pages=4).args(), "prefill", options, address)
    with pytest.raises(BootstrapRefused, match="must be host:port, got 'nowhere'"):
        BootstrapClient("nowhere").route(0, 0)
    with pytest.raises(BootstrapRefused, match="'a..b:80' has no host name"):
        BootstrapClient("a..b:80").route(0, 0)


def test_tcp_refuses_memory_it_cannot_move() -> None:
    with pytest.raises(ValueError, match="host and CUDA memory, kv_args.device is 'xpu:0'"):
        TcpKVManager(Memory(pages=4).args(device="xpu:0"), "decode")


def test_arguments_of_unequal_length_are_refused() -> None:
    args = Memory(pages=4).args()
    with pytest.raises(ValueError, match="they have 4, 4 and 3 entries"):
        replace(args, kv_item_lens=args.kv_item_lens[:3])
    with pytest.raises(ValueError, match="kv region 0: length 2048 is not a multiple of its item length 500"):
        replace(args, kv_item_lens=[500, *args.kv_item_lens[1:]])


def test_fake_sender_without_a_send_times_out_from_its_first_poll() -> None:
    now = [0.0]
    manager = FakeKVManager(Memory(pages=4).args(), "prefill", OPTIONS, clock=lambda: now[0])
    sender = manager.create_sender(0)
    now[0] = 100.0
    sender.init(1, 0)
    assert sender.poll() is KVPoll.WaitingForInput
    now[0] += OPTIONS.waiting_timeout
    assert sender.poll() is KVPoll.WaitingForInput
    now[0] += 0.1
    assert sender.poll() is KVPoll.Failed
    assert "waiting_timeout" in str(sender.failure())
    assert manager.num_rooms() == 0


def test_fake_receiver_needs_no_peer() -> None:
    manager = FakeKVManager(Memory(pages=4).args(), "decode")
    receiver = manager.create_receiver(0, FAKE_BOOTSTRAP_HOST)
    assert receiver.poll() is KVPoll.Bootstrapping
    receiver.init()
    assert receiver.poll() is KVPoll.WaitingForInput
    receiver.send_metadata(ints(1), 0)
    assert receiver.poll() is KVPoll.Success
    receiver.clear()
    assert manager.num_rooms() == 0


def test_first_token_is_a_stable_hash_inside_the_vocabulary() -> None:
    assert first_token("a", 49152) == first_token("a", 49152)
    tokens = {first_token(f"request-{i}", 1000) for i in range(200)}
    assert len(tokens) > 150 and all(0 <= token < 1000 for token in tokens)
