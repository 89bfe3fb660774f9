"""SGLang's `/generate`: forms of requests and answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scheduler.messages import GenerateRequest
from tests.server.conftest import Served, serve
from tests.server.fake_rank import EOS, logprob_of
from tests.server_process import wait_until


@pytest.fixture(scope="module")
def native() -> Iterator[Served]:
    def script(request: GenerateRequest) -> Iterator[int]:
        return iter([*b"xyz", EOS])

    with serve(script=script) as running:
        yield running


def _generate(served: Served, **body: Any) -> Any:
    response = served.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def _stream(served: Served, steps: int, *, prompts: int = 1, **body: Any) -> list[dict[str, Any]]:
    """The events. The rank makes a step when those of the step before have come: what comes late shares an event."""
    rank = served.rank
    assert rank is not None
    request = served.http.build_request("POST", "/generate", json=body | {"stream": True})
    rank.hold.set()
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(served.http.send, request, stream=True)
            wait_until(lambda: rank.num_samples == prompts)
            rank.allow(1)
            response = answer.result(60)
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        found = list(itertools.islice(lines, prompts))
        for _ in range(steps - 1):
            rank.allow(1)
            found += itertools.islice(lines, prompts)
        assert list(lines) == ["[DONE]"]
    finally:
        rank.hold.clear()
    return [json.loads(line) for line in found]


def test_one_prompt(native: Served) -> None:
    answer = _generate(native, text="abc", rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == "xyz"
    assert answer["output_ids"] == [*b"xyz", EOS]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


def test_lengths_and_stops(native: Served) -> None:
    answer = _generate(native, input_ids=[97], sampling_params={"max_new_tokens": 2})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    answer = _generate(native, text="a", sampling_params={"stop": ["y"]})
    assert (answer["text"], answer["output_ids"]) == ("x", [*b"xy"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "y"}
    answer = _generate(native, text="a", sampling_params={"max_new_tokens": 0})
    assert (answer["text"], answer["output_ids"]) == ("", [])


def test_batch_with_settings_of_its_own(native: Served) -> None:
    answers = _generate(
        native,
        text=["a", "bc"],
        rid=["one", "two"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
    )
    assert [answer["text"] for answer in answers] == ["x", "xy"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["one", "two"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


def test_penalties_and_bias_of_each_prompt_reach_the_engine(native: Served) -> None:
    assert native.rank is not None
    native.rank.received.clear()
    given: list[dict[str, Any]] = [
        {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 0.9, "min_new_tokens": 1},
        {"logit_bias": {"97": -100}},
        {},
    ]
    _generate(native, text=["a", "b", "c"], sampling_params=given)
    found = [item.sampling for item in native.rank.received if isinstance(item, GenerateRequest)]
    assert [(s.frequency_penalty, s.presence_penalty, s.repetition_penalty, s.min_new_tokens) for s in found] == [
        (1.0, -1.0, 0.9, 1),
        (0.0, 0.0, 1.0, 0),
        (0.0, 0.0, 1.0, 0),
    ]
    assert [s.logit_bias for s in found] == [(), ((97, -100.0),), ()]


def test_a_batch_of_one_is_a_list(native: Served) -> None:
    assert len(_generate(native, input_ids=[[97]])) == 1
    assert [answer["text"] for answer in _generate(native, text="a", sampling_params={"n": 2})] == ["xyz", "xyz"]


def test_logprobs(native: Served) -> None:
    meta = _generate(
        native,
        text="abc",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 2},
    )["meta_info"]
    assert meta["output_token_logprobs"] == [[logprob_of(120), 120, "x"], [logprob_of(121), 121, "y"]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
    assert meta["output_top_logprobs"][0][0] == [-0.01, 121, "y"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [logprob_of(98), 98, "b"], [logprob_of(99), 99, "c"]]
    assert [None if top is None else len(top) for top in meta["input_top_logprobs"]] == [None, 2, 2]
    meta = _generate(native, text="abc", return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"][-1] == [logprob_of(EOS), EOS, None]


def test_stream_shows_everything_so_far(native: Served) -> None:
    events = _stream(native, 4, text="a", return_logprob=True)
    assert [event["text"] for event in events] == ["x", "xy", "xyz", "xyz"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3, 4]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, None, {"type": "stop", "matched": EOS}]
    assert "index" not in events[0]


def test_stream_of_a_batch_says_which(native: Served) -> None:
    events = _stream(native, 2, prompts=2, text=["a", "b"], sampling_params={"max_new_tokens": 2})
    for index in (0, 1):
        assert [event["text"] for event in events if event["index"] == index] == ["x", "xy"]
