"""Text to tokens and tokens to bytes.

A model's `tokenizer.json` is read with the `tokenizers` library alone: importing `transformers` takes seconds, and it
is only needed for folders with older formats. A model without any tokenizer file gets a byte-level one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from server.chat_template import ChatTemplate, ChatTemplateError
from server.config import ServerConfig, StartupError

_OLDER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
# A Unicode normalizer may shorten the text before it is cut into tokens, but not by more than this.
_NORMALIZER_SHRINK = 4


class Tokenizer(ABC):
    """vocab_size: ids are below it. special_ids: ids that are not text. bos_id: None where the model has none."""

    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None
    chat_template: ChatTemplate | None

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Other threads run meanwhile."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that it continues; nothing for unknown ids, such as vocabulary padding."""

    def token_text(self, token_id: int) -> str | None:
        """`token_bytes` as text; None when they are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            return self._texts.setdefault(token_id, _whole_characters(self.token_bytes(token_id)))

    @cached_property
    def _texts(self) -> dict[int, str | None]:
        return {}

    @property
    @abstractmethod
    def longest_token(self) -> int:
        """No token covers more bytes of a text."""

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text as UTF-8, with U+FFFD for what is not."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in skipped)
        return data.decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, continue_final: bool = False
    ) -> str:
        """ChatTemplateError, whose message is for the client, when the template refuses."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions, or give --chat-template")
        return self.chat_template.render(messages, options, continue_final=continue_final)


def _whole_characters(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


_BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ '\\n' if not loop.last or add_generation_prompt }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, 256 begins a text (never added by itself), 257 ends it, 258 pads."""

    vocab_size = 259
    special_ids = frozenset((256, 257, 258))
    bos_id = 256
    longest_token = 1

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = ChatTemplate(chat_template or _BYTE_CHAT_TEMPLATE, {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the library does not show."""

    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self, backend: tokenizers.Tokenizer, description: bytes, settings: Mapping[str, Any], template: str | None
    ) -> None:
        """description: the content of tokenizer.json. settings: that of tokenizer_config.json. template: Jinja."""
        self._backend = backend
        file = msgspec.json.decode(description, type=_TokenizerFile)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added = {token.id: token.content.encode("utf-8") for token in file.added_tokens}
        self.special_ids = frozenset(token.id for token in file.added_tokens if token.special)
        self._decoders = _decoder_types(file.decoder)
        self._has_normalizer = file.normalizer is not None
        named = _special_tokens(settings)
        bos = named.get("bos_token")
        self.bos_id = backend.token_to_id(bos) if bos is not None else None
        # Some folders say so here and not in the post-processor of tokenizer.json.
        self._add_bos = settings.get("add_bos_token") is True
        self.chat_template = ChatTemplate(template, named) if template is not None else None
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch call gives up the interpreter lock while it works; `encode` does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    @cached_property
    def longest_token(self) -> int:
        longest = max((len(token.encode("utf-8")) for token in self._backend.get_vocab()), default=1)
        return longest * (_NORMALIZER_SHRINK if self._has_normalizer else 1)

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode("utf-8")
        if "ByteFallback" in self._decoders or "Metaspace" in self._decoders:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes((int(token[3:5], 16),))
            return token.replace("▁", " ").encode("utf-8")
        return self._difference(token_id)

    def _difference(self, token_id: int) -> bytes:
        """For decoders of other kinds: what the token adds to the text of an ordinary token."""
        anchor = self._backend.encode("a", add_special_tokens=False).ids
        before: str = self._backend.decode(anchor)
        after: str = self._backend.decode([*anchor, token_id])
        return after.removeprefix(before).encode("utf-8")


def load_tokenizer(config: ServerConfig) -> Tokenizer:
    """The tokenizer of the served model. StartupError for files that cannot be used."""
    template = None
    if config.chat_template is not None:
        template = _read_text(Path(config.chat_template), "--chat-template")
    folder = Path(config.tokenizer_path or config.engine.model_path)
    try:
        if (folder / "tokenizer.json").is_file():
            return _from_folder(folder, template)
        if any((folder / name).is_file() for name in _OLDER_FORMATS):
            return _from_older_format(folder, template)
        if config.tokenizer_path is not None:
            raise StartupError(f"--tokenizer-path {folder}: there is no tokenizer.json or other tokenizer file in it")
        return ByteTokenizer(template)
    except ChatTemplateError as error:
        raise StartupError(f"{config.chat_template or folder}: {error}") from error


def _from_folder(folder: Path, template: str | None) -> FileTokenizer:
    path = folder / "tokenizer.json"
    description = _read(path, "the tokenizer")
    settings_path = folder / "tokenizer_config.json"
    settings: Any = {}
    try:
        backend = tokenizers.Tokenizer.from_buffer(description)
        if settings_path.is_file():
            path = settings_path
            settings = json.loads(_read(settings_path, "the tokenizer's settings"))
        return FileTokenizer(backend, description, settings, template or _find_template(folder, settings))
    except (ValueError, AttributeError) as error:
        if isinstance(error, ChatTemplateError):
            raise
        raise StartupError(f"{path} cannot be read: {error}") from error


def _from_older_format(folder: Path, template: str | None) -> FileTokenizer:
    from transformers import AutoTokenizer  # slow to import, and only these folders need it

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise StartupError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    settings = dict(loaded.special_tokens_map)
    description = loaded.backend_tokenizer.to_str().encode("utf-8")
    return FileTokenizer(
        loaded.backend_tokenizer, description, settings, template or _find_template(folder, loaded.init_kwargs)
    )


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path, "the chat template")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several templates with names
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{what}: {path} cannot be read ({error.strerror})") from error


def _read_text(path: Path, what: str) -> str:
    try:
        return _read(path, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{what}: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {str(decoder["type"])}.union(*(_decoder_types(part) for part in decoder.get("decoders", [])))


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, as GPT-2 defined it."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_characters()
