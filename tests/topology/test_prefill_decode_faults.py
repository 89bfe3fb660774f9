"""Servers of a prefill/decode deployment die, stop and come back: requests fail with a reason or go on, nothing else.

After every fault: KV, queues and rooms at their baseline, the other servers' processes the same, a probe right.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server_process import ServerProcess, wait_until
from tests.topology.cluster import HTTP, MODEL, TINY, Call, Cluster, cluster_of

pytestmark = pytest.mark.timeout(400)
PROBE = "Once upon a time"
_numbers = itertools.count(1)
SLACK = 20.0  # two cores, other tests: time to notice what is noticed at once
# Short enough to wait for, and longer than a loaded machine may hold up a process that lives.
LOST_AFTER, GIVEN_UP_AFTER = 4.0, 4.0
BOUNDS = (
    "--disaggregation-heartbeat-interval=0.5",
    f"--disaggregation-heartbeat-failures={LOST_AFTER / 0.5:.0f}",
    f"--disaggregation-bootstrap-timeout={GIVEN_UP_AFTER}",
)


@pytest.fixture(scope="module")
def probe_text(one_process: str) -> str:
    return Call(one_process, PROBE).wait().text


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster_of(prefill_args=("--chunked-prefill-size=4", *BOUNDS), decode_args=BOUNDS) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster, probe_text: str) -> Iterator[Cluster]:
    with shared.kept_whole(PROBE, probe_text):
        yield shared


def long_prompt(length: int = 1800) -> list[int]:
    """Some seconds of prefill in chunks of 4, and in nobody's cache yet."""
    return [next(_numbers), *(7 + i % 200 for i in range(length - 1))]


def group_signal(cluster: Cluster, name: str, number: signal.Signals) -> None:
    """To the server and its ranks."""
    process = cluster.processes[name]
    for rank in process.ranks():
        rank.send_signal(number)
    process.signal(number)


def running(cluster: Cluster, name: str) -> bool:
    return cluster.count(name, "running") > 0


def wait_computing(cluster: Cluster, call: Call) -> bool:
    """Until the prompt of a call is computed; False if all was over before that could be seen."""
    wait_until(lambda: running(cluster, "prefill") or call.has_ended, what="the prompt is computed")
    return not call.has_ended


def caught(cluster: Cluster, name: str, send: Callable[[], list[Call]], is_in_time: Callable[[], bool]) -> list[Call]:
    """What `send` has sent, with server `name` stopped (SIGSTOP) while the prompt of the last call is computed.

    Nothing keeps the others from going on until the signal comes, so `is_in_time` is asked once it has; if the signal
    came too late, all is done again.
    """
    for _ in range(10):
        calls = send()
        wait_computing(cluster, calls[-1])
        group_signal(cluster, name, signal.SIGSTOP)
        if is_in_time():
            return calls
        group_signal(cluster, name, signal.SIGCONT)
        for call in calls:
            call.leave()
        cluster.wait_drained()
    raise AssertionError(f"{name} was always stopped too late")


def stopped(cluster: Cluster, name: str, send: Callable[[], list[Call]]) -> list[Call]:
    """As `caught`, for one of the two servers: the other one still has the request."""

    def receiving() -> bool:
        return cluster.count("decode", "connecting", "receiving") > 0

    return caught(cluster, name, send, receiving if name == "prefill" else lambda: running(cluster, "prefill"))


def test_prefill_killed_while_it_computes_and_sends(cluster: Cluster) -> None:
    (call,) = stopped(cluster, "prefill", lambda: [Call(cluster.url, long_prompt())])
    cluster.stop("prefill")
    call.wait()
    assert call.status is not None and call.status >= 500
    assert "prefill" in (call.error or "")
    cluster.wait_drained("decode")
    cluster.start("prefill")


def test_prefill_killed_after_one_hand_over_and_before_another(cluster: Cluster, one_process: str) -> None:
    """What was handed over goes on; what comes then is refused."""
    call = Call(cluster.url, PROBE, max_tokens=400)
    assert call.started.wait(60)
    cluster.stop("prefill")
    later = Call(cluster.url, PROBE).wait()
    assert later.status in (502, 503)
    assert later.seconds < GIVEN_UP_AFTER + SLACK
    assert call.wait().error is None
    assert call.text == Call(one_process, PROBE, max_tokens=400).wait().text
    cluster.wait_drained("decode")
    cluster.start("prefill")


def test_decode_killed_while_the_prompt_is_computed(cluster: Cluster) -> None:
    (call,) = stopped(cluster, "decode", lambda: [Call(cluster.url, long_prompt())])
    cluster.stop("decode")
    call.wait()
    assert call.status is not None and call.status >= 500
    cluster.wait_drained("prefill")
    cluster.start("decode")


def test_decode_killed_in_the_middle_of_a_stream(cluster: Cluster) -> None:
    call = Call(cluster.url, PROBE, max_tokens=2000)
    assert call.started.wait(60)
    cluster.stop("decode")
    call.wait()
    assert call.status == 200
    assert call.error is not None and "decode" in call.error
    cluster.wait_drained("prefill")
    cluster.start("decode")


