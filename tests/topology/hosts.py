"""Two hosts for a test: network namespaces with addresses of their own and a wire between them."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.server_process import READY_TIMEOUT, ServerProcess, gone, wait_until

needs_hosts = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
FLAGS = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
POOL = ("--max-total-tokens", "2048")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_V6 = ("fd77::1", "fd77::2")
V4, V6 = "10.77.0.1:29500", "[fd77::1]:29500"
PROMPTS = [random_ids(length, seed=length) for length in (1, 20, 40, 70)]
_CLONE_NEWNET = 0x40000000


class Spread:
    """One server on several nodes, of which nodes[0] takes requests.

    Once it is ready: `url` of node 0, `health`: URLs at which the others answer, `ranks` of each node.
    """

    def __init__(self, nodes: list[ServerProcess]) -> None:
        self.nodes = nodes
        self.url = ""
        self.health: list[str] = []
        self.ranks: list[list[psutil.Process]] = []

    def wait_ready(self) -> str:
        """URL of node 0."""
        self.url = self.nodes[0].wait_ready()
        for number, node in enumerate(self.nodes[1:], start=1):
            pattern = rf"Lockstep node {number} of {len(self.nodes)} is ready: \d+ ranks? .*; /health at (http://\S+),"
            while (match := re.match(pattern, node.next_line(READY_TIMEOUT) or "ended")) is None:
                assert node.process.poll() is None, node.stderr()
            self.health.append(match.group(1))
        self.ranks = [node.ranks() for node in self.nodes]
        return self.url

    def wait_end(self, statuses: tuple[int, ...], seconds: float = 90.0) -> None:
        """Until every node has ended with its status, and every rank."""
        deadline = time.monotonic() + seconds
        got = tuple(node.wait(max(0.1, deadline - time.monotonic())) for node in self.nodes)
        assert got == statuses, self.log()
        wait_until(lambda: all(map(gone, self.ranks)), what="all ranks have ended")
        assert "Traceback" not in self.log()

    def log(self) -> str:
        return "\n".join(node.stderr() for node in self.nodes)


@dataclass
class Hosts:
    """Two namespaces by name, and the end of the wire that is in each."""

    names: tuple[str, str]
    wires: tuple[str, str]
    servers: list[ServerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Threads that have entered a host, where alone their sockets are then.
        self._clients = [ThreadPoolExecutor(4, initializer=_enter, initargs=(name,)) for name in self.names]

    def launch(self, host: int, *flags: str, command: tuple[str, ...] = ()) -> ServerProcess:
        """command: what runs launch.py there."""
        server = ServerProcess(*flags, prefix=("ip", "netns", "exec", self.names[host], *command))
        self.servers.append(server)
        return server

    def start(self, address: str, *flags: str, others: tuple[str, ...] | None = None, num_nodes: int = 2) -> Spread:
        """A server on num_nodes nodes, the first half of them on one host. others: flags of the later half, if other.

        The word {own} in a flag becomes the node's address of the family that `address` has.
        """
        own_addresses = ADDRESSES_V6 if address.startswith("[") else ADDRESSES
        nodes = []
        for node in range(num_nodes):
            host = 2 * node // num_nodes
            own = flags if host == 0 or others is None else others
            meeting = ("--nnodes", str(num_nodes), "--node-rank", str(node), "--dist-init-addr", address)
            words = [word.format(own=own_addresses[host]) for word in (*meeting, *own)]
            nodes.append(self.launch(host, *FLAGS, *POOL, *words))
        return Spread(nodes)

    def ask(self, url: str, body: object = None, host: int = 0) -> tuple[int, Any]:
        """Status and answer in JSON, None for an empty one. body: to POST; None for GET. host: of the client."""
        return self._clients[host].submit(_ask, url, body).result()

    def generate(self, url: str, prompts: list[list[int]]) -> list[list[int]]:
        params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        status, answer = self.ask(f"{url}/generate", {"input_ids": prompts, "sampling_params": params})
        assert status == 200, answer
        return [choice["output_ids"] for choice in answer]

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for client in self._clients:
            client.shutdown()

    def cut_wire(self) -> None:
        """From now on each host is gone for the other."""
        _ip("-n", self.names[1], "link", "set", self.wires[1], "down")


def _enter(name: str) -> None:
    """Moves this thread to a network namespace."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ask(url: str, body: object) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=120)
    with closing(connection):
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        if body is None:
            connection.request("GET", target)
        else:
            connection.request("POST", target, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"lockstep-{os.getpid()}-a", f"lockstep-{os.getpid()}-b")
    wires = (f"ls{os.getpid()}a", f"ls{os.getpid()}b")
    made: list[str] = []
    found = Hosts(names, wires)
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
            made.append(name)
        _ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for number, (name, wire) in enumerate(zip(names, wires, strict=True)):
            _ip("link", "set", wire, "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", wire)
            _ip("-n", name, "addr", "add", f"{ADDRESSES_V6[number]}/64", "dev", wire, "nodad")
            _ip("-n", name, "link", "set", wire, "up")
        yield found
    finally:
        found.close()
        for name in made:
            _ip("netns", "del", name)


def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What one process makes of them."""
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    params = SamplingParams(12, 0, temperature=0.0, ignore_eos=True)
    return [generation.token_ids for generation in engine.generate(prompts, [params] * len(prompts))]
