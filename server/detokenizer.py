"""Tokens to text, one at a time."""

from __future__ import annotations

import codecs

from server.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sample as it grows. Bytes of an unfinished character wait for the tokens that finish it.

    All pieces together are the bytes of all tokens, decoded as UTF-8 with U+FFFD for what is not UTF-8, however the
    tokens were spread over steps.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = _new_decoder("replace")
        self._inside_character = False

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing for special tokens that are skipped."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def push(self, token_id: int) -> str:
        """The characters that this token finishes."""
        if not self._inside_character and not (self._skip and token_id in self._tokenizer.special_ids):
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        return self.push_bytes(self.bytes_of(token_id))

    def push_bytes(self, data: bytes) -> str:
        """As `push`, for a token whose bytes are known."""
        text = self._decoder.decode(data)
        self._inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """At the end of the sample: U+FFFD where the text ends inside a character."""
        return self._decoder.decode(b"", True)
