"""SGLang's native endpoint `/generate`, which routers and benchmark tools use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from scheduler.messages import RankReady
from server.errors import bad_field
from server.generation import Choice, Prompt, Run, TokenEntry, finite
from server.http_common import json_response
from server.native_protocol import GenerateBody, NativeSampling
from server.service import Sample, Service, new_rid
from server.streaming import stream
from server.tokenizer import Tokenizer
from server.validation import (
    NATIVE_NEUTRAL,
    SAMPLING_NEUTRAL,
    check_id_count,
    check_range,
    check_rid,
    decode_prompts,
    output_options,
    refuse_unsupported,
    sampling_params,
)

MAX_TOP_LOGPROBS = 20
_NEW_TOKENS = 128

_decoder = msgspec.json.Decoder(GenerateBody)
_T = TypeVar("_T")
# [log probability, token id, text], as SGLang writes a token.
_Item = list[float | int | str | None]


class _Shape(msgspec.Struct, frozen=True):
    """How answers look.

    ids: one for each choice. is_list: a list, not one object. texts: beside token ids in log probabilities.
    shows_prompt: prompt log probabilities are shown where they were asked for. Routers put those of a prefill server
    before those of the decode server, which has them all: a prefill server's are left out.
    """

    ids: list[str]
    is_list: bool
    texts: bool
    shows_prompt: bool


def create_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        arrived = time.monotonic()
        body = await service.read(request, _decoder)
        refuse_unsupported(body, NATIVE_NEUTRAL)
        engine = service.client.check_accepting()
        check_id_count(body.input_ids, engine.context_length, "input_ids")
        given, field, is_batch = _prompts(body)
        prompts = await service.prompts(given, engine, field)
        samples = [
            _sample(service, body, prompt, index, field, len(prompts), engine) for index, prompt in enumerate(prompts)
        ]
        rids, names = _rids(body, len(prompts), is_batch)
        several = any(sample.n > 1 for sample in samples)
        ids = [
            f"{name}-{number}" if sample.n > 1 else name
            for name, sample in zip(names, samples, strict=True)
            for number in range(sample.n)
        ]
        shows_prompt = service.config.engine.disaggregation_mode != "prefill"
        shape = _Shape(ids, is_batch or several, bool(body.return_text_in_logprobs), shows_prompt)
        run = service.start(request, body, rids, samples, arrived, field)
        if body.stream:
            return await stream(run, _NativeWriter(run, service.tokenizer, shape), service.config.stream_interval)
        with run:
            await run.finish()
        answers = [_Answer(choice, service.tokenizer, shape) for choice in run.choices]
        for answer in answers:
            answer.update()
        shown = [answer.content(run) for answer in answers]
        return json_response(shown if shape.is_list else shown[0])

    return router


def _prompts(body: GenerateBody) -> tuple[list[str] | list[list[int]], str, bool]:
    has_ids = bytes(body.input_ids).strip() != b"null"
    if (body.text is None) != has_ids:
        raise bad_field("text", "or input_ids must be given, and not both")
    if has_ids:
        prompts, is_batch = decode_prompts(body.input_ids, "input_ids")
        if prompts and isinstance(prompts[0], str):
            raise bad_field("input_ids", "must be token ids; send text in the field text")
        return prompts, "input_ids", is_batch
    prompts, is_batch = decode_prompts(msgspec.Raw(msgspec.json.encode(body.text)), "text")
    return prompts, "text", is_batch


def _rids(body: GenerateBody, count: int, is_batch: bool) -> tuple[list[str], list[str]]:
    """(what /abort_request takes: one name for the whole or one a prompt; the name of each prompt's answer)."""
    if isinstance(body.rid, list):
        if len(body.rid) != count:
            raise bad_field("rid", f"has {len(body.rid)} names for {count} prompts")
        for rid in body.rid:
            check_rid(rid)
        if len(set(body.rid)) != count:
            raise bad_field("rid", "has a name twice")
        return body.rid, body.rid
    check_rid(body.rid)
    group = body.rid if body.rid is not None else new_rid("gen")
    return [group], [f"{group}-{index}" for index in range(count)] if is_batch else [group]


def _pick(value: _T | list[_T] | None, index: int, count: int, field: str, default: _T) -> _T:
    """The value for one prompt of a field that may be a list with one for each."""
    if value is None:
        return default
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise bad_field(field, f"has {len(value)} entries for {count} prompts")
    return value[index]


def _sample(
    service: Service,
    body: GenerateBody,
    prompt: Prompt,
    index: int,
    prompt_field: str,
    count: int,
    engine: RankReady,
) -> Sample:
    sampling = _pick(body.sampling_params, index, count, "sampling_params", NativeSampling())
    prefix = f"sampling_params[{index}]." if isinstance(body.sampling_params, list) else "sampling_params."
    refuse_unsupported(sampling, SAMPLING_NEUTRAL, prefix)
    limit = service.new_token_limit(
        sampling.max_new_tokens,
        _NEW_TOKENS,
        prompt,
        engine,
        field=prefix + "max_new_tokens",
        prompt_field=prompt_field,
        minimum=0,
    )
    params = sampling_params(
        sampling,
        service.defaults,
        engine.vocab_size,
        max_tokens=limit,
        max_tokens_field="max_new_tokens",
        prefix=prefix,
    )
    logprobs = _pick(body.return_logprob, index, count, "return_logprob", False)
    top = _pick(body.top_logprobs_num, index, count, "top_logprobs_num", 0)
    start = _pick(body.logprob_start_len, index, count, "logprob_start_len", -1)
    check_range("top_logprobs_num", top, 0, MAX_TOP_LOGPROBS)
    check_range("logprob_start_len", start, -1, len(prompt.token_ids) - 1)
    return Sample(
        prompt,
        params,
        output_options(sampling, prefix),
        n=sampling.n or 1,
        logprobs=logprobs,
        top_logprobs=top if logprobs else 0,
        prompt_logprobs_start=start if logprobs else -1,
    )


class _Answer:
    """The answer for one choice, which holds everything so far each time it is shown."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, shape: _Shape) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        self._shape = shape
        self._text = ""
        self._logprobs: list[_Item] = []
        self._top: list[list[_Item] | None] = []

    def update(self) -> None:
        self._text += self._choice.take_text()
        for entry in self._choice.take_entries():
            self._logprobs.append(self._item(entry.token_id, entry.logprob))
            self._top.append(self._items(entry))

    def content(self, run: Run) -> dict[str, Any]:
        choice = self._choice
        meta: dict[str, Any] = {
            "id": self._shape.ids[choice.index],
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": len(choice.prompt.token_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
            "e2e_latency": time.monotonic() - run.arrived,
        }
        if self._logprobs or choice.prompt_logprobs is not None:
            meta["output_token_logprobs"] = self._logprobs
            meta["output_top_logprobs"] = self._top
            meta["input_token_logprobs"], meta["input_top_logprobs"] = self._prompt_logprobs()
        return {"text": self._text, "output_ids": choice.token_ids, "meta_info": meta}

    def _prompt_logprobs(self) -> tuple[list[_Item], list[list[_Item] | None]]:
        found = self._choice.prompt_logprobs
        if found is None or not self._shape.shows_prompt:
            return [], []
        entries = [
            TokenEntry(token, b"", 0, finite(logprob), top)
            for token, logprob, top in zip(found.token_ids, found.logprobs, found.top, strict=True)
        ]
        return (
            [self._item(entry.token_id, entry.logprob) for entry in entries],
            [self._items(entry) for entry in entries],
        )

    def _items(self, entry: TokenEntry) -> list[_Item] | None:
        return [self._item(token, finite(logprob)) for token, logprob in entry.top] or None

    def _item(self, token_id: int, logprob: float | None) -> _Item:
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") if self._shape.texts else None
        return [logprob, token_id, text]


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "stop":
        return {"type": "stop", "matched": choice.matched}
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": choice.finish_reason, "message": choice.abort_message}


class _NativeWriter:
    """Each event of a stream holds the whole answer so far; in a batch it says which one with `index`."""

    def __init__(self, run: Run, tokenizer: Tokenizer, shape: _Shape) -> None:
        self._run = run
        self._with_index = shape.is_list
        self._answers = [_Answer(choice, tokenizer, shape) for choice in run.choices]

    def begin(self) -> bytes:
        return b""

    def events(self, choices: Sequence[Choice]) -> bytes:
        parts: list[bytes] = []
        for choice in choices:
            answer = self._answers[choice.index]
            answer.update()
            content = answer.content(self._run)
            if self._with_index:
                content["index"] = choice.index
            parts += (b"data: ", msgspec.json.encode(content), b"\n\n")
        return b"".join(parts)

    def end(self) -> bytes:
        return b""
