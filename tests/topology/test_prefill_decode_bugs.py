"""Requests and starts that have broken other prefill/decode deployments, with real servers and our router.

After every test: nothing left on either side, the same processes alive, a probe right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server_process import wait_until
from tests.topology.cluster import HTTP, MODEL, Call, Cluster

pytestmark = pytest.mark.timeout(400)
PROBE = "Once upon a time"
POOL = 4096
DECODE_CONTEXT = 1024
SLACK = 30.0  # two cores, other tests: time to notice what is noticed at once, and half of what others may take
PROBES = ("/ready", "/health", "/health_generate")


class Started(Cluster):
    """alone: what the decode server's probes said before there was a prefill server. text: of the probe."""

    alone: dict[str, int]
    text: str


@pytest.fixture(scope="module")
def shared() -> Iterator[Started]:
    cluster = Started(
        prefill_args=("--chunked-prefill-size=64",),
        decode_args=(f"--context-length={DECODE_CONTEXT}",),
    )
    try:
        cluster.start("decode")
        cluster.alone = {path: HTTP.get(cluster.urls["decode"] + path).status_code for path in PROBES}
        cluster.start("prefill", "router")
        first = Call(cluster.url, PROBE).wait()
        assert first.error is None
        cluster.text = first.text
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(shared: Started) -> Iterator[Started]:
    with shared.kept_whole(PROBE, shared.text):
        yield shared


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=length)


def complete(cluster: Cluster, prompt: list[int], headers: dict[str, str], **fields: object) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    answer = HTTP.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def half(cluster: Cluster, name: str, prompt: list[int], room: int) -> Call:
    """To one server alone, as if the other half had been lost on the way."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": cluster.bootstrap_port, "bootstrap_room": room}
    return Call(cluster.urls[name], prompt, **where)


def test_decode_needs_no_prefill_server_to_be_ready(cluster: Started) -> None:
    assert cluster.alone == dict.fromkeys(PROBES, 200)


def test_requests_without_an_id_or_with_the_same_one_keep_apart(cluster: Started) -> None:
    prompts = [prompt_of(seed, 8 + seed) for seed in range(20)]
    same = {"x-request-id": "the same", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    want = [complete(cluster, prompt, {}) for prompt in prompts]
    assert len(set(want)) > 10
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: complete(cluster, prompt, {}), prompts)) == want
        assert list(pool.map(lambda prompt: complete(cluster, prompt, same, user="me"), prompts)) == want


def test_clients_gone_between_the_two_halves_hold_no_memory(cluster: Started) -> None:
    """Three times the pool of prompts whose decode half has never come, then ordinary work."""
    for number in range(3 * POOL // 1000 + 1):
        call = half(cluster, "prefill", prompt_of(number, 1000), 1000 + number)
        call._thread.join(0.02)
        call.leave()
    after = Call(cluster.url, prompt_of(99, 500)).wait()
    assert after.error is None
    assert after.seconds < SLACK


def test_what_decode_refuses_is_the_answer_and_frees_prefill(cluster: Started) -> None:
    """Prefill alone would take the prompt."""
    call = Call(cluster.url, prompt_of(1, DECODE_CONTEXT + 200)).wait()
    assert call.status == 400
    assert str(DECODE_CONTEXT) in (call.error or "")
    assert call.seconds < SLACK
    cluster.wait_drained("prefill", timeout=SLACK)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_probes_are_answered_while_requests_only_wait_for_the_other_side(cluster: Started, name: str) -> None:
    first_room = {"prefill": 2000, "decode": 3000}[name]
    calls = [half(cluster, name, prompt_of(number, 50), first_room + number) for number in range(5)]
    try:
        queue = {"prefill": "bootstrapping", "decode": "receiving"}[name]
        wait_until(lambda: cluster.count(name, queue) == len(calls), SLACK, f"they are all {queue}")
        for path in PROBES:
            answer = HTTP.get(cluster.urls[name] + path)
            assert answer.status_code == 200, path
            assert answer.elapsed.total_seconds() < SLACK
    finally:
        for call in calls:
            call.leave()


def test_aborts_of_unknown_requests_change_nothing(cluster: Started) -> None:
    call = Call(cluster.url, PROBE, max_tokens=200)
    assert call.started.wait(60)
    for url in (cluster.url, cluster.urls["prefill"], cluster.urls["decode"]):
        for _ in range(2):
            answer = HTTP.post(f"{url}/abort_request", json={"rid": "nobody"})
            assert answer.status_code == 200, answer.text
    assert call.wait().error is None


def test_answers_stay_the_same_over_many_requests(cluster: Started) -> None:
    """Canaries among mixed traffic, with prompts that share prefixes and clients that leave."""
    canaries = [prompt_of(1000 + seed, 20 * seed + 7) for seed in range(5)]
    want = [complete(cluster, prompt, {}) for prompt in canaries]
    rng = random.Random(7)
    for turn in range(4):
        calls = [
            Call(cluster.url, prompt_of(rng.randrange(6), rng.randrange(1, 300)), max_tokens=rng.randrange(1, 20))
            for _ in range(16)
        ]
        for call in calls[::5]:
            call._thread.join(rng.random() * 0.1)
            call.leave()
        assert [complete(cluster, prompt, {}) for prompt in canaries] == want, turn
        for number, call in enumerate(calls):
            if number % 5:
                assert call.wait().error is None
