"""Checks of what clients send, and its translation into what the engine takes. Every refusal names the field."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from scheduler.messages import SamplingParams
from server.errors import ApiError, bad_field
from server.native_protocol import AbortBody, NativeSampling
from server.openai_protocol import SamplingFields

logger = logging.getLogger(__name__)

MAX_N = 128
MAX_PROMPTS = 1024
MAX_SAMPLES = 4096
MAX_MESSAGES = 16384
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
MAX_RID_CHARACTERS = 256
MAX_PENALTY = 2.0
# Beyond these a logit that is divided or multiplied may leave the range of float32.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
# Below this the distribution is a point within float32, and dividing logits by it overflows.
MIN_TEMPERATURE = 1e-6

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_FIELD_PATH = re.compile(r" - at `\$\.?(.*)`$")
_T = TypeVar("_T")


def decode_body(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    """ApiError 400 that names the field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(error, "") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _explain(error: msgspec.ValidationError, field: str) -> ApiError:
    text = str(error)
    found = _FIELD_PATH.search(text)
    path = found.group(1) if found else ""
    param = field + path if path.startswith("[") or not field else field + ("." + path if path else "")
    message = text[: found.start()] if found else text
    missing = re.search(r"required field `(\w+)`", message)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return ApiError(400, f"{param or 'the body'}: {message}", param=param or None)


_text_decoder = msgspec.json.Decoder(str | list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_batch_decoder = msgspec.json.Decoder(list[list[int]])


def decode_prompts(raw: msgspec.Raw, field: str) -> tuple[list[str] | list[list[int]], bool]:
    """(prompts, whether it is a batch) of text, a list of texts, token ids, or a list of lists of token ids."""
    data = bytes(raw)
    start = re.match(rb"\s*(\[?)\s*(.?)", data, re.DOTALL)
    assert start is not None
    opened, first = start.groups()
    try:
        if opened and first == b"[":
            batch = _batch_decoder.decode(data)
            check_prompt_count(len(batch), field)
            return batch, True
        if opened and first not in (b'"', b"]"):
            return [_ids_decoder.decode(data)], False
        texts = _text_decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(error, field) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"{field} is not valid JSON: {error}", param=field, code="invalid_json") from error
    if isinstance(texts, str):
        return [texts], False
    check_prompt_count(len(texts), field)
    return texts, True


def check_id_count(raw: msgspec.Raw, context_length: int, field: str) -> None:
    """ApiError 400 for a list of token ids that is too long, undecoded: millions of them would hold up others."""
    data = bytes(raw)
    if re.match(rb"\s*\[\s*[-\d]", data) and (count := data.count(b",") + 1) > context_length:
        message = (
            f"This model's maximum context length is {context_length} tokens. However, {field} has {count} tokens. "
            "Please shorten it."
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")


def check_prompt_count(count: int, field: str) -> None:
    if not 1 <= count <= MAX_PROMPTS:
        raise bad_field(field, f"has {count} prompts; send 1 to {MAX_PROMPTS}")


def check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise bad_field(field, f"has the token id {wrong}, outside the vocabulary 0..{vocab_size - 1}")


def check_model(model: str | None, served: str) -> None:
    """ApiError 404 for another model; none stands for the served one."""
    if model is not None and model != served:
        message = f"the model {model!r} does not exist; this server has {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_range(field: str, value: float | None, low: float, high: float, *, above_low: bool = False) -> None:
    """None passes. NaN does not: it is in no range."""
    if value is not None and not ((low < value if above_low else low <= value) and value <= high):
        bounds = f"{'above' if above_low else 'at least'} {low:g} and at most {high:g}"
        raise bad_field(field, f"is {value!r}; it must be {bounds}")


def check_rid(rid: str | None, field: str = "rid") -> None:
    if rid is not None and not 1 <= len(rid) <= MAX_RID_CHARACTERS:
        raise bad_field(field, f"has {len(rid)} characters; send 1 to {MAX_RID_CHARACTERS}")


def check_abort(body: AbortBody) -> None:
    if not body.rid and not body.abort_all:
        raise bad_field("rid", "is empty; name a request, or set abort_all")


def refuse_unsupported(body: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], prefix: str = "") -> None:
    """ApiError 400 when a field of a feature that is not there has a value that would change the answer."""
    for field, harmless in neutral.items():
        value = getattr(body, field)
        if value is not None and value not in harmless:
            raise bad_field(prefix + field, "is not supported by this server", code="unsupported_parameter")


