"""Where the hosts of one engine meet."""

from __future__ import annotations

import msgspec
import pytest
from fastapi.testclient import TestClient

from scheduler.config import EngineConfig
from scheduler.messages import RankReady
from server import listening, node
from server.config import ServerConfig, StartupError
from server.engine_client import EngineClient
from server.nodes import MeetingPoint, parse_address, resolve, way_towards


def test_addresses() -> None:
    assert parse_address("node-0:29500") == ("node-0", 29500)
    assert parse_address("10.0.0.1:1") == ("10.0.0.1", 1)
    assert parse_address("[fd00::1]:65535") == ("fd00::1", 65535)


@pytest.mark.parametrize("word", ["", "host", "host:", ":29500", "host:0", "host:65536", "host:port", "fd00::1:29500"])
def test_wrong_addresses_are_refused(word: str) -> None:
    with pytest.raises(StartupError, match="is not HOST:PORT, with an IPv6 address in brackets"):
        parse_address(word)


def test_names_become_addresses() -> None:
    assert resolve("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(StartupError, match="--dist-init-addr no-such-host.invalid cannot be resolved"):
        resolve("no-such-host.invalid", 1)
    with pytest.raises(StartupError, match=r"--dist-init-addr a\.\.b cannot be resolved \(not a host name\)"):
        resolve("a..b", 1)


def test_address_and_interface_of_the_route() -> None:
    assert way_towards("127.0.0.1") == ("127.0.0.1", "lo")


def node_config(address: str) -> ServerConfig:
    engine = EngineConfig(model_path="tiny-llama", tp_size=2, nnodes=2, node_rank=1, dist_init_addr=address)
    return ServerConfig(engine=engine, served_model_name="tiny-llama")


@pytest.mark.parametrize("address", ["0.0.0.0:29500", "[::]:29500"])
def test_every_interface_is_no_place_to_meet(address: str) -> None:
    with pytest.raises(StartupError, match="is every interface: name the address at which others reach node 0"):
        listening.meet(node_config(address))


def test_node_0_has_the_address() -> None:
    engine = msgspec.structs.replace(node_config("203.0.113.7:29500").engine, node_rank=0)
    with pytest.raises(StartupError, match="203.0.113.7 is not an address of this machine, which is node 0"):
        listening.meet(ServerConfig(engine=engine, served_model_name="tiny-llama"))


def test_a_loopback_address_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert listening.meet(node_config("localhost:29500")) is not None
    assert "which no other host can reach" in caplog.text


def role_config(role: str, host: str, kv_host: str | None = None) -> ServerConfig:
    engine = EngineConfig(model_path="tiny-llama", disaggregation_mode=role, nnodes=2, dist_init_addr="10.0.0.1:29500")
    return ServerConfig(
        engine=engine,
        served_model_name="tiny-llama",
        host=host,
        disaggregation_bootstrap_port=0,
        disaggregation_kv_host=kv_host,
    )


NODE_0 = MeetingPoint("10.0.0.1", 29500, own_host="10.0.0.1", interface="eth0")
NODE_1 = MeetingPoint("10.0.0.1", 29500, own_host="10.0.0.2", interface="eth0")
NODE_0_V6 = MeetingPoint("fd00::1", 29500, own_host="fd00::1", interface="eth0")


@pytest.mark.parametrize(
    ("host", "kv_host", "expected"),
    [
        ("0.0.0.0", None, "10.0.0.2"),
        ("::", None, "10.0.0.2"),
        ("127.0.0.1", None, "10.0.0.2"),
        ("0.0.0.0", "10.9.0.2", "10.9.0.2"),
    ],
)
def test_ranks_on_other_hosts_have_an_address_of_their_own(host: str, kv_host: str | None, expected: str) -> None:
    config = role_config("decode", host, kv_host)
    with listening.listen(host, 0) as listener:
        address = listening.hand_over_address(config, listener, meeting=NODE_1)
    assert address is not None
    assert (address.host, address.bootstrap) == (expected, "")


@pytest.mark.parametrize(
    ("host", "meeting", "expected"), [("0.0.0.0", NODE_0, "10.0.0.1"), ("::", NODE_0_V6, "[fd00::1]")]
)
def test_ranks_on_other_hosts_register_at_node_0(host: str, meeting: MeetingPoint, expected: str) -> None:
    config = role_config("prefill", host)
    bootstrap = listening.listen_bootstrap(config, meeting)
    assert bootstrap is not None
    with bootstrap, listening.listen(host, 0) as listener:
        address = listening.hand_over_address(config, listener, bootstrap, meeting)
        assert address is not None
        assert address.bootstrap == f"{expected}:{bootstrap.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "meeting", "advice"),
    [("127.0.0.1", NODE_0, "10.0.0.1, or 0.0.0.0"), ("0.0.0.0", NODE_0_V6, "fd00::1, or :: for every interface")],
)
def test_a_bootstrap_server_that_other_hosts_do_not_reach_is_refused(
    host: str, meeting: MeetingPoint, advice: str
) -> None:
    with pytest.raises(StartupError, match=f"--host {host} is not reached from the other nodes.*{advice}"):
        listening.listen_bootstrap(role_config("prefill", host), meeting)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("PUT", "/generate"), ("GET", "/")]
)
def test_other_nodes_say_where_requests_go(method: str, path: str) -> None:
    client = EngineClient(1, speaks=False)
    try:
        app = node.create_node_app(node_config("10.0.0.1:29500").engine, "10.0.0.1", client)
        answer = TestClient(app).request(method, path, json={})
        health = TestClient(app).get("/health").status_code
    finally:
        client.close()
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": f"there is no {path} on node 1 of 2, which answers /health alone: requests go to node 0, on "
        "10.0.0.1",
        "type": "not_found_error",
        "param": None,
        "code": 404,
    }
    assert health == 503  # no rank is ready


@pytest.mark.parametrize(("tp_size", "ranks"), [(2, "1 rank"), (4, "2 ranks")])
def test_ready_line_counts_the_ranks_of_the_host(tp_size: int, ranks: str) -> None:
    engine = msgspec.structs.replace(node_config("10.0.0.1:29500").engine, tp_size=tp_size)
    ready = RankReady(
        rank=0,
        max_total_tokens=64,
        max_running_requests=1,
        context_length=64,
        vocab_size=320,
        eos_token_ids=[],
        dtype="bfloat16",
        device="cpu",
        load_seconds=0.1,
    )
    assert node.ready_message(engine, ready, "http://10.0.0.2:30000") == (
        f"Lockstep node 1 of 2 is ready: {ranks} (bfloat16 on cpu); /health at http://10.0.0.2:30000, "
        "requests go to node 0"
    )
