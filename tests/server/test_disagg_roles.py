"""A prefill and a decode server started by themselves, asked as a router asks them: one body to both at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from disagg.bootstrap_client import FAKE_BOOTSTRAP_HOST
from tests.server_process import ServerProcess, wait_until

pytestmark = pytest.mark.timeout(240)

MODEL = "tiny-qwen3-moe"
TINY = ("--model-path", MODEL, "--device", "cpu", "--num-threads", "1", "--max-total-tokens", "4096")
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
rooms = itertools.count(1000)


class Pair:
    """bootstrap_port is known to the decode server as its own, so that bodies need not name it.

    patience: seconds for --disaggregation-bootstrap-timeout and --disaggregation-waiting-timeout.
    """

    def __init__(self, patience: float = 40) -> None:
        self.patience = patience
        self.servers: list[ServerProcess] = []
        try:
            prefill = self.start("prefill", "--disaggregation-bootstrap-port", "0")
            self.prefill = prefill.wait_ready()
            info = httpx.get(f"{self.prefill}/server_info", timeout=60).json()
            self.bootstrap_port = info["disaggregation_bootstrap_port"]
            decode = self.start("decode", "--disaggregation-bootstrap-port", str(self.bootstrap_port))
            self.decode = decode.wait_ready()
        except BaseException:
            self.stop()
            raise

    def start(self, mode: str, *words: str) -> ServerProcess:
        limits = [f"--disaggregation-{name}-timeout={self.patience}" for name in ("bootstrap", "waiting")]
        self.servers.append(ServerProcess(*TINY, *limits, "--disaggregation-mode", mode, *words))
        return self.servers[-1]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def post(self, path: str = "/v1/completions", **fields: Any) -> tuple[httpx.Response, httpx.Response]:
        """The answers of prefill and decode to one body."""
        body = BODY | {"bootstrap_host": "127.0.0.1", "bootstrap_room": next(rooms)} | fields
        with ThreadPoolExecutor(2) as pool:
            urls = (self.prefill + path, self.decode + path)
            first, second = pool.map(lambda url: httpx.post(url, json=body, timeout=60), urls)
        return first, second

    def assert_alive(self) -> None:
        """The same processes answer, and nothing of earlier requests is left."""
        assert all(server.process.poll() is None for server in self.servers)
        answers = self.post()
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        self.wait_idle()

    def wait_idle(self) -> None:
        wait_until(lambda: self.load() == [0, 0], 60, "nothing runs or waits")

    def load(self) -> list[int]:
        counts = []
        for url in (self.prefill, self.decode):
            (load,) = httpx.get(f"{url}/get_load", timeout=60).json()
            counts.append(sum(value for name, value in load.items() if name.startswith("num_")))
        return counts


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.stop()


def test_prefill_answers_one_token_and_decode_the_rest(pair: Pair) -> None:
    """Statement 10."""
    for stream in (False, True):
        prefill, decode = pair.post(stream=stream, stream_options={"include_usage": True} if stream else None)
        assert (prefill.status_code, decode.status_code) == (200, 200)
        if stream:
            assert prefill.text.count('"finish_reason":"length"') == decode.text.count('"finish_reason":"length"') == 1
            assert '"completion_tokens":1,' in prefill.text
            assert '"completion_tokens":8,' in decode.text
            continue
        assert prefill.json()["usage"]["completion_tokens"] == 1
        assert prefill.json()["choices"][0]["finish_reason"] == "length"
        assert decode.json()["usage"]["completion_tokens"] == 8
        assert decode.json()["choices"][0]["text"].startswith(prefill.json()["choices"][0]["text"].rstrip("\ufffd"))


def test_without_a_seed_the_first_token_is_drawn_once_and_the_others_by_decode(pair: Pair) -> None:
    """Each server draws a seed of its own; the client sees the token that prefill has drawn."""
    body = {
        "text": "Once upon a time",
        "sampling_params": {"temperature": 1.5, "max_new_tokens": 8, "ignore_eos": True},
    }
    firsts, others = set(), set()
    for _ in range(6):
        first, whole = (answer.json()["output_ids"] for answer in pair.post("/generate", **body))
        assert (len(first), len(whole)) == (1, 8)
        assert whole[0] == first[0]
        firsts.add(whole[0])
        others.add(tuple(whole[1:]))
    assert len(firsts) > 1
    assert len(others) == 6


def test_one_token_is_decodes_too(pair: Pair) -> None:
    answers = pair.post(max_tokens=1)
    tokens = [answer.json()["choices"][0]["text"] for answer in answers]
    assert tokens[0] == tokens[1]
    assert answers[1].json()["usage"]["completion_tokens"] == 1


def test_prefix_hits_of_the_prefill_server_are_reported_once(pair: Pair) -> None:
    prompt = "cached " * 20
    found = [pair.post(prompt=prompt)[1].json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
    assert cached == [0, len(prompt) // 16 * 16]


def test_a_room_that_is_taken_is_a_400(pair: Pair) -> None:
    """Two requests with one room: the second fails on each side, the first is not disturbed (statement 25)."""
    pair.wait_idle()
    room = next(rooms)
    url = f"{pair.decode}/v1/completions"
    body = BODY | {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
    first: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: first.append(httpx.post(url, json=body, timeout=60)))
    waiting.start()
    wait_until(lambda: pair.load()[1] > 0, 60, "the first request waits for its prefill server")
    second = httpx.post(url, json=body, timeout=60)
    assert second.status_code == 400
    assert str(room) in second.json()["error"]["message"]
    prefill = httpx.post(f"{pair.prefill}/v1/completions", json=body, timeout=60)
    waiting.join(60)
    assert (prefill.status_code, first[0].status_code) == (200, 200)
    pair.assert_alive()


@pytest.mark.parametrize("room", [None, 0, -1, 2**63, 2**64, "x"])
def test_impossible_rooms_leave_both_alive(pair: Pair, room: Any) -> None:
    answers = pair.post(bootstrap_room=room)
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(answer.json()["error"]["param"] == "bootstrap_room" for answer in answers)
    pair.wait_idle()


@pytest.fixture
def hasty() -> Iterator[Pair]:
    found = Pair(patience=4)
    yield found
    found.stop()


@pytest.mark.sweep
def test_the_other_half_does_not_come(hasty: Pair) -> None:
    """Each side gives up after --disaggregation-bootstrap-timeout and says why."""
    cases = [
        (hasty.decode, {"bootstrap_host": "no-such-host.invalid", "bootstrap_port": 1}, "no-such-host.invalid:1"),
        (hasty.decode, {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1}, "127.0.0.1:1"),
        (hasty.prefill, {"bootstrap_host": "127.0.0.1"}, "4 s"),
        (hasty.prefill, {"bootstrap_host": "127.0.0.1", "stream": True}, "4 s"),
    ]
    bodies = [(url, BODY | fields | {"bootstrap_room": next(rooms)}) for url, fields, _ in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = pool.map(lambda case: httpx.post(f"{case[0]}/v1/completions", json=case[1], timeout=60), bodies)
        for answer, (url, _, part) in zip(answers, cases, strict=True):
            assert answer.status_code == 500
            message = answer.json()["error"]["message"]
            assert part in message
            assert ("check bootstrap_host and bootstrap_port" in message) == (url == hasty.decode)
    hasty.assert_alive()


def test_a_prompt_over_the_limit_is_refused_by_both(pair: Pair) -> None:
    answers = pair.post(prompt="x" * 5000)
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(answer.json()["error"]["code"] == "context_length_exceeded" for answer in answers)
    pair.assert_alive()


def test_fake_path_needs_no_peer(pair: Pair) -> None:
    """Statement 17: on either server alone, and nothing is left behind."""
    for url, tokens in ((pair.prefill, 1), (pair.decode, 8)):
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"bootstrap_host": FAKE_BOOTSTRAP_HOST}, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == tokens
        assert httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
    pair.assert_alive()


def test_transfers_are_counted(pair: Pair) -> None:
    def total(url: str, name: str) -> float:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        return float(next(line for line in lines if line.startswith(f'{name}{{rank="0"}}')).split()[-1])

    pair.wait_idle()
    for url in (pair.prefill, pair.decode):
        before = total(url, "lockstep_transfers_total")
        pair.assert_alive()
        wait_until(lambda: total(url, "lockstep_transfers_total") == before + 1, 60, "counted")  # noqa: B023
        assert total(url, "lockstep_transferred_tokens_total") > 0
        assert total(url, "lockstep_transfer_seconds_total") > 0


def test_a_restarted_prefill_server_is_used_again(pair: Pair) -> None:
    """Statement 15, at the same addresses and with no restart of the decode server."""
    port = pair.prefill.rsplit(":", 1)[1]
    pair.servers.pop(0).stop()
    again = pair.start("prefill", "--port", port, "--disaggregation-bootstrap-port", str(pair.bootstrap_port))
    assert again.wait_ready() == pair.prefill
    pair.assert_alive()
