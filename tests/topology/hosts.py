"""Two hosts for a test: network namespaces with addresses of their own and a wire between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import SamplingParams
from tests.models.support import random_ids
from tests.server_process import ServerProcess, gone, wait_until

needs_hosts = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
FLAGS = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
POOL = ("--max-total-tokens", "2048")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ADDRESSES_V6 = ("fd77::1", "fd77::2")
V4, V6 = "10.77.0.1:29500", "[fd77::1]:29500"
PROMPTS = [random_ids(length, seed=length) for length in (1, 20, 40, 70)]
_ASK = """
import sys, urllib.error, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status)
sys.stdout.write(answer.read().decode())
"""


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
            pattern = rf"Lockstep node {number} of {len(self.nodes)} is ready: \d+ ranks .*; /health at (http://\S+),"
            while (match := re.match(pattern, node.next_line(60) or "ended")) is None:
                assert node.process.poll() is None, node.stderr()
            self.health.append(match.group(1))
        self.ranks = [node.ranks() for node in self.nodes]
        return self.url

    def wait_end(self, statuses: tuple[int, ...], seconds: float) -> None:
        """Until every node has ended with its status, and every rank."""
        deadline = time.monotonic() + seconds
        got = tuple(node.wait(max(0.1, deadline - time.monotonic())) for node in self.nodes)
        assert got == statuses, self.log()
        wait_until(lambda: all(map(gone, self.ranks)), 20, "all ranks have ended")
        assert "Traceback" not in self.log()

    def log(self) -> str:
        return "\n".join(node.stderr() for node in self.nodes)


@dataclass
class Hosts:
    """Two namespaces by name, and the end of the wire that is in each."""

    names: tuple[str, str]
    wires: tuple[str, str]
    servers: list[ServerProcess] = field(default_factory=list)

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
        """Status and answer in JSON, None for an empty one. body: to POST; None for GET."""
        words = [url] if body is None else [url, json.dumps(body)]
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-c", _ASK, *words]
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=90)
        status, _, text = done.stdout.partition("\n")
        return int(status), json.loads(text) if text else None

    def generate(self, url: str, prompts: list[list[int]]) -> list[list[int]]:
        params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        status, answer = self.ask(f"{url}/generate", {"input_ids": prompts, "sampling_params": params})
        assert status == 200, answer
        return [choice["output_ids"] for choice in answer]

    def cut_wire(self) -> None:
        """From now on each host is gone for the other."""
        _ip("-n", self.names[1], "link", "set", self.wires[1], "down")


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
        for server in found.servers:
            server.stop()
        for name in made:
            _ip("netns", "del", name)


def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What one process makes of them."""
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    params = SamplingParams(12, 0, temperature=0.0, ignore_eos=True)
    return [generation.token_ids for generation in engine.generate(prompts, [params] * len(prompts))]
