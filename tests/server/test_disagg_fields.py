"""Bootstrap fields of request bodies on prefill and decode servers: what reaches the engine, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from disagg.bootstrap import FAKE_BOOTSTRAP_HOST
from scheduler.messages import Bootstrap, GenerateRequest
from tests.server.conftest import ENGINE, MODEL, Served, serve
from tests.server.fake_rank import CONTEXT_LENGTH, EOS
from tests.server_process import wait_until

HOST = {"bootstrap_host": "10.1.2.3", "bootstrap_port": 9001}
COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
}
HUGE = 2**63 - 1


def role(mode: str, backend: str = "tcp", **settings: Any) -> Any:
    return serve(
        engine=msgspec.structs.replace(ENGINE, disaggregation_mode=mode, disaggregation_transfer_backend=backend),
        disaggregation_bootstrap_port=7777,
        **settings,
    )


@pytest.fixture(scope="module")
def decode() -> Iterator[Served]:
    with role("decode") as running:
        yield running


@pytest.fixture(scope="module")
def prefill() -> Iterator[Served]:
    with role("prefill") as running:
        yield running


def sent(served: Served, path: str, body: dict[str, Any]) -> list[GenerateRequest]:
    """What the rank is sent for a body that must succeed."""
    assert served.rank is not None
    served.rank.received.clear()
    response = served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return [message for message in served.rank.received if isinstance(message, GenerateRequest)]


def bootstraps(served: Served, path: str, body: dict[str, Any]) -> list[Bootstrap | None]:
    return [message.bootstrap for message in sent(served, path, body)]


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_scalars_reach_the_engine(decode: Served, path: str, body: dict[str, Any]) -> None:
    assert bootstraps(decode, path, body | HOST | {"bootstrap_room": HUGE}) == [Bootstrap("10.1.2.3", 9001, HUGE)]


def test_port_null_is_the_servers_own(decode: Served) -> None:
    fields = {"bootstrap_host": "[fd00::1]", "bootstrap_port": None, "bootstrap_room": 5}
    assert bootstraps(decode, "/v1/completions", COMPLETION | fields) == [Bootstrap("fd00::1", 7777, 5)]


def test_lists_have_an_entry_a_sample_prompt_by_prompt(decode: Served) -> None:
    """As the routers of other projects send them: prompt 0 sample 0, prompt 0 sample 1, prompt 1 sample 0, ..."""
    body = COMPLETION | {"prompt": ["ab", "c"], "n": 2} | HOST | {"bootstrap_room": [11, 12, 13, 14]}
    messages = sent(decode, "/v1/completions", body)
    found = [(bytes(message.input_ids).decode(), message.bootstrap.room) for message in messages if message.bootstrap]
    assert found == [("ab", 11), ("ab", 12), ("c", 13), ("c", 14)]
    seeds = {message.sampling.seed for message in messages[:2]}
    assert len(seeds) == 2
    fields = {"bootstrap_host": ["a", "b"], "bootstrap_port": [1, None], "bootstrap_room": [21, 22]}
    body = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 1}} | fields
    assert bootstraps(decode, "/generate", body) == [Bootstrap("a", 1, 21), Bootstrap("b", 7777, 22)]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    "room", [None, 0, -1, 2**63, 2**64, 10**400, 1.5, True, "7", {}, [], [1, 2], [[1]], "x" * 10_000]
)
def test_wrong_rooms_are_named(request: pytest.FixtureRequest, mode: str, room: Any) -> None:
    """Statement 25: a request without a room is a 400; so is every room that could not be one."""
    served: Served = request.getfixturevalue(mode)
    error = served.error("/v1/completions", COMPLETION | HOST | {"bootstrap_room": room})
    assert error["param"] == "bootstrap_room"
    assert error["message"].startswith("bootstrap_room ")
    assert len(error["message"]) < 200
    assert served.error("/v1/completions", COMPLETION | HOST)["param"] == "bootstrap_room"


def test_a_room_twice_in_one_body(decode: Served) -> None:
    body = COMPLETION | HOST | {"n": 3, "bootstrap_room": [5, 6, 5]}
    assert "has 5 twice" in decode.error("/v1/completions", body)["message"]


def test_samples_of_one_entry_get_rooms_made_of_it(decode: Served, prefill: Served) -> None:
    """Routers of other projects count prompts, not samples: both sides have to make the same rooms."""

    def rooms(served: Served, path: str, body: dict[str, Any]) -> list[int]:
        return [entry.room for entry in bootstraps(served, path, body | HOST) if entry is not None]

    native = {"text": "abc", "sampling_params": {"max_new_tokens": 1, "n": 3}, "bootstrap_room": HUGE}
    found = rooms(decode, "/generate", native)
    assert found == rooms(prefill, "/generate", native)
    assert found[0] == HUGE and len(set(found)) == 3 and all(1 <= room <= HUGE for room in found)
    several = COMPLETION | {"prompt": ["ab", "c"], "n": 2, "bootstrap_room": [5, 6]}
    found = rooms(decode, "/v1/completions", several)
    assert found == rooms(prefill, "/v1/completions", several)
    assert (found[0], found[2]) == (5, 6) and len(set(found)) == 4


WRONG_ADDRESSES: list[tuple[dict[str, Any], str]] = [
    ({"bootstrap_host": ""}, "bootstrap_host"),
    ({"bootstrap_host": 7}, "bootstrap_host"),
    ({"bootstrap_host": "a\nb"}, "bootstrap_host"),
    ({"bootstrap_host": "h" * 64}, "bootstrap_host"),
    ({"bootstrap_host": ".".join(["h" * 60] * 5)}, "bootstrap_host"),
    ({"bootstrap_host": "a..b"}, "bootstrap_host"),
    ({"bootstrap_host": "a b"}, "bootstrap_host"),
    ({"bootstrap_host": "a/b"}, "bootstrap_host"),
    ({"bootstrap_host": "user@a"}, "bootstrap_host"),
    ({"bootstrap_host": "http://a"}, "bootstrap_host"),
    ({"bootstrap_host": "10.1.2.3:9001"}, "bootstrap_host"),
    ({"bootstrap_host": "10.1.2.256"}, "bootstrap_host"),
    ({"bootstrap_host": "fd00::1::2"}, "bootstrap_host"),
    ({"bootstrap_host": "[fd00::1"}, "bootstrap_host"),
    ({"bootstrap_host": "[]"}, "bootstrap_host"),
    ({"bootstrap_host": "\u3002\u3002"}, "bootstrap_host"),
    ({"bootstrap_host": True}, "bootstrap_host"),
    ({"bootstrap_host": {"a": 1}}, "bootstrap_host"),
    ({"bootstrap_host": []}, "bootstrap_host"),
    ({"bootstrap_host": [["a"]]}, "bootstrap_host"),
    ({"bootstrap_host": ["a", "b"]}, "bootstrap_host"),
    ({"bootstrap_port": 0}, "bootstrap_port"),
    ({"bootstrap_port": 65536}, "bootstrap_port"),
    ({"bootstrap_port": "9001"}, "bootstrap_port"),
    ({"bootstrap_port": True}, "bootstrap_port"),
    ({"bootstrap_port": -1}, "bootstrap_port"),
    ({"bootstrap_port": 9001.5}, "bootstrap_port"),
    ({"bootstrap_port": 10**300}, "bootstrap_port"),
    ({"bootstrap_port": {}}, "bootstrap_port"),
    ({"bootstrap_port": []}, "bootstrap_port"),
    ({"bootstrap_port": ["9001"]}, "bootstrap_port"),
    ({"bootstrap_port": [9001, 9002]}, "bootstrap_port"),
]


@pytest.mark.parametrize(
    ("mode", "fields", "param"),
    [
        # A prefill server needs no address of its own.
        ("decode", {"bootstrap_host": None}, "bootstrap_host"),
        *((mode, *wrong) for mode in ("prefill", "decode") for wrong in WRONG_ADDRESSES),
    ],
)
def test_wrong_addresses_are_named(
    request: pytest.FixtureRequest, mode: str, fields: dict[str, Any], param: str
) -> None:
    served: Served = request.getfixturevalue(mode)
    for path, body in BODIES.items():
        data = json.dumps(body | HOST | {"bootstrap_room": 1} | fields).encode()
        error = served.error(path, data)
        assert error["param"] == param
        assert error["message"].startswith(f"{param} ")
        value = fields[param]
        if not isinstance(value, list) and value is not None:
            assert repr(value)[:40] in error["message"]


def test_a_wrong_entry_of_a_list_is_shown(decode: Served, prefill: Served) -> None:
    batch = COMPLETION | {"prompt": ["ab", "c"], "n": 2}
    good: dict[str, list[Any]] = {
        "bootstrap_host": ["a", "b", "c", "d"],
        "bootstrap_port": [1, None, 3, 4],
        "bootstrap_room": [1, 2, 3, 4],
    }
    for served in (decode, prefill):
        assert len(bootstraps(served, "/v1/completions", batch | good)) == 4
        for field, entry in (("bootstrap_host", "c..d"), ("bootstrap_port", 0), ("bootstrap_room", -7)):
            wrong = good[field][:2] + [entry] + good[field][3:]
            error = served.error("/v1/completions", batch | good | {field: wrong})
            assert error["param"] == field
            assert repr(entry) in error["message"]
        for field in good:
            error = served.error("/v1/completions", batch | good | {field: good[field][:3]})
            assert error["message"] == f"{field} has 3 entries for 4 samples of 2 prompts"


@pytest.mark.parametrize(
    "host",
    [
        "prefill-0.example.org",
        "under_score",
        "a.",
        "127.0.0.1",
        "127.1",
        "fd00::1",
        "fe80::1%eth0",
        "b\u00fccher.example",
    ],
)
def test_hosts_in_every_form_reach_the_engine(decode: Served, host: str) -> None:
    fields = {"bootstrap_host": host, "bootstrap_port": 1, "bootstrap_room": 5}
    assert bootstraps(decode, "/v1/completions", COMPLETION | fields) == [Bootstrap(host, 1, 5)]


@pytest.mark.parametrize("stream", [True, False])
def test_refusals_are_a_status_in_a_stream_too(decode: Served, stream: bool) -> None:
    assert decode.error("/v1/completions", COMPLETION | HOST | {"stream": stream})["param"] == "bootstrap_room"


def test_a_server_that_does_both_halves_ignores_them(served: Served) -> None:
    fields = {"bootstrap_host": 1, "bootstrap_port": "x", "bootstrap_room": [-1, 2**80]}
    assert bootstraps(served, "/v1/completions", COMPLETION | fields) == [None]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_fake_backend_draws_its_rooms(mode: str) -> None:
    with role(mode, "fake") as served:
        found = bootstraps(served, "/v1/completions", COMPLETION | {"n": 8})
        rooms = [entry.room for entry in found if entry is not None]
        assert len(set(rooms)) == 8
        assert all(1 <= room <= HUGE for room in rooms)
        assert bootstraps(served, "/v1/completions", COMPLETION | {"bootstrap_room": 9}) == [Bootstrap("", 7777, 9)]
        assert served.error("/v1/completions", COMPLETION | {"bootstrap_room": -9})["param"] == "bootstrap_room"
        info = served.http.get("/server_info").json()
        assert (info["disaggregation_mode"], info["outputs_are_meaningful"]) == (mode, False)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_health_probes_take_the_fake_path(request: pytest.FixtureRequest, mode: str) -> None:
    """Statement 17."""
    served: Served = request.getfixturevalue(mode)
    assert served.rank is not None
    served.rank.received.clear()
    assert served.http.get("/health_generate").status_code == 200
    (message,) = [message for message in served.rank.received if isinstance(message, GenerateRequest)]
    assert message.bootstrap is not None
    assert (message.bootstrap.host, message.sampling.max_new_tokens) == (FAKE_BOOTSTRAP_HOST, 1)
    assert 1 <= message.bootstrap.room <= HUGE
    fields = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
    (given,) = bootstraps(served, "/v1/completions", COMPLETION | fields)
    assert given is not None
    assert (given.host, given.room > 0) == (FAKE_BOOTSTRAP_HOST, True)


def test_a_server_that_waits_for_its_peers_is_healthy() -> None:
    """Statement 24: requests of others may hold all memory, so that the probe cannot run."""
    with role("prefill", health_timeout=0.5) as served:
        served.rank.hold.set()
        assert served.http.get("/health_generate").status_code == 503
        served.rank.queues = {"sending_requests": 1}
        served.http.get("/health_generate")  # the rank reports when the probe is given up
        wait_until(lambda: served.client.loads[0].sending_requests == 1)
        wait_until(lambda: served.http.get("/health_generate").status_code == 200)
        served.rank.mute.set()
        assert served.http.get("/health_generate").status_code == 503


def test_stop_strings_are_for_the_decode_side(prefill: Served, decode: Served) -> None:
    """A prefill server's answer is one token; ending it at a stop string would cut its transfer."""
    body = COMPLETION | HOST | {"stop": "a", "max_tokens": 1, "bootstrap_room": 3}
    answers = [served.http.post("/v1/completions", json=body).json()["choices"][0] for served in (prefill, decode)]
    assert [(answer["text"], answer["finish_reason"]) for answer in answers] == [("a", "length"), ("", "stop")]
    assert prefill.rank is not None
    assert prefill.rank.aborted == []


