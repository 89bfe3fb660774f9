"""Chat completions as OpenAI's client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.messages import GenerateRequest
from tests.server.conftest import MODEL, Served, serve
from tests.server.fake_rank import EOS, logprob_of

_MESSAGES: Any = [{"role": "user", "content": "hi"}]
_ANSWER = "Hé 😀!"


@pytest.fixture(scope="module")
def chat() -> Iterator[Served]:
    """Says the same whatever it is asked."""

    def script(request: GenerateRequest) -> Iterator[int]:
        return iter([*_ANSWER.encode(), EOS])

    with serve(script=script) as running:
        yield running


def _events(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    response = served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_answer(chat: Served) -> None:
    answer = chat.openai.chat.completions.create(model=MODEL, messages=_MESSAGES)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", _ANSWER)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user: hi\nassistant: ")
    assert answer.usage.completion_tokens == len(_ANSWER.encode()) + 1


def test_stream(chat: Served) -> None:
    chunks = list(chat.openai.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == _ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [(None, False), ({}, False), ({"include_usage": False}, False)] + [({"include_usage": True}, True)],
)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_chunk(chat: Served, path: str, options: Any, asked: bool, n: int) -> None:
    body = {"model": MODEL, "stream": True, "n": n, "max_tokens": 3}
    body |= {"messages": _MESSAGES} if "chat" in path else {"prompt": "hi"}
    if options is not None:
        body["stream_options"] = options
    events = _events(chat, body, path)
    with_usage = [event for event in events if event.get("usage") is not None]
    assert len(with_usage) == asked
    if asked:
        assert events[-1] is with_usage[0]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 3 * n
        assert all(event["usage"] is None for event in events[:-1])
    assert all("choices" in event for event in events)


def test_continuous_usage(chat: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = _events(chat, {"messages": _MESSAGES, "stream": True, "stream_options": options, "max_tokens": 2})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 2


def test_several_choices_in_a_stream() -> None:
    def script(request: GenerateRequest) -> Iterator[int]:
        # Samples of different lengths; one runs into the stop string.
        return iter([*(b"ab" * (request.sampling.seed % 3)), *b"xSTOPy"])

    with serve(script=script) as served:
        body = {"messages": _MESSAGES, "stream": True, "n": 5, "seed": 11, "stop": "STOP", "max_tokens": 6}
        events = _events(served, body)
        whole = served.http.post("/v1/chat/completions", json=body | {"stream": False}).json()
        texts, reasons, roles = [""] * 5, [[] for _ in range(5)], [0] * 5
        for event in events:
            (choice,) = event["choices"]
            assert "finish_reason" in choice
            index = choice["index"]
            assert not reasons[index], "nothing comes after the finish reason"
            texts[index] += choice["delta"].get("content", "")
            roles[index] += "role" in choice["delta"]
            if choice["finish_reason"] is not None:
                reasons[index].append(choice["finish_reason"])
        assert roles == [1] * 5
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]
        assert reasons == [[choice["finish_reason"]] for choice in whole["choices"]]
        assert {"stop", "length"} == {reason for (reason,) in reasons}
        assert set(texts) == {"x", "abxSTO", "ababxS"}


def test_seeds(chat: Served) -> None:
    def seeds(**options: Any) -> list[int]:
        assert chat.rank is not None
        chat.rank.received.clear()
        chat.openai.chat.completions.create(model=MODEL, messages=_MESSAGES, max_tokens=1, **options)
        return [item.sampling.seed for item in chat.rank.received if isinstance(item, GenerateRequest)]

    four = seeds(seed=5, n=4)
    assert four == seeds(seed=5, n=4)
    assert len(set(four)) == 4
    assert four[:1] == seeds(seed=5) == [5]
    assert seeds(seed=-1) == [2**63 - 1]
    assert seeds() != seeds()
    assert len(set(seeds(n=4))) == 4


@pytest.mark.parametrize("top", [None, 0, 5, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(chat: Served, top: int | None, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    answer = chat.openai.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=stream, **options)
    if stream:
        found = [item.choices[0].logprobs for item in answer]
        content = [entry for item in found if item is not None for entry in item.content]
    else:
        content = answer.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes) == _ANSWER.encode()
    assert [entry.logprob for entry in content] == [logprob_of(byte) for byte in _ANSWER.encode()]
    assert [len(entry.top_logprobs) for entry in content] == [top or 0] * len(content)


def test_content_parts_and_roles(chat: Served) -> None:
    assert chat.rank is not None
    chat.rank.received.clear()
    messages: Any = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": ""},
    ]
    chat.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    (request,) = [item for item in chat.rank.received if isinstance(item, GenerateRequest)]
    assert bytes(request.input_ids).decode() == "system: rules\nuser: one\ntwo\nuser: \nassistant: "


def test_continue_final_message(chat: Served) -> None:
    assert chat.rank is not None
    chat.rank.received.clear()
    messages: Any = [*_MESSAGES, {"role": "assistant", "content": "Well, "}]
    extra = {"continue_final_message": True, "chat_template_kwargs": {"anything": 1}}
    chat.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=extra)
    (request,) = [item for item in chat.rank.received if isinstance(item, GenerateRequest)]
    assert bytes(request.input_ids).decode() == "user: hi\nassistant: Well, "


def test_penalties_and_bias_reach_the_engine(chat: Served) -> None:
    assert chat.rank is not None
    options: Any = {
        "frequency_penalty": -2,
        "presence_penalty": 0.5,
        "logit_bias": {"65": 100, "007": -1.5, "319": 0},
        "extra_body": {"repetition_penalty": 1.25, "min_tokens": 2},
    }
    for extra in ({"n": 2}, {"stream": True}):
        chat.rank.received.clear()
        answer: Any = chat.openai.chat.completions.create(
            model=MODEL, messages=_MESSAGES, max_tokens=3, **options, **extra
        )
        if "stream" in extra:
            list(answer)
        requests = [item for item in chat.rank.received if isinstance(item, GenerateRequest)]
        assert len(requests) == extra.get("n", 1)
        for request in requests:
            sampling = request.sampling
            assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2.0, 0.5)
            assert (sampling.repetition_penalty, sampling.min_new_tokens) == (1.25, 2)
            assert sampling.logit_bias == ((65, 100.0), (7, -1.5), (319, 0.0))


def test_without_a_limit_the_answer_may_fill_the_context(served: Served) -> None:
    answer = served.openai.chat.completions.create(model=MODEL, messages=_MESSAGES)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_newer_limit_wins(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=MODEL, messages=_MESSAGES, max_tokens=3, max_completion_tokens=2
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_stream_interval_gathers_tokens() -> None:
    with serve(stream_interval=4) as served:
        body = {"model": MODEL, "prompt": "abcdefghij", "max_tokens": 10, "stream": True}
        texts = [event["choices"][0]["text"] for event in _events(served, body, "/v1/completions")]
        assert "".join(texts) == "abcdefghij"
        # The first at once, and then at least four; the last has what is left.
        assert texts[-1] == "" and len(texts) <= 5
        assert all(len(text) >= 4 for text in texts[1:-2])


def test_a_pair_of_surrogates_is_one_character(served: Served) -> None:
    body = b'{"prompt": "\\ud83d\\ude00\\u0000\\uffff", "max_tokens": 8}'
    answer = served.http.post("/v1/completions", content=body).json()
    assert answer["choices"][0]["text"] == "😀\0\uffff"