def test_router_killed_in_the_middle_of_a_stream(cluster: Cluster) -> None:
    def send() -> list[Call]:
        first = Call(cluster.url, PROBE, max_tokens=1500)
        assert first.started.wait(60)
        return [first, Call(cluster.url, long_prompt())]

    calls = caught(cluster, "router", send, lambda: running(cluster, "prefill") and running(cluster, "decode"))
    cluster.stop("router")
    for call in calls:
        assert call.wait().error is not None
    cluster.wait_drained()
    cluster.start("router")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_short_pause_costs_time_only(cluster: Cluster, one_process: str, name: str) -> None:
    (call,) = stopped(cluster, name, lambda: [Call(cluster.url, long_prompt())])
    call._thread.join(0.6)  # a heartbeat is missing
    group_signal(cluster, name, signal.SIGCONT)
    assert call.wait().error is None
    assert call.text == Call(one_process, call.body["prompt"]).wait().text


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_long_pause_fails_the_request_in_bounded_time(cluster: Cluster, name: str) -> None:
    """The peer gives the request up, and takes the paused server back when it answers again."""

    def send() -> list[Call]:
        prompt = long_prompt()
        # Straight to both: a router would try again with another room.
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": cluster.bootstrap_port, "bootstrap_room": prompt[0]}
        return [Call(cluster.urls[side], prompt, **room) for side in ("prefill", "decode")]

    calls = dict(zip(("prefill", "decode"), stopped(cluster, name, send), strict=True))
    other = "decode" if name == "prefill" else "prefill"
    try:
        calls[other].wait(LOST_AFTER + SLACK)
        cluster.wait_drained(other, timeout=SLACK)
    finally:
        group_signal(cluster, name, signal.SIGCONT)
    assert calls[other].status == 500
    assert f"silent for {LOST_AFTER:g} s" in (calls[other].error or "")
    assert calls[name].wait().status == 500
    cluster.wait_routable()


@pytest.mark.parametrize("stage", ["queue", "prefill", "stream"])
def test_client_gone(cluster: Cluster, stage: str) -> None:
    if stage == "stream":
        call = Call(cluster.url, PROBE, max_tokens=2000)
        assert call.started.wait(60)
    else:
        call = Call(cluster.url, long_prompt())
        for _ in range(10 if stage == "prefill" else 0):
            if wait_computing(cluster, call):
                break
            call = Call(cluster.url, long_prompt())
    call.leave()
    cluster.wait_drained(timeout=SLACK)


def test_many_clients_gone_at_random_points_block_nobody(cluster: Cluster) -> None:
    """Half of a crowd leaves; the other half is served, and the next request finds its place."""
    calls = [Call(cluster.url, long_prompt(100 + 10 * i), max_tokens=100) for i in range(20)]
    for call in calls[::2]:
        call._thread.join(0.1)
        call.leave()
    for call in calls[1::2]:
        assert call.wait().error is None


def post(cluster: Cluster, name: str, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROBE, "max_tokens": 4, "temperature": 0, **fields}
    return HTTP.post(f"{cluster.urls[name]}/v1/completions", json=body)


def check_given_up(answer: httpx.Response, reason: str) -> None:
    assert answer.status_code == 500
    assert reason in answer.json()["error"]["message"]
    assert answer.elapsed.total_seconds() < GIVEN_UP_AFTER + SLACK


def test_unreachable_bootstrap_host(cluster: Cluster) -> None:
    hosts = ("127.0.0.1", "no-such-host.invalid")

    def ask(host: str) -> httpx.Response:
        return post(cluster, "decode", bootstrap_host=host, bootstrap_port=1, bootstrap_room=12345 + len(host))

    with ThreadPoolExecutor(len(hosts)) as threads:
        for host, answer in zip(hosts, threads.map(ask, hosts), strict=True):
            check_given_up(answer, f"{host}:1")


def test_prefill_alone_gives_up_after_its_bound(cluster: Cluster) -> None:
    answer = post(cluster, "prefill", bootstrap_host="127.0.0.1", bootstrap_room=54321)
    check_given_up(answer, "bootstrap_timeout")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_rooms_that_are_none(cluster: Cluster, name: str) -> None:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": cluster.bootstrap_port}
    for room in (0, -1, 2**63, 2**64, "seven", None, 1.5, [1, 2]):
        answer = post(cluster, name, **where, bootstrap_room=room)
        assert answer.status_code == 400, room
        assert "bootstrap_room" in answer.json()["error"]["message"], room


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        (("--model-path", "tiny-llama"), ("Qwen3Moe", "Llama")),
        pytest.param(("--page-size", "32"), ("16", "32"), marks=pytest.mark.sweep),
        pytest.param(("--dtype", "bfloat16"), ("float32", "bfloat16"), marks=pytest.mark.sweep),
    ],
    ids=["model", "page size", "dtype"],
)
def test_an_unlike_decode_server_is_refused_with_both_values(
    cluster: Cluster, setting: tuple[str, str], values: tuple[str, str]
) -> None:
    args = [*TINY, "--max-total-tokens", "4096", "--disaggregation-mode=decode"]
    args += ["--disaggregation-transfer-backend=tcp", *setting]
    other = ServerProcess(*args)
    try:
        url = other.wait_ready()
        body = {
            "model": HTTP.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": PROBE,
            "max_tokens": 4,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": cluster.bootstrap_port,
            "bootstrap_room": 777,
        }
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 501
        message = answer.json()["error"]["message"]
        assert all(value in message for value in values), message
        # A router sees it before any request.
        theirs, ours = (HTTP.get(f"{each}/ready").json()["hand_over"] for each in (url, cluster.urls["prefill"]))
        assert any(value in str(theirs[name]) and theirs[name] != ours[name] for name in theirs for value in values[1:])
    finally:
        other.stop()
