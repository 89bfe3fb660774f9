"""Text completions as OpenAI's client sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.messages import GenerateRequest
from tests.server.conftest import MODEL, Served, serve
from tests.server.fake_rank import EOS, logprob_of

_TEXT = "The naïve 😀 fox"


@pytest.fixture(scope="module")
def emoji() -> Iterator[Served]:
    def script(request: GenerateRequest) -> Iterator[int]:
        return iter([*_TEXT.encode(), EOS])

    with serve(script=script) as running:
        yield running


def test_text(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="abc", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "xyz"], ["ab", "xy"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [120]], ["ab", "xx"]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms(served: Served, prompt: Any, texts: list[str], n: int, stream: bool) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=n, stream=stream)
    expected = [text for text in texts for _ in range(n)]
    if not stream:
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert [choice.text for choice in answer.choices] == expected

        return
    found = [""] * len(expected)
    for chunk in answer:
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == expected


def test_a_prompt_counts_once_whatever_n(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt=["ab", "xyz"], max_tokens=2, n=3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)


@pytest.mark.parametrize("limit", range(1, len(_TEXT.encode()) + 1))
def test_every_cut_of_a_text_with_an_emoji(emoji: Served, limit: int) -> None:
    whole = emoji.openai.completions.create(model=MODEL, prompt="x", max_tokens=limit, logprobs=0)
    chunks = list(emoji.openai.completions.create(model=MODEL, prompt="x", max_tokens=limit, stream=True))
    text = whole.choices[0].text
    assert text == _TEXT.encode()[:limit].decode(errors="replace")
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert all("�" not in chunk.choices[0].text for chunk in chunks[:-2])


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["fox"], "The naïve 😀 "),
        ("😀", "The naïve "),
        (["ïve 😀 f", "zzz"], "The na"),
        (["The naïve 😀 foxes"], _TEXT),
        (["T"], ""),
        (["e na", "e"], "Th"),
        (["he nax", "naïve"], "The "),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(emoji: Served, stop: Any, text: str, include: bool) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    options: dict[str, Any] = {"model": MODEL, "prompt": "The x", "max_tokens": 50, "stop": stop, "logprobs": 0}
    options["extra_body"] = {"include_stop_str_in_output": include}
    whole = emoji.openai.completions.create(**options)
    chunks = list(emoji.openai.completions.create(**options, stream=True))
    shown = whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == shown
    matched = min((item for item in stops if _TEXT.startswith(text + item)), key=len, default="")
    assert shown == (text + matched if include else text)
    assert whole.choices[0].finish_reason == "stop"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert whole.usage is not None
    # The end token counts where it ended the text; a stop string counts up to the token that completed it.
    tokens = len((text + matched).encode()) + (not matched)
    assert whole.usage.completion_tokens == tokens
    assert len(whole.choices[0].logprobs.tokens) == len((text + matched).encode())
    assert whole.choices[0].model_extra == {"matched_stop": matched or EOS}


def test_a_stop_string_in_the_prompt_does_not_stop(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="abc", max_tokens=2, echo=True, stop="c")
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"


def test_stop_strings_count_after_min_tokens(served: Served) -> None:
    answer = served.openai.completions.create(
        model=MODEL, prompt="abc", max_tokens=9, stop="b", extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].text == "abca"


def test_stop_token_ids(served: Served) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 9}
    answer = served.openai.completions.create(**options, extra_body={"stop_token_ids": [99]})
    assert answer.choices[0].text == "ab"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    answer = served.openai.completions.create(**options, extra_body={"stop_token_ids": [99], "no_stop_trim": True})
    assert answer.choices[0].text == "abc"


@pytest.mark.parametrize("prompt", ["\n\nab😀", [10, 98, 0xF0, 0x9F, 0x98, 0x80], [256, 97, 300]])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_lie_over_the_text(served: Served, prompt: Any, echo: bool, top: int) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "echo": echo, "logprobs": top}
    choice = served.openai.completions.create(**options).choices[0]
    found = choice.logprobs
    assert found is not None
    lists = (found.tokens, found.text_offset, found.token_logprobs, found.top_logprobs)
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    expected = (ids if echo else []) + list(itertools.islice(itertools.cycle(ids), 4))
    assert [len(item) for item in lists] == [len(expected)] * 4
    text = choice.text
    for token, start, end in zip(found.tokens, found.text_offset, [*found.text_offset[1:], len(text)], strict=True):
        assert token.startswith("bytes:") or text[start:end] == token
    first = [None] if echo else []
    assert found.token_logprobs == [*first, *(logprob_of(token) for token in expected[len(first) :])]
    for index, (token, alternatives) in enumerate(zip(found.tokens, found.top_logprobs, strict=True)):
        if echo and index == 0:
            assert alternatives is None
        else:
            assert alternatives[token] == found.token_logprobs[index]
            assert len(alternatives) <= top + 1
    chunks = [chunk.choices[0] for chunk in served.openai.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == text
    for name, whole in zip(("tokens", "text_offset", "token_logprobs", "top_logprobs"), lists, strict=True):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs is not None]
        assert list(itertools.chain(*parts)) == whole


def test_scoring_a_prompt(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abc"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, logprob_of(98), logprob_of(99)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_default_length_and_room(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="abc")
    assert len(answer.choices[0].text) == 16
    answer = served.openai.completions.create(model=MODEL, prompt="a" * 511)
    assert answer.choices[0].text == "a"
    assert answer.choices[0].finish_reason == "length"


def test_request_id_is_the_answers_id(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body={"rid": "mine"})
    assert answer.id == "mine"
