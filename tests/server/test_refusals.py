"""What a client may get wrong: always 400 (or the status that fits) with the field named, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.messages import GenerateRequest
from tests.server.conftest import MODEL, Served, serve
from tests.server.fake_rank import CONTEXT_LENGTH, VOCAB_SIZE

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_NATIVE = "/generate"
_USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def _still_serving(served: Served) -> Iterator[None]:
    yield
    assert served.rank is not None
    served.rank.received.clear()
    assert served.http.get("/health").status_code == 200
    assert not any(isinstance(message, GenerateRequest) for message in served.rank.received)


@pytest.mark.parametrize("path", [_CHAT, _TEXT, _NATIVE, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b'"x"', b"[" * 100_000])
def test_not_an_object(served: Served, path: str, body: bytes) -> None:
    error = served.error(path, body)
    assert error["type"] == "invalid_request_error"


_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 1e308),
    ("temperature", "0.5"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("n", 0),
    ("n", 129),
    ("n", 10**5),
    ("n", True),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", "x"]),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["x"] * 33),
    ("stop", ["x" * 10_000]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1] * 1000),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", "1"),
    ("presence_penalty", -2.01),
    ("presence_penalty", [1]),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e38),
    ("logit_bias", [5]),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"9" * 10_000: 1}),
    ("logit_bias", {f"{i:05}": 1 for i in range(1025)}),
    ("regex", "a+"),
    ("json_schema", "{}"),
]


@pytest.mark.parametrize(("field", "value"), _SAMPLING)
@pytest.mark.parametrize("path", [_CHAT, _TEXT, _NATIVE])
def test_sampling_fields(served: Served, path: str, field: str, value: Any) -> None:
    if path == _NATIVE:
        error = served.error(path, {"text": "hi", "sampling_params": {field: value}})
        assert error["param"].startswith(f"sampling_params.{field}")
    else:
        base: dict[str, Any] = {"messages": [_USER]} if path == _CHAT else {"prompt": "hi"}
        for stream in (False, True):
            error = served.error(path, base | {field: value, "stream": stream})
            assert error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("min_tokens", 2000),
        ("min_tokens", -1),
        ("messages", []),
        ("messages", None),
        ("messages", ["hi"]),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("rid", ""),
        ("rid", "x" * 1000),
        ("rid", 5),
        ("chat_template_kwargs", 5),
        ("continue_final_message", True),
    ],
)
def test_chat_fields(served: Served, field: str, value: Any) -> None:
    error = served.error(_CHAT, {"messages": [_USER], field: value})
    assert error["param"].startswith(field)


@pytest.mark.parametrize("top", [-1, 21, 10**6])
def test_top_logprobs(served: Served, top: int) -> None:
    assert served.error(_CHAT, {"messages": [_USER], "logprobs": True, "top_logprobs": top})["param"] == "top_logprobs"
    body = {"text": "hi", "return_logprob": True, "top_logprobs_num": top}
    assert served.error(_NATIVE, body)["param"] == "top_logprobs_num"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "SYSTEM", "content": "x"}, "messages[1].role"),
        ({"role": "bot", "content": "x"}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{}]}, "messages[1].content[0].type"),
    ],
)
def test_messages(served: Served, message: Any, field: str) -> None:
    assert served.error(_CHAT, {"messages": [_USER, message]})["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [-1]),
        ("prompt", [[1, 2], [VOCAB_SIZE]]),
        ("prompt", [2**63]),
        ("prompt", [2**70]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a"]),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", ["a"] * 100_000),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("logprobs", -1),
        ("logprobs", 6),
        ("logprobs", True),
        ("best_of", 3),
        ("suffix", "x"),
        ("min_tokens", 17),
    ],
)
def test_completion_fields(served: Served, field: str, value: Any) -> None:
    error = served.error(_TEXT, {"prompt": "hi", field: value})
    assert error["param"].startswith(field), error


def test_missing_fields(served: Served) -> None:
    assert served.error(_TEXT, {})["param"] == "prompt"
    assert served.error(_CHAT, {"model": MODEL})["param"] == "messages"
    assert served.error("/tokenize", {})["param"] == "prompt"
    assert served.error("/detokenize", {})["param"] == "tokens"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_numbers_that_are_none(served: Served, field: str, number: str) -> None:
    error = served.error(_TEXT, f'{{"prompt": "hi", "{field}": {number}}}'.encode())
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a\\udc00"}]}]}',
        '{"messages": [{"role": "user", "content": "x"}], "stop": "\\ud83d"}',
        '{"messages": [{"role": "user", "content": "x"}], "user": "\\ud83d\\ud83d"}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_lone_surrogates(served: Served, body: str, stream: bool) -> None:
    text = body[:-1] + f', "stream": {str(stream).lower()}}}'
    assert served.error(_CHAT, text.encode())["code"] == "invalid_json"


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-7])
def test_tiny_temperatures_are_greedy(served: Served, temperature: float) -> None:
    assert served.rank is not None
    served.rank.received.clear()
    served.openai.completions.create(model=MODEL, prompt="a", temperature=temperature, max_tokens=1)
    (request,) = [item for item in served.rank.received if isinstance(item, GenerateRequest)]
    assert request.sampling.temperature == 0


def test_harmless_and_unknown_fields_pass(served: Served) -> None:
    body = {
        "messages": [_USER],
        "max_tokens": 1,
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "stop": None,
        "n": None,
        "top_k": 0,
        "no_such_field": {"x": [1]},
    }
    assert served.http.post(_CHAT, json=body).status_code == 200
    assert served.http.post(_TEXT, json={"prompt": "a", "best_of": 1, "suffix": "", "stop": []}).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "maximum", "numbers", "param"),
    [
        (CONTEXT_LENGTH - 1, 2, ["512", "513", "511", "2"], "max_tokens"),
        (CONTEXT_LENGTH, None, ["512"], "prompt"),
        (CONTEXT_LENGTH, 1, ["512", "513", "1"], "prompt"),
        (CONTEXT_LENGTH + 1, None, ["512", "513"], "prompt"),
        (CONTEXT_LENGTH * 10, 1, ["512", "5120"], "prompt"),
    ],
)
def test_too_long(served: Served, prompt: int, maximum: int | None, numbers: list[str], param: str) -> None:
    for content in ("a" * prompt, [97] * prompt):
        error = served.error(_TEXT, {"prompt": content, "max_tokens": maximum})
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert all(number in error["message"] for number in numbers)


def test_exactly_the_context_fits(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="a" * (CONTEXT_LENGTH - 2), max_tokens=2)
    assert answer.choices[0].text == "aa"


@pytest.mark.parametrize("path", [_CHAT, _TEXT, "/tokenize"])
def test_unknown_model(served: Served, path: str) -> None:
    body = {"model": "other", "messages": [_USER], "prompt": "a", "stream": True}
    error = served.error(path, body, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_unknown_path_and_method(served: Served) -> None:
    assert "/nothing" in served.error("/nothing", {}, 404)["message"]
    assert "POST" in served.error("/health", {}, 405)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [VOCAB_SIZE]}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 2}}, "sampling_params.min_new_"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 600}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": ["a"] * 1000, "sampling_params": {"n": 100}}, "text"),
    ],
)
def test_native_fields(served: Served, body: Any, param: str) -> None:
    assert served.error(_NATIVE, body)["param"].startswith(param)


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_body(chunked: bool) -> None:
    with serve(max_request_bytes=1000) as served:
        data = b'{"prompt": "' + b"a" * 1000 + b'"}'
        content: Any = iter([data[:500], data[500:]]) if chunked else data
        response = served.http.post(_TEXT, content=content)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert served.http.get("/health").status_code == 200
