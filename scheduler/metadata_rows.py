"""The metadata row of a hand-over: what the decode side needs to know beside the KV, in memory that KV managers fill.

A row belongs to the resident request whose row of the request table has the same number. It is readable once it names
its room; room 0 means that nothing is written yet. What has no fixed size travels as the manager's note.
"""

from __future__ import annotations

import msgspec
import numpy as np

from scheduler.messages import TokenLogprobs


class Metadata(msgspec.Struct, frozen=True):
    """token: the first output token, -1 when none was asked for. cached_tokens: what the prefill side's cache had."""

    room: int
    token: int
    cached_tokens: int


class Note(msgspec.Struct, frozen=True, array_like=True):
    """logprobs: of the first token, when wanted. prompt_logprobs: when wanted."""

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class MetadataRows:
    """array [1 + max_requests, 3] int64."""

    def __init__(self, max_requests: int) -> None:
        self.array = np.zeros((1 + max_requests, len(Metadata.__struct_fields__)), dtype=np.int64)

    def clear(self, row: int) -> None:
        """Before the row's next owner: it must not find the room of this one."""
        self.array[row] = 0

    def write(self, row: int, metadata: Metadata) -> None:
        self.array[row] = msgspec.structs.astuple(metadata)

    def read(self, row: int) -> Metadata:
        return Metadata(*self.array[row].tolist())


encode_note = msgspec.msgpack.Encoder().encode
_note_decoder = msgspec.msgpack.Decoder(Note)


def decode_note(data: bytes) -> Note:
    """msgspec.DecodeError for bytes that are no note."""
    return _note_decoder.decode(data)
