"""Where the hosts of one engine meet."""

from __future__ import annotations

import pytest

from scheduler.config import EngineConfig
from server import listening
from server.config import ServerConfig, StartupError
from server.nodes import parse_address, resolve, way_towards


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


def test_address_and_interface_of_the_route() -> None:
    assert way_towards("127.0.0.1") == ("127.0.0.1", "lo")


def node_config(address: str) -> ServerConfig:
    engine = EngineConfig(model_path="tiny-llama", tp_size=2, nnodes=2, node_rank=1, dist_init_addr=address)
    return ServerConfig(engine=engine, served_model_name="tiny-llama")


@pytest.mark.parametrize("address", ["0.0.0.0:29500", "[::]:29500"])
def test_every_interface_is_no_place_to_meet(address: str) -> None:
    with pytest.raises(StartupError, match="is every interface: name the address at which others reach node 0"):
        listening.meet(node_config(address))


def test_a_loopback_address_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert listening.meet(node_config("localhost:29500")) is not None
    assert "which no other host can reach" in caplog.text
