"""Bodies of the native endpoints, with the field names of SGLang."""

from __future__ import annotations

from typing import Any

import msgspec

from server.bootstrap_fields import BootstrapFields


class NativeSampling(msgspec.Struct, kw_only=True):
    """None stands for a field that is null or absent."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Features this server lacks: only values that change nothing are accepted.
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    stop_regex: Any = None


class GenerateBody(BootstrapFields, kw_only=True):
    """One prompt or a batch: text or input_ids, and for a batch lists of the other fields where they differ."""

    text: str | list[str] | None = None
    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    # Features this server lacks.
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: bool | None = None
    lora_path: Any = None
    custom_logit_processor: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """prompt or text; add_special_tokens as for a completion."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """tokens or token_ids: ids, or a list of lists of ids."""

    tokens: msgspec.Raw = msgspec.Raw(b"null")
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None