def test_prefill_needs_room_for_one_token_only(prefill: Served, decode: Served) -> None:
    fields = HOST | {"bootstrap_room": 4}
    native = {"input_ids": [EOS], "sampling_params": {"max_new_tokens": 10**15}}
    (message,) = sent(prefill, "/generate", native | fields)
    assert message.sampling.max_new_tokens == 2**31 - 1
    assert decode.error("/generate", native | fields)["code"] == "context_length_exceeded"
    too_long = COMPLETION | fields | {"prompt": "a" * CONTEXT_LENGTH}
    assert prefill.error("/v1/completions", too_long)["code"] == "context_length_exceeded"


def test_queues_are_metrics_of_their_role(prefill: Served, decode: Served, served: Served) -> None:
    texts = [running.http.get("/metrics").text for running in (prefill, decode, served)]
    for name, present in {
        "lockstep_bootstrapping_requests": (True, False, False),
        "lockstep_sending_requests": (True, False, False),
        "lockstep_connecting_requests": (False, True, False),
        "lockstep_receiving_requests": (False, True, False),
        "lockstep_transfer_rooms": (True, True, False),
        "lockstep_transfers_total": (True, True, False),
        "lockstep_transfer_failures_total": (True, True, False),
        "lockstep_transferred_tokens_total": (True, True, False),
        "lockstep_transfer_seconds_total": (True, True, False),
        "lockstep_running_requests": (True, True, True),
    }.items():
        assert tuple(f'{name}{{rank="0"}}' in text for text in texts) == present, name
    (load,) = decode.http.get("/get_load").json()
    assert load["num_receiving_requests"] == 0
