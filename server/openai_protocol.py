"""Bodies of the OpenAI-compatible endpoints, as clients send them.

Fields that are not named here are ignored, as other compatible servers do. Fields of features that this server lacks
are named, so that a request which needs them is refused and not answered differently.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.bootstrap_fields import BootstrapFields


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(BootstrapFields, kw_only=True):
    """What chat and text completions share. None stands for a field that is null or absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Extensions of other open servers.
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None
    # Features this server lacks: only values that change nothing are accepted.
    response_format: dict[str, Any] | None = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    prompt_logprobs: Any = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Features this server lacks.
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """prompt: text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    # Features this server lacks.
    suffix: str | None = None


class TopLogprob(msgspec.Struct):
    """bytes: UTF-8 bytes of the token, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Four lists of equal length. text_offset: characters before the token in prompt and text together."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