_OFF: tuple[Any, ...] = ("", [], {}, False)
SAMPLING_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "regex": _OFF,
    "ebnf": _OFF,
    "json_schema": _OFF,
    "structural_tag": _OFF,
    "stop_regex": _OFF,
}
OPENAI_NEUTRAL: dict[str, tuple[Any, ...]] = SAMPLING_NEUTRAL | {
    "response_format": ({"type": "text"},),
    "guided_json": _OFF,
    "guided_regex": _OFF,
    "guided_choice": _OFF,
    "guided_grammar": _OFF,
    "structured_outputs": _OFF,
    "lora_path": _OFF,
    "custom_logit_processor": _OFF,
    "prompt_logprobs": (False,),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = OPENAI_NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": _OFF,
    "modalities": (["text"], []),
    "web_search_options": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = OPENAI_NEUTRAL | {"suffix": ("",)}
NATIVE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": _OFF,
    "image_data": _OFF,
    "audio_data": _OFF,
    "video_data": _OFF,
    "token_ids_logprob": _OFF,
    "return_hidden_states": (False,),
    "lora_path": _OFF,
    "custom_logit_processor": _OFF,
}


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What holds where a request says nothing: the model's generation_config.json, else the plain distribution."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_K)] = -1
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0


def load_sampling_defaults(model_path: str) -> SamplingDefaults:
    """Reads generation_config.json of a checkpoint's folder where there is one; values it cannot use are logged."""
    path = Path(model_path) / "generation_config.json"
    try:
        given = msgspec.json.decode(path.read_bytes())  # refuses NaN, which no range does
        wanted = {name: given[name] for name in SamplingDefaults.__struct_fields__ if given.get(name) is not None}
        if wanted.get("top_k") == 0:  # another way of saying "all"
            wanted["top_k"] = -1
        return msgspec.convert(wanted, SamplingDefaults)
    except (FileNotFoundError, NotADirectoryError):
        return SamplingDefaults()
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return SamplingDefaults()


