"""Engines started by torchrun, on one host and on two."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from server import torchrun
from server.arguments import parse
from server.config import ServerConfig, StartupError
from tests.models.support import random_ids
from tests.server_process import ServerProcess, gone, wait_until
from tests.topology.test_two_hosts import FLAGS, POOL, Hosts, expected, hosts, needs_hosts

__all__ = ["hosts"]

pytestmark = pytest.mark.timeout(150)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PROMPTS = [random_ids(length, seed=length) for length in (1, 20, 40, 70)]
PARAMS = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "run",
    "GROUP_RANK": "1",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "fd77::1",
    "MASTER_PORT": "29400",
}


def settings(words: str) -> ServerConfig:
    """As launch.py parses them in the environment above."""
    launch = torchrun.detect(ENVIRONMENT)
    assert launch is not None
    config = parse([*torchrun.words(launch), "--model-path", "tiny-llama", *words.split()])
    torchrun.check(config, launch)
    assert isinstance(config, ServerConfig)
    return config


def test_sizes_come_from_the_environment() -> None:
    assert torchrun.detect({}) is None
    engine = settings("--dp-size 2 --enable-dp-attention").engine
    assert (engine.tp_size, engine.dp_size, engine.nnodes, engine.node_rank) == (4, 2, 2, 1)
    assert engine.dist_init_addr == "[fd77::1]:29401"
    assert settings("--dist-init-addr node-0:5000").engine.dist_init_addr == "node-0:5000"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp-size 2", "--tp-size 2 is not the number of processes that torchrun starts, 4"),
        ("--nnodes 4", "--nnodes and --node-rank go to torchrun itself"),
        ("--node-rank 0", "--nnodes and --node-rank go to torchrun itself"),
        ("--dp-size 3 --enable-dp-attention", "--tp-size 4 is not a multiple of --dp-size 3"),
        ("--disaggregation-transfer-backend tcp", "start routers and local mode without it"),
    ],
)
def test_other_sizes_are_refused(words: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        settings(words)


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    started: list[tuple[ServerProcess, list[psutil.Process]]] = []

    def launch(*flags: str) -> ServerProcess:
        prefix = (TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python")
        server = ServerProcess(*FLAGS, *POOL, *flags, prefix=prefix)
        started.append((server, []))
        return server

    yield launch
    for server, _ in started:
        server.stop()


def test_one_host(start: Callable[..., ServerProcess]) -> None:
    server = start()
    url = server.wait_ready()
    answer = httpx.post(f"{url}/generate", json={"input_ids": PROMPTS, "sampling_params": PARAMS}, timeout=60)
    assert [choice["output_ids"] for choice in answer.json()] == expected(PROMPTS)
    processes = server.ranks()
    server.signal(signal.SIGTERM)
    server.wait(30)
    wait_until(lambda: gone(processes), 20, "all processes have ended")


def test_nothing_survives_a_killed_torchrun(start: Callable[..., ServerProcess]) -> None:
    server = start()
    server.wait_ready()
    processes = server.ranks()
    server.signal(signal.SIGKILL)
    wait_until(lambda: gone(processes), 20, "all processes have ended")
    assert server.wait(5) == -signal.SIGKILL


def test_a_refusal_ends_all_processes(start: Callable[..., ServerProcess]) -> None:
    server = start("--tp-size", "3")
    assert server.wait(60) != 0
    line = "error: --tp-size 3 is not the number of processes that torchrun starts, 2: leave it out"
    assert server.stderr().count(line) == 1


@needs_hosts
def test_two_hosts(hosts: Hosts) -> None:
    for node, name in enumerate(hosts.names):
        meeting = ("--nnodes=2", f"--node-rank={node}", "--master-addr=10.77.0.1", "--master-port=29400")
        prefix = ("ip", "netns", "exec", name, TORCHRUN, *meeting, "--nproc-per-node=1", "--no-python")
        hosts.servers.append(ServerProcess(*FLAGS, *POOL, prefix=prefix))
    url = hosts.wait_ready()
    assert hosts.generate(url, PROMPTS) == expected(PROMPTS)
    hosts.servers[1].signal(signal.SIGKILL)
    hosts.servers[0].wait(30)
    wait_until(lambda: all(map(gone, hosts.ranks)), 20, "all ranks have ended")
