"""A client's machine vanishes without a word: the cable is pulled, and no connection is closed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server_process import wait_until
from tests.topology.hosts import ADDRESSES, FLAGS, Hosts, hosts, needs_hosts

__all__ = ["hosts"]

pytestmark = [pytest.mark.timeout(480), needs_hosts]
CLIENT_TIMEOUT = 3
SLACK = 60.0  # each look at the server is a process of its own, on a loaded machine
URL = f"http://{ADDRESSES[0]}:30000"
# So much work that it cannot be over before the loss is noticed.
BODY = {"model": "tiny-qwen3-moe", "prompt": "hello", "max_tokens": 1900, "n": 32, "temperature": 1, "ignore_eos": True}
_READ = """
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""


def reader(hosts: Hosts, host: int, *words: str) -> list[str]:
    """A command on one of the hosts that prints what is at a URL, the first word. The second is a body to post."""
    return ["ip", "netns", "exec", hosts.names[host], sys.executable, "-c", _READ, *words]


@contextmanager
def client(hosts: Hosts, *, stream: bool) -> Iterator[None]:
    """On the second host, and there to the end of the block."""
    command = reader(hosts, 1, f"{URL}/v1/completions", json.dumps(BODY | {"stream": stream}))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)


def metric(hosts: Hosts, beginning: str) -> float:
    """The sum of all metrics with this beginning."""
    command = reader(hosts, 0, f"{URL}/metrics")
    lines = subprocess.run(command, capture_output=True, check=True, text=True, timeout=90).stdout.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))


def is_idle(hosts: Hosts) -> bool:
    """Whether no server has a request in any queue."""
    status, loads = hosts.ask(f"{URL}/get_load")
    assert status == 200
    return not any(value for load in loads for name, value in load.items() if name.startswith("num_"))


@pytest.mark.parametrize(
    ("flags", "begun", "aborted"),
    [
        pytest.param(
            (),
            {"lockstep_running_requests{": 64, "lockstep_time_to_first_token_seconds_count": 2},
            {'lockstep_requests_total{finish_reason="abort"}': 64},
            id="server",
        ),
        pytest.param(
            ("--disaggregation-transfer-backend=fake",),
            {'lockstep_router_in_flight{role="decode"': 2, "lockstep_router_first_byte_seconds_count": 1},
            {'lockstep_router_requests_total{outcome="abort"}': 2},
            id="router",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_what_lost_clients_asked_for_is_ended(
    hosts: Hosts, flags: tuple[str, ...], begun: dict[str, int], aborted: dict[str, int]
) -> None:
    """Of one that reads a stream, with bytes under way to it, and one that waits on a silent connection."""
    address = (f"--host={ADDRESSES[0]}", "--port=30000", f"--client-timeout={CLIENT_TIMEOUT}")
    server = hosts.launch(0, *FLAGS, *flags, *address, "--max-total-tokens=131072")
    assert server.wait_ready() == URL
    with client(hosts, stream=True), client(hosts, stream=False):
        wait_until(lambda: {name: metric(hosts, name) for name in begun} == begun, what="both are being answered")
        hosts.cut_wire()
        wait_until(lambda: is_idle(hosts), CLIENT_TIMEOUT + SLACK, "nothing is worked on any more")
        wait_until(lambda: {name: metric(hosts, name) for name in aborted} == aborted, what="both are counted")
    assert "Traceback" not in server.stderr()