class OutputOptions(msgspec.Struct, frozen=True):
    """How one sample's tokens become its answer. min_tokens: stop strings do not count in so many first tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


def output_options(body: SamplingFields | NativeSampling, prefix: str = "") -> OutputOptions:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise bad_field(prefix + "stop", f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not stop:
            raise bad_field(prefix + "stop", "has an empty string")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise bad_field(prefix + "stop", f"has a string of {len(stop)} characters, over {MAX_STOP_CHARACTERS}")
    include = bool(body.no_stop_trim)
    if isinstance(body, SamplingFields):
        include = include or bool(body.include_stop_str_in_output)
    skip = body.skip_special_tokens is not False
    return OutputOptions(tuple(dict.fromkeys(stops)), include, skip, _min_tokens(body)[0])


def _min_tokens(body: SamplingFields | NativeSampling) -> tuple[int, str]:
    """(tokens before which nothing stops a sample, the field that says so)."""
    if isinstance(body, NativeSampling):
        return body.min_new_tokens or 0, "min_new_tokens"
    return body.min_tokens or 0, "min_tokens"


def sampling_params(
    body: SamplingFields | NativeSampling,
    defaults: SamplingDefaults,
    vocab_size: int,
    *,
    max_tokens: int,
    max_tokens_field: str,
    prefix: str = "",
) -> SamplingParams:
    """Checked parameters with the seed as given (`with_seed` makes it a sample's own). max_tokens: already checked."""
    check_range(prefix + "temperature", body.temperature, 0, MAX_TEMPERATURE)
    check_range(prefix + "top_p", body.top_p, 0, 1, above_low=True)
    check_range(prefix + "min_p", body.min_p, 0, 1)
    if body.top_k is not None and body.top_k != -1:
        if body.top_k == 0:  # some clients send it for "all"
            body.top_k = -1
        else:
            check_range(prefix + "top_k", body.top_k, 1, MAX_TOP_K)
    check_range(prefix + "frequency_penalty", body.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_range(prefix + "presence_penalty", body.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    repetition = body.repetition_penalty
    check_range(prefix + "repetition_penalty", repetition, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    check_range(prefix + "n", body.n, 1, MAX_N)
    seed, seed_field = body.seed, "seed"
    if isinstance(body, NativeSampling) and body.sampling_seed is not None:
        seed, seed_field = body.sampling_seed, "sampling_seed"
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise bad_field(prefix + seed_field, f"is {seed}; it must fit in 64 bits with sign")
    minimum, minimum_field = _min_tokens(body)
    if not 0 <= minimum <= max_tokens:
        allowed = f"0 to {max_tokens_field} ({max_tokens})"
        raise bad_field(prefix + minimum_field, f"is {minimum}; it must be {allowed}")
    stop_ids = body.stop_token_ids or []
    if len(stop_ids) > MAX_STOP_IDS:
        raise bad_field(prefix + "stop_token_ids", f"has {len(stop_ids)} ids; at most {MAX_STOP_IDS} are allowed")
    check_ids(stop_ids, vocab_size, prefix + "stop_token_ids")
    temperature = defaults.temperature if body.temperature is None else body.temperature
    return SamplingParams(
        max_new_tokens=max_tokens,
        seed=secrets.randbits(63) if seed is None else seed & (2**63 - 1),
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        min_new_tokens=minimum,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=defaults.repetition_penalty if repetition is None else repetition,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size, prefix + "logit_bias"),
    )


def _logit_bias(given: dict[str, float], vocab_size: int, field: str) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. given: by token ids, which JSON writes as strings."""
    if len(given) > MAX_LOGIT_BIASES:
        raise bad_field(field, f"has {len(given)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    found: dict[int, float] = {}
    for key, value in given.items():
        # Long numbers are not even read: their length alone says that they are outside.
        token = int(key) if _TOKEN_ID.fullmatch(key) else -1
        if not 0 <= token < vocab_size:
            raise bad_field(field, f"has the key {key[:40]!r}; keys are token ids, 0..{vocab_size - 1}")
        check_range(f"{field}[{key}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        found[token] = value
    return tuple(found.items())


def with_seed(params: SamplingParams, sample: int) -> SamplingParams:
    """The parameters of one of several samples of a prompt: sample 0 has the request's seed, others one made of it."""
    if sample == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{sample}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest, "big") >> 1)


def new_token_limit(
    requested: int | None,
    default: int | None,
    prompt_tokens: int,
    context_length: int,
    *,
    field: str,
    prompt_field: str,
    minimum: int = 1,
) -> int:
    """How many tokens a sample may have. requested: the client's number, None for `default` or what there is room for.

    ApiError 400 when the prompt leaves no room, or not enough for what was asked.
    """
    if requested is not None and requested < minimum:
        raise bad_field(field, f"is {requested}; it must be at least {minimum}")
    room = context_length - prompt_tokens
    if requested is None:
        if room < 1:
            message = (
                f"This model's maximum context length is {context_length} tokens. However, {prompt_field} has "
                f"{prompt_tokens} tokens, which leaves no room for a completion. Please shorten it."
            )
            raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")
        return room if default is None else min(default, room)
    if requested > room:
        message = (
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{prompt_tokens + requested} tokens ({prompt_tokens} in {prompt_field}, {requested} in {field}). "
            "Please shorten the prompt or ask for fewer tokens."
        )
        raise ApiError(400, message, param=prompt_field if room < 1 else field, code="context_length_exceeded")
    return requested
