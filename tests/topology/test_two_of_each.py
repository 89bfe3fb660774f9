"""One of two prefill servers dies behind a router, or one of two decode servers: the other serves, and nobody waits.

Two routers stand before the same servers: one tries again what failed before its first byte, the other does not.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.server_process import ServerProcess, wait_until
from tests.topology.cluster import HTTP, Call, Cluster, cluster_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.sweep]
PROBE = "Once upon a time"
SOON = 60.0  # two cores, five servers: time to notice what is noticed at once
_numbers = itertools.count(1)


@dataclass
class Deployment:
    """routers: URLs of the one that tries again and of the one that does not."""

    cluster: Cluster
    routers: tuple[str, str]

    def worker(self, router: str, name: str) -> dict[str, Any]:
        """What a router says of a server."""
        workers = HTTP.get(f"{router}/workers").json()["workers"]
        found: dict[str, Any] = next(worker for worker in workers if worker["url"] == self.cluster.urls[name])
        return found

    def wait_healthy(self, name: str, healthy: bool) -> None:
        for router in self.routers:
            what = f"{router} says healthy: {healthy} of {name}"
            wait_until(lambda router=router: self.worker(router, name)["healthy"] is healthy, SOON, what)  # type: ignore[misc]

    def signal(self, name: str, number: signal.Signals) -> None:
        """To a server and its ranks."""
        process = self.cluster.processes[name]
        for rank in process.ranks():
            rank.send_signal(number)
        process.signal(number)

    def kill(self, name: str, send: Callable[[str], list[Call]]) -> dict[str, list[Call]]:
        """Kills a server that has one of the two calls which `send` makes to each router; returns the calls by router.

        It is stopped first, to be sure that it has not done its part when it is killed.
        """
        for _ in range(10):
            calls = {router: send(router) for router in self.routers}
            self.signal(name, signal.SIGSTOP)
            if all(self.worker(router, name)["in_flight"] == 1 for router in self.routers):
                self.cluster.stop(name)
                return calls
            self.signal(name, signal.SIGCONT)
            for call in itertools.chain(*calls.values()):
                call.leave()
            self.cluster.wait_drained()
        raise AssertionError(f"{name} was always stopped too late")

    def served_by(self, name: str) -> int:
        """Requests that a server has handed over or taken over since its start."""
        return sum(state["transfers_total"] for state in self.cluster.states(name))

    def check_living_serve(self, dead: str, text: str) -> None:
        """Requests through both routers go round the dead server."""
        self.wait_healthy(dead, False)
        for router in self.routers:
            for _ in range(3):
                call = Call(router, PROBE).wait(120)
                assert (call.status, call.error, call.text) == (200, None, text)

    def check_used_again(self, name: str, text: str) -> None:
        """The server that was started again gets requests of both routers."""
        self.wait_healthy(name, True)
        for router in self.routers:
            before = self.served_by(name)
            calls = [Call(router, PROBE) for _ in range(4)]
            assert [(call.wait(120).error, call.text) for call in calls] == [(None, text)] * 4
            wait_until(lambda before=before: self.served_by(name) > before, SOON, f"{name} has served")  # type: ignore[misc]
        self.cluster.wait_drained()


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with cluster_of(prefill_args=("--chunked-prefill-size=4",), num_each=2) as cluster:
        strict = ServerProcess(*cluster.router_words, "--retries=0")
        try:
            made = Deployment(cluster, (cluster.url, strict.wait_ready()))
            for name in ("prefill", "prefill2", "decode", "decode2"):
                made.wait_healthy(name, True)
            yield made
        finally:
            strict.stop()


def long_prompt() -> list[int]:
    """Some seconds of prefill in chunks of 4, and in nobody's cache yet."""
    return [next(_numbers), *(7 + i % 200 for i in range(1799))]


def test_one_of_two_prefill_servers_dies(deployment: Deployment) -> None:
    patient, strict = deployment.routers
    text = Call(patient, PROBE).wait(120).text
    others = [Call(patient, PROBE, max_tokens=1500) for _ in range(4)]
    assert all(call.started.wait(60) for call in others)

    def send(router: str) -> list[Call]:
        calls = [Call(router, long_prompt()) for _ in range(2)]
        both = ("prefill", "prefill2")

        def are_begun() -> bool:
            has_one = all(deployment.worker(router, name)["in_flight"] == 1 for name in both)
            return has_one or any(call.has_ended for call in calls)

        wait_until(are_begun, SOON, "each prefill server has one of them")
        return calls

    calls = deployment.kill("prefill2", send)
    wait_until(lambda: any(call.error for call in calls[strict]), SOON, "the request of the dead server has failed")
    errors = [call.wait(120).error for call in calls[strict]]
    assert errors.count(None) == 1, errors
    (lost,) = (call for call in calls[strict] if call.error is not None)
    assert lost.status is not None and lost.status >= 500
    assert "prefill server" in (lost.error or "")
    assert [call.wait(120).error for call in calls[patient]] == [None, None]
    assert [(call.wait(120).error, call.finish_reason) for call in others] == [(None, "length")] * 4
    assert len({call.text for call in others}) == 1
    deployment.check_living_serve("prefill2", text)
    deployment.cluster.start("prefill2")
    deployment.check_used_again("prefill2", text)


def test_one_of_two_decode_servers_dies(deployment: Deployment) -> None:
    text = Call(deployment.routers[0], PROBE).wait(120).text

    def send(router: str) -> list[Call]:
        calls = [Call(router, PROBE, max_tokens=1000) for _ in range(2)]
        assert all(call.started.wait(60) for call in calls)
        return calls

    calls = deployment.kill("decode2", send)
    for pair in calls.values():
        wait_until(lambda pair=pair: any(call.error for call in pair), SOON, "the stream of the dead server has ended")  # type: ignore[misc]
        errors = [call.wait(120).error for call in pair]
        assert errors.count(None) == 1, errors
        (lost,) = (call for call in pair if call.error is not None)
        (other,) = (call for call in pair if call is not lost)
        assert lost.status == 200
        assert deployment.cluster.urls["decode2"] in (lost.error or "")
        assert other.finish_reason == "length"
        assert other.text.startswith(lost.text)
    deployment.check_living_serve("decode2", text)
    deployment.cluster.start("decode2")
    deployment.check_used_again("decode2", text)
