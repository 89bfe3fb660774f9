"""Answers of OpenAI's endpoints: whole bodies, and the events of streams.

The parts of an event that do not change are encoded once a stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from server.detokenizer import Detokenizer
from server.generation import Choice, Run, TokenEntry, finite
from server.openai_protocol import CompletionLogprobs, StreamOptions, TokenLogprob, TopLogprob
from server.service import Sample
from server.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


# Chat completions


def chat_body(run: Run, model: str, tokenizer: Tokenizer, sample: Sample) -> bytes:
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.take_text(), "refusal": None},
            "logprobs": _chat_logprobs(choice.take_entries(), tokenizer, sample.top_logprobs)
            if sample.logprobs
            else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched,
        }
        for choice in run.choices
    ]
    return _encode(_head(run, "chat.completion", model) | {"choices": choices, "usage": run.usage()})


def _chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        if entry.ends_text:
            continue
        alternatives = []
        for token_id, logprob in entry.top[:top]:
            data = tokenizer.token_bytes(token_id)
            alternatives.append(TopLogprob(data.decode("utf-8", "replace"), finite(logprob) or 0.0, list(data)))
        text = entry.data.decode("utf-8", "replace")
        content.append(TokenLogprob(text, entry.logprob or 0.0, list(entry.data), alternatives))
    return {"content": content, "refusal": None}


class _Writer:
    """What both kinds of stream share: heads, usage."""

    def __init__(self, run: Run, kind: str, model: str, options: StreamOptions | None) -> None:
        self._run = run
        self._with_usage = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)
        head = _encode(_head(run, kind, model))
        self._open = b"data: " + head[:-1]
        self._begin_choice = [self._open + b',"choices":[{"index":%d,' % choice.index for choice in run.choices]
        # A client that asked for the usage chunk is told in every other chunk that it is not that one.
        self._tail = b'}],"usage":null}\n\n' if self._with_usage else b"}]}\n\n"

    def _close(self) -> bytes:
        if self._running_usage:
            return b'}],"usage":' + _encode(self._run.usage()) + b"}\n\n"
        return self._tail

    def end(self) -> bytes:
        if not self._with_usage:
            return b""
        return self._open + b',"choices":[],"usage":' + _encode(self._run.usage()) + b"}\n\n"


class ChatWriter(_Writer):
    """Events of a chat completion: the role, then content, then the finish reason, for each choice."""

    def __init__(
        self, run: Run, model: str, tokenizer: Tokenizer, options: StreamOptions | None, top_logprobs: int
    ) -> None:
        super().__init__(run, "chat.completion.chunk", model, options)
        self._tokenizer = tokenizer
        self._top = top_logprobs

    def begin(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join([begin + delta + self._close() for begin in self._begin_choice])

    def events(self, choices: Sequence[Choice]) -> bytes:
        parts: list[bytes] = []
        for choice in choices:
            text, entries = choice.take_text(), choice.take_entries()
            begin = self._begin_choice[choice.index]
            if text or entries:
                logprobs = _encode(_chat_logprobs(entries, self._tokenizer, self._top)) if entries else b"null"
                parts += (begin, b'"delta":{"content":', _encode(text), b'},"logprobs":', logprobs)
                parts += (b',"finish_reason":null', self._close())
            if choice.finish_reason is not None:
                parts += (begin, b'"delta":{},"logprobs":null,"finish_reason":', _encode(choice.finish_reason))
                parts += (b',"matched_stop":', _encode(choice.matched), self._close())
        return b"".join(parts)


# Completions


def completion_body(run: Run, model: str, tokenizer: Tokenizer, logprobs: int | None, *, echo: bool) -> bytes:
    choices = []
    for choice in run.choices:
        shown = _Echo(choice, tokenizer, logprobs) if echo else None
        entries = choice.take_entries()
        choices.append(
            {
                "index": choice.index,
                "text": (shown.text if shown else "") + choice.take_text(),
                "logprobs": _completion_logprobs(shown, entries, tokenizer, logprobs, shown.length if shown else 0),
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.matched,
            }
        )
    return _encode(_head(run, "text_completion", model) | {"choices": choices, "usage": run.usage()})


class _Echo:
    """A prompt as the beginning of the answer. entries: its log probabilities, when they were asked for."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, logprobs: int | None) -> None:
        prompt = choice.prompt
        text = prompt.text
        self.text = text if text is not None else tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        self.length = len(self.text)
        self.entries: list[TokenEntry] = []
        found = choice.prompt_logprobs
        if logprobs is None or found is None:
            return
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        offset = 0
        for position, token_id in enumerate(found.token_ids):
            data = tokenizer.token_bytes(token_id)
            if position == 0 and token_id == tokenizer.bos_id and text is not None:
                # Put there by the tokenizer unless the text itself begins with it.
                data = data if text.startswith(data.decode("utf-8", "replace")) else b""
            self.entries.append(
                TokenEntry(token_id, data, offset, finite(found.logprobs[position]), found.top[position])
            )
            offset += len(detokenizer.push_bytes(data))


