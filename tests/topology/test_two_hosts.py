"""One engine on two hosts: network namespaces with addresses of their own and a wire between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
pytestmark = [pytest.mark.timeout(120), needs_hosts]
FLAGS = ("--model-path", "tiny-qwen3-moe", "--device", "cpu", "--dtype", "float32", "--num-threads", "1")
POOL = ("--max-total-tokens", "2048")
V4, V6 = "10.77.0.1:29500", "[fd77::1]:29500"
_POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@dataclass
class Hosts:
    """Two namespaces; node i runs in `names[i]`."""

    names: tuple[str, str]
    servers: list[ServerProcess] = field(default_factory=list)
    ranks: list[list[psutil.Process]] = field(default_factory=list)

    def start(self, address: str, *flags: str, others: tuple[str, ...] | None = None) -> None:
        """others: flags of node 1, where they differ."""
        for node, name in enumerate(self.names):
            own = flags if node == 0 or others is None else others
            meeting = ("--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", address)
            self.servers.append(ServerProcess(*FLAGS, *POOL, *meeting, *own, prefix=("ip", "netns", "exec", name)))

    def wait_ready(self) -> str:
        """URL of node 0."""
        url = self.servers[0].wait_ready()
        while not re.match(r"Lockstep node 1 of 2 is ready: \d+ ranks", self.servers[1].next_line(60) or "ended"):
            pass
        self.ranks = [server.ranks() for server in self.servers]
        return url

    def generate(self, url: str, prompts: list[list[int]]) -> list[list[int]]:
        params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": params})
        command = ["ip", "netns", "exec", self.names[0], sys.executable, "-c", _POST, f"{url}/generate", body]
        answer: list[dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return [choice["output_ids"] for choice in answer]

    def wait_end(self, statuses: tuple[int, int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        got = tuple(server.wait(max(0.1, deadline - time.monotonic())) for server in self.servers)
        assert got == statuses, "\n".join(server.stderr() for server in self.servers)
        assert all(gone(ranks) for ranks in self.ranks)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"lockstep-{os.getpid()}-a", f"lockstep-{os.getpid()}-b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    made: list[str] = []
    found = Hosts(names)
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
            made.append(name)
        wires = [f"ls{os.getpid()}{end}" for end in "ab"]
        ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for number, (name, wire) in enumerate(zip(names, wires, strict=True), start=1):
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", wire)
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", wire, "nodad")
            ip("-n", name, "link", "set", wire, "up")
        yield found
    finally:
        for server in found.servers:
            server.stop()
        for name in made:
            ip("netns", "del", name)


def expected(prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(
        EngineConfig(model_path="tiny-qwen3-moe", dtype="float32", device="cpu", num_threads=1, max_total_tokens=2048)
    )
    params = SamplingParams(12, 0, temperature=0.0, ignore_eos=True)
    return [generation.token_ids for generation in engine.generate(prompts, [params] * len(prompts))]


@pytest.mark.parametrize(
    ("address", "flags"),
    [(V4, ("--tp-size", "2")), (V6, ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"))],
    ids=["tensor parallel, IPv4", "data parallel, IPv6"],
)
def test_tokens_equal_those_of_one_process(hosts: Hosts, address: str, flags: tuple[str, ...]) -> None:
    hosts.start(address, *flags)
    url = hosts.wait_ready()
    prompts = [random_ids(length, seed=length) for length in (1, 20, 40, 70)]
    assert hosts.generate(url, prompts) == expected(prompts)
    hosts.servers[0].signal(signal.SIGTERM)
    hosts.wait_end((0, 0), 20)


def test_other_flags_on_the_other_host_are_refused_on_both(hosts: Hosts) -> None:
    hosts.start(V4, "--tp-size", "2", others=("--tp-size", "2", "--page-size", "32"))
    hosts.wait_end((2, 2), 60)
    for server in hosts.servers:
        assert "--page-size is 16 on node 0 and 32 on node 1" in server.stderr()


def kill_rank(hosts: Hosts) -> None:
    hosts.ranks[1][0].kill()


def kill_node(hosts: Hosts) -> None:
    hosts.servers[0].signal(signal.SIGKILL)


def stop_node(hosts: Hosts) -> None:
    hosts.servers[1].signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "statuses"),
    [(kill_rank, (1, 1)), (kill_node, (-9, 1)), (stop_node, (1, 0))],
    ids=["rank killed", "node 0 killed", "node 1 stopped"],
)
def test_the_end_of_one_host_is_the_end_of_both(
    hosts: Hosts, fault: Callable[[Hosts], None], statuses: tuple[int, int]
) -> None:
    hosts.start(V4, "--tp-size", "2")
    hosts.wait_ready()
    fault(hosts)
    hosts.wait_end(statuses, 15)
    assert "Traceback" not in hosts.servers[0].stderr() + hosts.servers[1].stderr()
    if fault is not kill_node:
        assert "rank 0 cannot go on without the others: rank 1 is gone" in hosts.servers[0].stderr()


@pytest.mark.parametrize("addresses", [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")], ids=["IPv4", "IPv6"])
def test_prefill_on_one_host_and_decode_on_the_other(hosts: Hosts, addresses: tuple[str, str]) -> None:
    """Ports may be fixed: nobody else is on these hosts."""
    urls = [f"http://{f'[{address}]' if ':' in address else address}" for address in addresses]

    def start(node: int, role: str, port: int, *words: str) -> ServerProcess:
        server = ServerProcess(
            f"--disaggregation-mode={role}",
            f"--host={addresses[node]}",
            f"--port={port}",
            *words,
            prefix=("ip", "netns", "exec", hosts.names[node]),
        )
        hosts.servers.append(server)
        return server

    common = (*FLAGS, *POOL, "--disaggregation-transfer-backend=tcp")
    start(0, "prefill", 30001, *common, "--disaggregation-bootstrap-port=8998", "--chunked-prefill-size=16")
    start(1, "decode", 30002, *common)
    router = start(0, "router", 30000, "--prefill", f"{urls[0]}:30001", "8998", "--decode", f"{urls[1]}:30002")
    for server in hosts.servers:
        server.wait_ready()
    wait_until(lambda: "decode server" in router.stderr() and "prefill server" in router.stderr(), 20, "both are found")
    prompts = [random_ids(length, seed=length) for length in (1, 20, 40, 70)]
    assert hosts.generate(f"{urls[0]}:30000", prompts) == expected(prompts)
