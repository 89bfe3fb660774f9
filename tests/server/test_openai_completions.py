from __future__ import annotations

from tests.server.conftest import MODEL, Served


def test_text_completion(served: Served) -> None:
    answer = served.openai.completions.create(model=MODEL, prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


def test_stream_equals_whole(served: Served) -> None:
    chunks = list(served.openai.completions.create(model=MODEL, prompt="héé", max_tokens=7, stream=True))
    whole = served.openai.completions.create(model=MODEL, prompt="héé", max_tokens=7)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "hééh�"
