"""Prefill and decode servers in several places: one host each, and each spread over both."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress

import psutil
import pytest

from tests.server_process import ServerProcess, wait_until
from tests.topology.hosts import (
    ADDRESSES,
    ADDRESSES_V6,
    FLAGS,
    POOL,
    PROMPTS,
    Hosts,
    Spread,
    expected,
    hosts,
    needs_hosts,
)

__all__ = ["hosts"]

pytestmark = [pytest.mark.timeout(480), needs_hosts]
sweep = pytest.mark.sweep
TENSOR, DATA = ("--tp-size=2",), ("--tp-size=2", "--dp-size=2", "--enable-dp-attention")
REPLICAS = ("--dp-size=2",)
ROUTER = "http://127.0.0.1:30000"
# A silent peer is lost after 30 s, which none of these tests waits for, and a request nobody takes over after 60 s.
BOUNDS = (
    "--disaggregation-heartbeat-interval=0.5",
    "--disaggregation-heartbeat-failures=60",
    "--disaggregation-bootstrap-timeout=60",
)
FAILS_WITHIN = 120.0


@pytest.mark.parametrize(
    "addresses",
    [pytest.param(ADDRESSES, id="IPv4"), pytest.param(ADDRESSES_V6, id="IPv6", marks=sweep)],
)
def test_prefill_on_one_host_and_decode_on_the_other(hosts: Hosts, addresses: tuple[str, str]) -> None:
    """Ports may be fixed: nobody else is on these hosts."""
    urls = [f"http://{f'[{address}]' if ':' in address else address}" for address in addresses]

    def start(host: int, role: str, port: int, *words: str) -> ServerProcess:
        return hosts.launch(
            host, f"--disaggregation-mode={role}", f"--host={addresses[host]}", f"--port={port}", *words
        )

    common = (*FLAGS, *POOL, "--disaggregation-transfer-backend=tcp")
    start(0, "prefill", 30001, *common, "--disaggregation-bootstrap-port=8998", "--chunked-prefill-size=16")
    start(1, "decode", 30002, *common)
    router = start(0, "router", 30000, "--prefill", f"{urls[0]}:30001", "8998", "--decode", f"{urls[1]}:30002")
    for server in hosts.servers:
        server.wait_ready()
    roles = ("decode server", "prefill server")
    wait_until(lambda: all(role in router.stderr() for role in roles), what="both are found")
    assert hosts.generate(f"{urls[0]}:30000", PROMPTS) == expected(PROMPTS)


class Roles:
    """A prefill and a decode server, each on both hosts, and a router on the first. Ports may be fixed here too."""

    def __init__(self, hosts: Hosts, is_v6: bool = False) -> None:
        self._hosts = hosts
        self._first = f"[{ADDRESSES_V6[0]}]" if is_v6 else ADDRESSES[0]
        self.prefill = self.decode = Spread([])

    def start_prefill(self, *flags: str) -> None:
        self.prefill = self._start("prefill", 30001, 29500, "--disaggregation-bootstrap-port=8998", *flags)

    def start_decode(self, *flags: str) -> None:
        self.decode = self._start("decode", 30002, 29600, *flags)

    def _start(self, role: str, port: int, meeting_port: int, *flags: str) -> Spread:
        backend = ("--disaggregation-transfer-backend=tcp", f"--disaggregation-mode={role}", "--host={own}")
        own = (*BOUNDS, *backend, f"--port={port}", "--chunked-prefill-size=16", *flags)
        return self._hosts.start(f"{self._first}:{meeting_port}", *own)

    def start_router(self) -> None:
        prefill = ("--prefill", f"http://{self._first}:30001", "8998")
        flags = ("--disaggregation-mode=router", "--port=30000", *prefill, "--decode", f"http://{self._first}:30002")
        self._hosts.launch(0, *flags)

    def wait_ready(self) -> None:
        for server in (self.prefill, self.decode):
            if not server.url:
                server.wait_ready()
        wait_until(lambda: self._hosts.ask(f"{ROUTER}/ready")[0] == 200, what="the router has found both")

    def wait_taken(self) -> None:
        """Until the decode server has a request."""

        def has_one() -> bool:
            return any(load["num_reqs"] for load in self._hosts.ask(f"{self.decode.url}/get_load")[1])

        wait_until(has_one, what="the decode server has the request")

    def registered(self, num_ranks: int) -> list[str]:
        """Addresses of the prefill ranks as decode ranks are told them. num_ranks: each a data-parallel one."""
        found = []
        for rank in range(num_ranks):
            status, route = self._hosts.ask(f"http://{self._first}:8998/route?dp_rank={rank}&tp_rank=0", host=1)
            assert status == 200
            found.append(route["registration"]["host"])
        return found


class Call(threading.Thread):
    """A request under way."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(daemon=True)
        self._hosts = hosts
        self._result: tuple[int, object] | None = None
        self.start()

    def run(self) -> None:
        body = {"input_ids": PROMPTS[1], "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
        self._result = self._hosts.ask(f"{ROUTER}/generate", body)

    def result(self) -> tuple[int, object]:
        """Status and answer."""
        self.join(FAILS_WITHIN)
        assert self._result is not None, "the request has neither failed nor ended"
        return self._result


@pytest.mark.parametrize(
    ("prefill", "decode", "is_v6"),
    [
        pytest.param(TENSOR, TENSOR, True, id="tensor parallel, IPv6"),
        pytest.param(TENSOR, DATA, False, id="tensor parallel and data parallel"),
        pytest.param(DATA, DATA, False, id="data parallel"),
        pytest.param(REPLICAS, TENSOR, True, id="replicas and tensor parallel, IPv6"),
        pytest.param(TENSOR, REPLICAS, False, id="tensor parallel and replicas"),
    ],
)
@sweep
def test_layouts(hosts: Hosts, prefill: tuple[str, ...], decode: tuple[str, ...], is_v6: bool) -> None:
    roles = Roles(hosts, is_v6)
    roles.start_prefill(*prefill)
    roles.start_decode(*decode)
    roles.start_router()
    roles.wait_ready()
    assert hosts.generate(ROUTER, PROMPTS) == expected(PROMPTS)
    for server in (roles.decode, roles.prefill):
        server.nodes[0].signal(signal.SIGTERM)
        server.wait_end((0, 0))


@pytest.mark.parametrize(
    ("role", "node", "statuses"),
    [
        pytest.param("prefill", 1, (1, -9), id="prefill, node 1"),
        pytest.param("prefill", 0, (-9, 1), id="prefill, node 0", marks=sweep),
        pytest.param("decode", 1, (1, -9), id="decode, node 1", marks=sweep),
        pytest.param("decode", 0, (-9, 1), id="decode, node 0", marks=sweep),
    ],
)
def test_a_server_that_loses_a_node_ends_fails_its_requests_and_is_used_again(
    hosts: Hosts, role: str, node: int, statuses: tuple[int, int]
) -> None:
    roles = Roles(hosts)
    roles.start_prefill(*DATA)
    roles.start_decode(*TENSOR)
    roles.start_router()
    roles.wait_ready()
    assert roles.registered(2) == list(ADDRESSES)
    answers = expected(PROMPTS)
    assert hosts.generate(ROUTER, PROMPTS) == answers

    # While the prefill rank that has it stands still, a request is surely under way.
    for ranks in roles.prefill.ranks:
        ranks[0].suspend()
    call = Call(hosts)
    roles.wait_taken()
    broken, other = (roles.prefill, roles.decode) if role == "prefill" else (roles.decode, roles.prefill)
    broken.nodes[node].signal(signal.SIGKILL)
    for ranks in roles.prefill.ranks:
        with suppress(psutil.NoSuchProcess):  # killed with its node
            ranks[0].resume()
    broken.wait_end(statuses)
    status, answer = call.result()
    assert status >= 500, answer

    assert all(process.process.poll() is None for process in other.nodes)
    if role == "prefill":
        roles.start_prefill(*DATA)
    else:
        roles.start_decode(*TENSOR)
    roles.wait_ready()
    assert hosts.generate(ROUTER, PROMPTS) == answers
    for server in (roles.decode, roles.prefill):
        server.nodes[0].signal(signal.SIGTERM)
        server.wait_end((0, 0))
