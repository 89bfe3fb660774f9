"""Tokens become text without broken characters, whatever the tokenizer."""

from __future__ import annotations

import functools
import json

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from server.detokenizer import Detokenizer
from server.tokenizer import ByteTokenizer, FileTokenizer

_CORPUS = ["The quick brown fox jumps over the lazy dog.", "naïve café, 日本語のテキスト, emoji 😀👩‍👩‍👧 and more"] * 20


@functools.cache
def byte_level() -> FileTokenizer:
    """A byte-level BPE in which most tokens are several bytes and some are parts of characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return FileTokenizer(backend, backend.to_str().encode(), {"eos_token": "<|end|>"}, None)


@functools.cache
def byte_fallback() -> FileTokenizer:
    """A vocabulary in the manner of SentencePiece: ▁ for spaces, <0xNN> for bytes of unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "é", "日", "x"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return FileTokenizer(backend, backend.to_str().encode(), {"bos_token": "<s>"}, None)


def _pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(st.text(max_size=60))
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = byte_level()
    pieces = _pieces(Detokenizer(tokenizer), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces) or "�" in text


@given(st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_give_what_the_library_gives(ids: list[int]) -> None:
    tokenizer = byte_level()
    ids = [token for token in ids if token < tokenizer.vocab_size]
    text = "".join(_pieces(Detokenizer(tokenizer), ids))
    assert text == tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert text == b"".join(Detokenizer(tokenizer).bytes_of(token) for token in ids).decode("utf-8", "replace")
    assert text == tokenizer.decode(ids)


@given(st.binary(max_size=40))
def test_bytes_become_text_as_they_complete_characters(data: bytes) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = _pieces(detokenizer, list(data))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_an_emoji_comes_whole() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert _pieces(detokenizer, list("a😀".encode())) == ["a", "", "", "", "😀", ""]


def test_a_text_that_ends_inside_a_character_shows_it() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert _pieces(detokenizer, list("é😀".encode()[:-1])) == ["", "é", "", "", "", "�"]


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert _pieces(Detokenizer(ByteTokenizer()), [104, 256, 105, 257, 300]) == ["h", "", "i", "", "", ""]
    tokenizer = byte_level()
    end = tokenizer._backend.token_to_id("<|end|>")
    assert Detokenizer(tokenizer).push(end) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(end) == "<|end|>"


@given(st.text("the fox 日é😀x", max_size=30))
def test_byte_fallback_text_survives(text: str) -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer._backend.token_to_id(piece) for piece in _sentencepieces(text)]
    assert "".join(_pieces(Detokenizer(tokenizer), ids)) == text


def _sentencepieces(text: str) -> list[str]:
    pieces: list[str] = []
    for character in text.replace(" ", "▁"):
        if character in "▁é日x":
            pieces.append(character)
        else:
            pieces += (f"<0x{byte:02X}>" for byte in character.encode())
    return pieces


def test_other_decoders_are_asked() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = FileTokenizer(backend, json.dumps({"decoder": {"type": "WordPiece"}}).encode(), {}, None)
    assert "".join(_pieces(Detokenizer(tokenizer), [1, 2, 1])) == "b cb"
