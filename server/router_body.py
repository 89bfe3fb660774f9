"""What the router reads of a body, and what it adds: one bootstrap room a sample, the rest as it came.

Samples are counted as the servers count them, so that a list of rooms always fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from server.bootstrap_fields import draw_room
from server.errors import ApiError, bad_field
from server.router_config import PrefillAddress
from server.validation import MAX_N, MAX_SAMPLES, check_prompt_count, check_range, decode_body

_PROMPT_FIELDS = ("messages", "prompt", "text", "input_ids")
_ABSENT = msgspec.Raw(b"null")


class _Sampling(msgspec.Struct):
    n: int | None = None


class _ChatBody(msgspec.Struct):
    n: int | None = None


class _CompletionBody(msgspec.Struct):
    prompt: msgspec.Raw = _ABSENT
    n: int | None = None


class _GenerateBody(msgspec.Struct):
    text: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    sampling_params: _Sampling | list[_Sampling] | None = None


_chat_decoder = msgspec.json.Decoder(_ChatBody)
_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_generate_decoder = msgspec.json.Decoder(_GenerateBody)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_rid_decoder = msgspec.json.Decoder(str | list[str] | None)


def chat_samples(body: bytes) -> int:
    return _samples(decode_body(_chat_decoder, body).n, "n")


def completion_samples(body: bytes) -> int:
    shape = decode_body(_completion_decoder, body)
    return _total(_prompts(shape.prompt, "prompt") * _samples(shape.n, "n"), "prompt")


def generate_samples(body: bytes) -> int:
    shape = decode_body(_generate_decoder, body)
    field = "text" if bytes(shape.input_ids).strip() == b"null" else "input_ids"
    count = _prompts(getattr(shape, field), field)
    sampling = shape.sampling_params
    if not isinstance(sampling, list):
        return _total(count * _samples(sampling.n if sampling is not None else None, "sampling_params.n"), field)
    if len(sampling) != count:
        raise bad_field("sampling_params", f"has {len(sampling)} entries for {count} prompts")
    each = (_samples(entry.n, f"sampling_params[{index}].n") for index, entry in enumerate(sampling))
    return _total(sum(each), field)


def _samples(n: int | None, field: str) -> int:
    check_range(field, n, 1, MAX_N)
    return n or 1


def _total(samples: int, field: str) -> int:
    if samples > MAX_SAMPLES:
        raise bad_field(field, f"times n makes {samples} samples; at most {MAX_SAMPLES} are allowed")
    return samples


def _prompts(raw: msgspec.Raw, field: str) -> int:
    """How many prompts are in text, a list of texts, token ids, or a list of lists of token ids."""
    data = bytes(raw)
    # A list of token ids is one prompt, and long: it is told apart without being decoded.
    if not re.match(rb'\s*\[\s*["\[\]]', data):
        return 1
    count = len(_list_decoder.decode(data))
    check_prompt_count(count, field)
    return count


class RoutedBody:
    """A JSON object of a client, to be sent to a prefill and a decode server. ApiError 400 when it cannot be.

    count_samples: how many samples this endpoint makes of a body. rids: what the client calls the request.
    """

    def __init__(self, data: bytes, count_samples: Callable[[bytes], int]) -> None:
        self._num_samples = count_samples(data)
        self._fields = decode_body(_fields_decoder, data)
        self.rids = _rids(self._fields.get("rid", _ABSENT))

    @property
    def prefix(self) -> bytes:
        """The prompt as JSON; prompts that begin alike do so in it."""
        return next((bytes(self._fields[name]) for name in _PROMPT_FIELDS if name in self._fields), b"")

    def for_pair(self, prefill: PrefillAddress) -> bytes:
        """The body with where the two servers meet: new rooms each time, as values for one sample, else as lists."""
        host, port, count = bootstrap_host(prefill.url), prefill.bootstrap_port, self._num_samples
        rooms = _new_rooms(count)
        single = count == 1
        return msgspec.json.encode(
            self._fields
            | {
                "bootstrap_host": host if single else [host] * count,
                "bootstrap_port": port if single else [port] * count,
                "bootstrap_room": rooms[0] if single else rooms,
            }
        )


def bootstrap_host(url: str) -> str:
    """The host of a prefill server's URL; an IPv6 address keeps its brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _new_rooms(count: int) -> list[int]:
    """None twice."""
    rooms: dict[int, None] = {}
    while len(rooms) < count:
        rooms[draw_room()] = None
    return list(rooms)


def _rids(raw: msgspec.Raw) -> tuple[str, ...]:
    try:
        rid = _rid_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"rid: {error}", param="rid") from error
    if rid is None:
        return ()
    return (rid,) if isinstance(rid, str) else tuple(rid)
