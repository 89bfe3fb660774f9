"""OpenAI's endpoints: chat completions, completions and models."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.chat_template import ChatTemplateError
from server.errors import ApiError, bad_field
from server.http_common import json_response
from server.openai_format import ChatWriter, CompletionWriter, chat_body, completion_body
from server.openai_protocol import ChatMessage, ChatRequest, CompletionRequest, SamplingFields
from server.service import Sample, Service, new_rid
from server.streaming import stream
from server.validation import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    MAX_MESSAGES,
    check_id_count,
    check_model,
    check_range,
    check_rid,
    decode_prompts,
    output_options,
    refuse_unsupported,
    sampling_params,
)

MAX_CHAT_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
_COMPLETION_TOKENS = 16
_ROLES = ("system", "developer", "user", "assistant", "tool")

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def create_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _chat(service, request)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _complete(service, request)

    def model_card() -> dict[str, Any]:
        engine = service.client.engine
        return {
            "id": service.config.served_model_name,
            "object": "model",
            "created": service.started,
            "owned_by": "lockstep",
            "root": service.config.engine.model_path,
            "max_model_len": engine.context_length if engine is not None else None,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        check_model(model, service.config.served_model_name)
        return json_response(model_card())

    return router


async def _chat(service: Service, request: Request) -> Response:
    arrived = time.monotonic()
    body = await service.read(request, _chat_decoder)
    check_model(body.model, service.config.served_model_name)
    _check_chat(body)
    engine = service.client.check_accepting()
    text = await _render(service, body)
    (prompt,) = await service.prompts([text], engine, "messages", add_special=False)
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = service.new_token_limit(
        getattr(body, limit_field), None, prompt, engine, field=limit_field, prompt_field="messages"
    )
    params = sampling_params(body, service.defaults, engine.vocab_size, max_tokens=limit, max_tokens_field=limit_field)
    sample = Sample(
        prompt,
        params,
        output_options(body),
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )
    run = service.start(request, body, [body.rid or new_rid("chatcmpl")], [sample], arrived, "n")
    model = service.config.served_model_name
    if body.stream:
        writer = ChatWriter(run, model, service.tokenizer, body.stream_options, sample.top_logprobs)
        return await stream(run, writer, service.config.stream_interval)
    with run:
        await run.finish()
    return Response(chat_body(run, model, service.tokenizer, sample), media_type="application/json")


async def _complete(service: Service, request: Request) -> Response:
    arrived = time.monotonic()
    body = await service.read(request, _completion_decoder)
    check_model(body.model, service.config.served_model_name)
    _check_completion(body)
    engine = service.client.check_accepting()
    check_id_count(body.prompt, engine.context_length, "prompt")
    given, _ = decode_prompts(body.prompt, "prompt")
    prompts = await service.prompts(given, engine, "prompt")
    echo, options = bool(body.echo), output_options(body)
    samples = []
    for prompt in prompts:
        limit = service.new_token_limit(
            body.max_tokens,
            _COMPLETION_TOKENS,
            prompt,
            engine,
            field="max_tokens",
            prompt_field="prompt",
            minimum=0 if echo else 1,
        )
        params = sampling_params(
            body, service.defaults, engine.vocab_size, max_tokens=limit, max_tokens_field="max_tokens"
        )
        sample = Sample(
            prompt,
            params,
            options,
            n=body.n or 1,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs_start=0 if echo and body.logprobs is not None else -1,
        )
        samples.append(sample)
    run = service.start(request, body, [body.rid or new_rid("cmpl")], samples, arrived, "prompt")
    model = service.config.served_model_name
    if body.stream:
        writer = CompletionWriter(run, model, service.tokenizer, body.stream_options, body.logprobs, echo=echo)
        return await stream(run, writer, service.config.stream_interval)
    with run:
        await run.finish()
    content = completion_body(run, model, service.tokenizer, body.logprobs, echo=echo)
    return Response(content, media_type="application/json")


def _check_stream(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "is only allowed when stream is true")
    check_rid(body.rid)


def _check_chat(body: ChatRequest) -> None:
    refuse_unsupported(body, CHAT_NEUTRAL)
    _check_stream(body)
    check_range("top_logprobs", body.top_logprobs, 0, MAX_CHAT_TOP_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "is only allowed when logprobs is true")
    if not body.messages:
        raise bad_field("messages", "is empty; send at least one message")
    if len(body.messages) > MAX_MESSAGES:
        raise bad_field("messages", f"has {len(body.messages)} messages; at most {MAX_MESSAGES} are allowed")
    for index, message in enumerate(body.messages):
        field = f"messages[{index}]"
        if message.role not in _ROLES:
            raise bad_field(f"{field}.role", f"is {message.role!r}; it must be one of {', '.join(_ROLES)}")
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise bad_field(f"{field}.content", "is missing")
        if message.content == []:
            raise bad_field(f"{field}.content", "is an empty list")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise bad_field("continue_final_message", "needs a final message of the assistant")


def _check_completion(body: CompletionRequest) -> None:
    refuse_unsupported(body, COMPLETION_NEUTRAL)
    _check_stream(body)
    check_range("logprobs", body.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field("best_of", "is not supported other than equal to n", code="unsupported_parameter")


async def _render(service: Service, body: ChatRequest) -> str:
    messages = [_template_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    continue_final = bool(body.continue_final_message)
    length = sum(len(message["content"]) for message in messages)
    try:
        return await service.in_thread(
            lambda: service.tokenizer.render_chat(messages, options, continue_final=continue_final), length
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


def _template_message(message: ChatMessage, field: str) -> dict[str, Any]:
    """The message as templates expect it: content is text."""
    shown: dict[str, Any] = msgspec.to_builtins(message)
    content = message.content or ""
    if not isinstance(content, str):
        texts = []
        for index, part in enumerate(content):
            kind, text = part.get("type"), part.get("text")
            if kind != "text":
                raise bad_field(f"{field}.content[{index}].type", f"is {kind!r}; only 'text' is supported")
            if not isinstance(text, str):
                raise bad_field(f"{field}.content[{index}].text", "must be a string")
            texts.append(text)
        content = "\n".join(texts)
    return shown | {"content": content}
