"""Listening and the ready line, without processes."""

from __future__ import annotations

import json
import shlex
import socket
import threading

import pytest

from scheduler.config import EngineConfig
from server import listening, router_process, supervisor
from server.config import ChildReady, ServerConfig, StartupError
from server.router_config import PrefillAddress, RouterConfig


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_port_zero_takes_a_free_one() -> None:
    with listening.listen("127.0.0.1", 0) as first, listening.listen("127.0.0.1", 0) as second:
        assert port_of(first) != port_of(second)
        assert listening.base_url(first) == f"http://127.0.0.1:{port_of(first)}"
        socket.create_connection(("127.0.0.1", port_of(first)), timeout=60).close()


def test_taken_port_is_named() -> None:
    with listening.listen("127.0.0.1", 0) as first:
        port = port_of(first)
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use: stop the other server"):
            listening.listen("127.0.0.1", port)


def test_one_of_many_simultaneous_starts_gets_the_port(free_port: int) -> None:
    barrier = threading.Barrier(8)
    got: list[socket.socket] = []
    refused: list[str] = []

    def start() -> None:
        barrier.wait(60)
        try:
            got.append(listening.listen("127.0.0.1", free_port))
        except StartupError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 1
    assert len(refused) == 7
    assert all(f"port {free_port} on 127.0.0.1 is in use" in message for message in refused)
    got[0].close()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("203.0.113.7", "--host 203.0.113.7 is not an address of this machine"),
        ("no.such.host.invalid", "--host no.such.host.invalid cannot be resolved"),
        ("a..b", r"--host a\.\.b cannot be resolved \(not a host name\)"),
    ],
)
def test_address_that_cannot_be_had(host: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        listening.listen(host, 0)


def test_url_of_every_interface_is_one_that_works_here() -> None:
    with listening.listen("0.0.0.0", 0) as listener:
        assert listening.base_url(listener) == f"http://127.0.0.1:{port_of(listener)}"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_kv_host_has_to_be_an_address_of_this_machine(host: str) -> None:
    config = ServerConfig(engine=EngineConfig(model_path="m"), served_model_name="m", disaggregation_kv_host=host)
    with pytest.raises(StartupError, match=f"--disaggregation-kv-host {host} is not an address of this machine"):
        listening.check_kv_host(config)
    listening.check_kv_host(
        ServerConfig(engine=config.engine, served_model_name="m", disaggregation_kv_host="127.0.0.1")
    )


@pytest.mark.parametrize("can_chat", [True, False])
def test_curl_survives_odd_names(can_chat: bool) -> None:
    config = ServerConfig(engine=EngineConfig(model_path="m"), served_model_name='it\'s "my" $model', api_key="secret")
    text = supervisor.ready_message(config, ChildReady("http://127.0.0.1:1", "bfloat16", "cpu", 4096, can_chat), 3.21)
    first, curl = text.splitlines()
    assert first.startswith('Lockstep is ready: it\'s "my" $model (bfloat16 on cpu) at http://127.0.0.1:')
    assert first.endswith("after 3.2 s, room for 4096 tokens. Try:")
    words = shlex.split(curl)
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == config.served_model_name
    assert ("messages" in body) == can_chat
    assert words[1].endswith("/v1/chat/completions" if can_chat else "/v1/completions")
    assert "Authorization: Bearer YOUR_API_KEY" in words
    assert "secret" not in text


@pytest.mark.parametrize(
    ("mode", "backend", "addresses"),
    [
        ("prefill", "tcp", "--prefill http://h:1 9001 --decode URL"),
        ("prefill", "fake", "--prefill http://h:1 --decode URL"),
        ("decode", "tcp", "--prefill URL --decode http://h:1"),
    ],
)
def test_ready_line_of_one_role_has_the_routers_command(mode: str, backend: str, addresses: str) -> None:
    engine = EngineConfig(model_path="m", disaggregation_mode=mode, disaggregation_transfer_backend=backend)
    config = ServerConfig(engine=engine, served_model_name="m", disaggregation_bootstrap_port=9001)
    first, command = supervisor.ready_message(config, ChildReady("http://h:1", "bfloat16", "cpu", 64), 1.0).splitlines()
    assert first.startswith(f"Lockstep is ready: m (bfloat16 on cpu, {mode} server) at http://h:1 after 1.0 s")
    assert command == f"python launch.py --disaggregation-mode router {addresses}"


@pytest.mark.parametrize(("num_decode", "servers"), [(1, "1 decode server"), (2, "2 decode servers")])
def test_ready_line_of_a_router_counts_its_servers(num_decode: int, servers: str) -> None:
    config = RouterConfig(prefill=(PrefillAddress("http://p"),), decode=("http://d",) * num_decode)
    line = router_process.ready_message(config, "http://h:1", 1.23)
    assert line == f"Lockstep is ready: router of 1 prefill and {servers} at http://h:1 after 1.2 s"