def _completion_logprobs(
    echo: _Echo | None, entries: Sequence[TokenEntry], tokenizer: Tokenizer, top: int | None, start: int
) -> CompletionLogprobs | None:
    """start: characters of the answer before the sample's own text."""
    if top is None:
        return None
    result = CompletionLogprobs([], [], [], [])
    for entry in echo.entries if echo else ():
        _append(result, entry, 0, tokenizer, top)
    for entry in entries:
        if not entry.ends_text:
            _append(result, entry, start, tokenizer, top)
    return result


def _append(result: CompletionLogprobs, entry: TokenEntry, start: int, tokenizer: Tokenizer, top: int) -> None:
    token = _token_string(entry.data)
    result.text_offset.append(start + entry.offset)
    result.tokens.append(token)
    result.token_logprobs.append(entry.logprob)
    if entry.logprob is None:
        result.top_logprobs.append(None)
        return
    alternatives = {token: entry.logprob}
    for token_id, logprob in entry.top[:top]:
        alternatives.setdefault(_token_string(tokenizer.token_bytes(token_id)), finite(logprob) or 0.0)
    result.top_logprobs.append(alternatives)


def _token_string(data: bytes) -> str:
    """As OpenAI's completions show tokens that are not whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionWriter(_Writer):
    """Events of a text completion; with echo, the prompt comes with the first output of each choice."""

    def __init__(
        self,
        run: Run,
        model: str,
        tokenizer: Tokenizer,
        options: StreamOptions | None,
        logprobs: int | None,
        *,
        echo: bool,
    ) -> None:
        super().__init__(run, "text_completion", model, options)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._to_echo = {choice.index for choice in run.choices} if echo else set()
        self._starts = [0] * len(run.choices)

    def begin(self) -> bytes:
        return b""

    def events(self, choices: Sequence[Choice]) -> bytes:
        parts: list[bytes] = []
        for choice in choices:
            echo = None
            if choice.index in self._to_echo:
                self._to_echo.remove(choice.index)
                echo = _Echo(choice, self._tokenizer, self._logprobs)
                self._starts[choice.index] = echo.length
            text, entries = (echo.text if echo else "") + choice.take_text(), choice.take_entries()
            begin = self._begin_choice[choice.index]
            if text or entries:
                logprobs = b"null"
                if self._logprobs is not None:
                    start = self._starts[choice.index]
                    logprobs = _encode(_completion_logprobs(echo, entries, self._tokenizer, self._logprobs, start))
                parts += (begin, b'"text":', _encode(text), b',"logprobs":', logprobs)
                parts += (b',"finish_reason":null', self._close())
            if choice.finish_reason is not None:
                parts += (begin, b'"text":"","logprobs":null,"finish_reason":', _encode(choice.finish_reason))
                parts += (b',"matched_stop":', _encode(choice.matched), self._close())
        return b"".join(parts)


def _head(run: Run, kind: str, model: str) -> dict[str, Any]:
    return {"id": run.rid, "object": kind, "created": int(time.time()), "model": model}
