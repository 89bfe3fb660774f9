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
from server.arguments import num_replicas, parse
from server.config import ServerConfig, StartupError
from tests.server_process import ServerProcess, gone, wait_until
from tests.topology.hosts import FLAGS, POOL, PROMPTS, Hosts, Spread, expected, hosts, needs_hosts

__all__ = ["hosts"]

pytestmark = pytest.mark.timeout(480)
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ONE_HOST = (TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python")
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
    argv = ["--model-path", "tiny-llama", *words.split()]
    config = parse([*torchrun.words(launch, num_replicas(argv)), *argv])
    torchrun.check(config, launch)
    assert isinstance(config, ServerConfig)
    return config


def test_sizes_come_from_the_environment() -> None:
    assert torchrun.detect({}) is None
    engine = settings("--dp-size 2 --enable-dp-attention").engine
    assert (engine.tp_size, engine.dp_size, engine.nnodes, engine.node_rank) == (4, 2, 2, 1)
    assert engine.dist_init_addr == "[fd77::1]:29401"
    assert settings("--dist-init-addr node-0:5000").engine.dist_init_addr == "node-0:5000"


def test_replicas_share_the_processes() -> None:
    engine = settings("--dp-size 2").engine
    assert (engine.tp_size, engine.num_replicas, engine.ranks_per_node) == (2, 2, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp-size 2", "--tp-size 2 is not the number of processes that torchrun starts, 4"),
        ("--dp-size 3", "starts, 4, is not a multiple of the --dp-size 3 replicas"),
        ("--dp-size 2 --tp-size 4", "--tp-size 4 of each of 2 replicas is not the number of processes"),
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
        server = ServerProcess(*FLAGS, *POOL, *flags, prefix=ONE_HOST)
        started.append((server, []))
        return server

    yield launch
    for server, _ in started:
        server.stop()


@pytest.fixture(scope="module")
def on_one_host() -> Iterator[ServerProcess]:
    """A server for two tests, the second of which ends it."""
    server = ServerProcess(*FLAGS, *POOL, prefix=ONE_HOST)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_one_host(on_one_host: ServerProcess) -> None:
    body = {"input_ids": PROMPTS, "sampling_params": PARAMS}
    answer = httpx.post(f"{on_one_host.url}/generate", json=body, timeout=120)
    assert [choice["output_ids"] for choice in answer.json()] == expected(PROMPTS)


def test_nothing_survives_a_killed_torchrun(on_one_host: ServerProcess) -> None:
    processes = on_one_host.ranks()
    on_one_host.signal(signal.SIGKILL)
    wait_until(lambda: gone(processes), what="all processes have ended")
    assert on_one_host.wait(60) == -signal.SIGKILL


@pytest.mark.sweep
def test_sigterm_to_torchrun_ends_all(start: Callable[..., ServerProcess]) -> None:
    server = start()
    server.wait_ready()
    processes = server.ranks()
    server.signal(signal.SIGTERM)
    assert server.wait(90) == 1  # torchrun's own status after a signal
    wait_until(lambda: gone(processes), what="all processes have ended")
    assert server.stderr().count("SIGTERM: stopping") == 1


def test_a_refusal_ends_all_processes(start: Callable[..., ServerProcess]) -> None:
    server = start("--tp-size", "3")
    assert server.wait(120) != 0
    line = "error: --tp-size 3 is not the number of processes that torchrun starts, 2: leave it out"
    assert server.stderr().count(line) == 1


def torchrun_on(hosts: Hosts, *flags: str, per_host: int = 1, others: tuple[str, ...] = ()) -> Spread:
    """others: more flags, of node 1."""
    nodes = []
    for node in range(2):
        meeting = ("--nnodes=2", f"--node-rank={node}", "--master-addr=10.77.0.1", "--master-port=29400")
        command = (TORCHRUN, *meeting, f"--nproc-per-node={per_host}", "--no-python")
        nodes.append(hosts.launch(node, *FLAGS, *POOL, *flags, *(others if node else ()), command=command))
    return Spread(nodes)


@needs_hosts
@pytest.mark.parametrize(
    ("flags", "per_host"),
    [
        pytest.param((), 1, id="tensor parallel"),
        pytest.param(("--dp-size=2",), 2, id="replicas", marks=pytest.mark.sweep),
        pytest.param(("--dp-size=4", "--enable-dp-attention"), 2, id="data parallel", marks=pytest.mark.sweep),
    ],
)
def test_two_hosts(hosts: Hosts, flags: tuple[str, ...], per_host: int) -> None:
    engine = torchrun_on(hosts, *flags, per_host=per_host)
    url = engine.wait_ready()
    assert hosts.generate(url, PROMPTS) == expected(PROMPTS)
    assert hosts.ask(f"{engine.health[0]}/health", host=1)[0] == 200
    engine.nodes[1].signal(signal.SIGKILL)
    engine.nodes[0].wait(90)
    wait_until(lambda: all(map(gone, engine.ranks)), what="all processes have ended")


@needs_hosts
@pytest.mark.sweep
def test_other_flags_on_two_hosts_are_refused(hosts: Hosts) -> None:
    engine = torchrun_on(hosts, others=("--page-size=32",))
    for node in engine.nodes:
        assert node.wait(120) != 0
        assert "--page-size is 16 on node 0 and 32 on node 1" in node.stderr()
