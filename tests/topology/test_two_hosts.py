"""One engine, or replicas of it, on two hosts."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.models.support import random_ids
from tests.server_process import wait_until
from tests.topology.hosts import (
    ADDRESSES,
    ADDRESSES_V6,
    FLAGS,
    POOL,
    PROMPTS,
    V4,
    V6,
    Hosts,
    Spread,
    expected,
    hosts,
    needs_hosts,
)

__all__ = ["hosts"]

pytestmark = [pytest.mark.timeout(480), needs_hosts]
TENSOR, DATA = ("--tp-size", "2"), ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
REPLICAS = ("--dp-size", "2")
sweep = pytest.mark.sweep


def kill_rank(engine: Spread) -> None:
    engine.ranks[1][0].kill()


def kill_node_0(engine: Spread) -> None:
    engine.nodes[0].signal(signal.SIGKILL)


def kill_node_1(engine: Spread) -> None:
    engine.nodes[1].signal(signal.SIGKILL)


def stop_node_0(engine: Spread) -> None:
    engine.nodes[0].signal(signal.SIGTERM)


def stop_node_1(engine: Spread) -> None:
    engine.nodes[1].signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("address", "flags", "end", "statuses"),
    [
        pytest.param(V4, TENSOR, kill_rank, (1, 1), id="tensor parallel, IPv4, rank killed"),
        pytest.param(V6, DATA, stop_node_1, (1, 0), id="data parallel, IPv6, node 1 stopped"),
        pytest.param(V4, TENSOR, kill_node_0, (-9, 1), id="tensor parallel, node 0 killed", marks=sweep),
        pytest.param(V4, TENSOR, stop_node_0, (0, 0), id="tensor parallel, node 0 stopped", marks=sweep),
        pytest.param(V6, REPLICAS, stop_node_0, (0, 0), id="replicas, IPv6, node 0 stopped", marks=sweep),
        pytest.param(V4, REPLICAS, kill_rank, (1, 1), id="replicas, rank killed", marks=sweep),
        pytest.param(V4, REPLICAS, kill_node_1, (1, -9), id="replicas, node 1 killed", marks=sweep),
        pytest.param(V4, REPLICAS, stop_node_1, (1, 0), id="replicas, node 1 stopped", marks=sweep),
    ],
)
def test_tokens_are_those_of_one_process_and_the_end_of_one_host_is_the_end_of_both(
    hosts: Hosts, address: str, flags: tuple[str, ...], end: Callable[[Spread], None], statuses: tuple[int, int]
) -> None:
    engine = hosts.start(address, *flags)
    url = engine.wait_ready()
    assert hosts.generate(url, PROMPTS) == expected(PROMPTS)
    assert [hosts.ask(f"{health}/health", host=1)[0] for health in engine.health] == [200]
    end(engine)
    engine.wait_end(statuses)
    if end in (kill_rank, kill_node_1, stop_node_1):
        log = engine.nodes[0].stderr()
        host = (ADDRESSES_V6 if address == V6 else ADDRESSES)[1]
        assert f"rank 0 cannot go on without the others: rank 1 is gone, on host {host}" in log
        assert f"rank 0 cannot go on: rank 1 is gone, on host {host}" in log
        assert "; stopping the server" in log
        assert "ended unexpectedly" not in log


@pytest.mark.sweep
@pytest.mark.parametrize("flags", [TENSOR, REPLICAS], ids=["tensor parallel", "replicas"])
def test_clients_are_told_which_rank_is_gone(hosts: Hosts, flags: tuple[str, ...]) -> None:
    engine = hosts.start(V4, *flags)
    url = engine.wait_ready()
    body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(hosts.ask, f"{url}/generate", body)
        wait_until(lambda: hosts.ask(f"{url}/get_load")[1][0]["num_reqs"] == 1, what="the request runs")
        engine.ranks[1][0].kill()
        status, content = answer.result(120)
    assert (status, content["error"]["code"]) == (500, "engine_failed")
    # A collective may notice it first, which does not know ranks by their numbers.
    gone = r"(rank 1 is gone, on host 10\.77\.0\.2|another rank is gone or late \().*"
    assert re.fullmatch(f"rank 0 cannot go on: {gone}", content["error"]["message"]), content
    engine.wait_end((1, 1))


@pytest.mark.parametrize(
    ("flags", "num_nodes", "end", "statuses"),
    [
        pytest.param(("--dp-size", "2"), 2, kill_node_0, (-9, 1), id="a rank each"),
        pytest.param(("--dp-size", "2", "--tp-size", "2"), 2, stop_node_0, (0, 0), id="two ranks each", marks=sweep),
        pytest.param(("--dp-size", "4"), 2, stop_node_0, (0, 0), id="two on each host", marks=sweep),
        pytest.param(
            ("--dp-size", "2", "--tp-size", "2"), 4, stop_node_0, (0, 0, 0, 0), id="each on two nodes", marks=sweep
        ),
    ],
)
def test_requests_are_spread_over_replicas_on_all_hosts(
    hosts: Hosts, flags: tuple[str, ...], num_nodes: int, end: Callable[[Spread], None], statuses: tuple[int, ...]
) -> None:
    engine = hosts.start(V4, *flags, num_nodes=num_nodes)
    url = engine.wait_ready()
    count = int(flags[1])
    prompts = [random_ids(20 + number, seed=number) for number in range(2 * count)]
    assert hosts.generate(url, prompts) == expected(prompts)
    loads = hosts.ask(f"{url}/get_load")[1]
    assert [load["dp_rank"] for load in loads] == list(range(count))
    states = hosts.ask(f"{url}/server_info")[1]["internal_states"]
    assert [state["generated_tokens_total"] for state in states] == [24] * count
    assert hosts.ask(f"{url}/health")[0] == 200
    assert all(hosts.ask(f"{health}/health", host=1)[0] == 200 for health in engine.health[num_nodes // 2 - 1 :])
    end(engine)
    engine.wait_end(statuses)


@pytest.mark.parametrize(
    ("flags", "others", "line"),
    [
        pytest.param(TENSOR, (*TENSOR, "--page-size", "32"), "--page-size is 16 on node 0 and 32 on node 1", id="page"),
        *(
            pytest.param(flags, others, line, id=line.split()[0].strip("-"), marks=sweep)
            for flags, others, line in (
                (("--tp-size", "4"), TENSOR, "--tp-size is 4 on node 0 and 2 on node 1"),
                (TENSOR, ("--tp-size", "4"), "--tp-size is 2 on node 0 and 4 on node 1"),
                (("--dp-size", "2"), ("--dp-size", "4"), "--dp-size is 2 on node 0 and 4 on node 1"),
                (DATA, (*TENSOR, "--dp-size", "2"), "--enable-dp-attention is True on node 0 and False on node 1"),
                (
                    (*TENSOR, "--disaggregation-mode=prefill", "--host={own}", "--disaggregation-bootstrap-port=0"),
                    (*TENSOR, "--disaggregation-mode=decode"),
                    "--disaggregation-mode is prefill on node 0 and decode on node 1",
                ),
                (
                    (*TENSOR, "--disaggregation-mode=decode"),
                    (*TENSOR, "--disaggregation-mode=decode", "--disaggregation-transfer-backend=fake"),
                    "--disaggregation-transfer-backend is tcp on node 0 and fake on node 1",
                ),
                (
                    (*REPLICAS, "--load-balance-method=total_tokens"),
                    REPLICAS,
                    "--load-balance-method is total_tokens on node 0 and auto on node 1",
                ),
                (
                    TENSOR,
                    (*TENSOR, "--model-path=tiny-llama"),
                    "--model-path tiny-qwen3-moe on node 0 and tiny-llama on node 1 are different models",
                ),
            )
        ),
    ],
)
def test_other_flags_on_the_other_host_are_refused_on_both(
    hosts: Hosts, flags: tuple[str, ...], others: tuple[str, ...], line: str
) -> None:
    engine = hosts.start(V4, *flags, others=others)
    engine.wait_end((2, 2), 240)
    for node in engine.nodes:
        assert line in node.stderr()


def test_a_taken_port_of_another_node_is_one_line(hosts: Hosts) -> None:
    """Known before anything slow, and before node 0 is asked."""
    meeting = ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", V4)
    first = hosts.launch(1, *FLAGS, *POOL, *meeting, *TENSOR, "--port=30001")
    wait_until(lambda: "/health of this node at http://127.0.0.1:30001" in first.stderr(), 120, "the port is printed")
    second = hosts.launch(1, *FLAGS, *POOL, *meeting, *TENSOR, "--port=30001")
    assert second.wait(120) == 2
    line = "port 30001 on 127.0.0.1 is in use: stop the other server, or choose another port with --port"
    assert line in second.stderr()
    assert second.stderr().count("\n") == 1
    first.signal(signal.SIGTERM)
    assert first.wait(60) == 0


@pytest.mark.parametrize(
    ("node", "flags", "line"),
    [
        pytest.param(1, TENSOR, "node 0 has not come to --dist-init-addr 10.77.0.1:29500 within --dist-timeout 2 s"),
        pytest.param(0, TENSOR, "node 1 of 2 has not come to --dist-init-addr", marks=sweep),
        pytest.param(0, REPLICAS, "node 1 of 2 has not come to --dist-init-addr", marks=sweep),
    ],
)
def test_a_node_that_does_not_come_is_named(hosts: Hosts, node: int, flags: tuple[str, ...], line: str) -> None:
    meeting = ("--nnodes=2", f"--node-rank={node}", f"--dist-init-addr={V4}", "--dist-timeout=2")
    server = hosts.launch(node, *FLAGS, *POOL, *meeting, *flags)
    assert server.wait(120) == 2
    assert line in server.stderr()
    assert "Traceback" not in server.stderr()


@pytest.mark.sweep
@pytest.mark.parametrize("flags", [TENSOR, REPLICAS], ids=["tensor parallel", "replicas"])
def test_a_host_that_is_gone_is_noticed(hosts: Hosts, flags: tuple[str, ...]) -> None:
    engine = hosts.start(V4, *flags)
    engine.wait_ready()
    hosts.cut_wire()
    engine.wait_end((1, 1))
    assert "rank 0 cannot go on without the others: rank 1 is gone" in engine.nodes[0].stderr()
    assert "rank 1 cannot go on without the others: rank 0 is gone" in engine.nodes[1].stderr()
