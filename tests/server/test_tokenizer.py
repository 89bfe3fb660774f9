"""Tokenizer files and chat templates of model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.config import EngineConfig
from server.chat_template import ChatTemplate, ChatTemplateError
from server.config import ServerConfig, StartupError
from server.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from tests.server.test_detokenizer import byte_level

_TEMPLATE = """\
{%- if messages[0].role == 'system' -%}
<|system|>{{ messages[0].content | trim }}
{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages -%}
{%- if message.role not in ['user', 'assistant'] %}
{{- raise_exception('role ' ~ message.role ~ ' is not known') }}{% endif %}
<|{{ message.role }}|>{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ extra | default('') }}{% endif %}
{{- {'é': '<'} | tojson if dump else '' }}"""

_MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]


def _folder(tmp_path: Path, **settings: object) -> Path:
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
        **settings,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def _load(folder: Path, **settings: object) -> FileTokenizer:
    engine = EngineConfig(model_path=str(folder))
    tokenizer = load_tokenizer(ServerConfig(engine=engine, served_model_name="m", **settings))  # type: ignore[arg-type]
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def test_equals_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = _folder(tmp_path, chat_template=_TEMPLATE)
    ours, theirs = _load(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    text = "The naïve fox 😀<|end|> jumps"
    assert ours.encode(text) == theirs.encode(text)
    for options in ({}, {"extra": "!"}, {"dump": True}):
        rendered = ours.render_chat(_MESSAGES, options)
        assert rendered == theirs.apply_chat_template(_MESSAGES, tokenize=False, add_generation_prompt=True, **options)
    continued = theirs.apply_chat_template(_MESSAGES, tokenize=False, continue_final_message=True)
    assert ours.render_chat(_MESSAGES, {}, continue_final=True) == continued
    assert continued.endswith("Well")


def test_template_words_reach_the_client() -> None:
    template = ChatTemplate(_TEMPLATE, {"eos_token": "</s>"})
    with pytest.raises(ChatTemplateError, match="^role tool is not known$"):
        template.render([{"role": "tool", "content": ""}], {})
    with pytest.raises(ChatTemplateError, match="cannot render"):
        ChatTemplate("{{ 1 // 0 }}", {}).render(_MESSAGES, {})


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(_MESSAGES, {})


def test_developer_is_system_where_unknown() -> None:
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate("{{ messages[0].role }}", {}).render([message], {}) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render([message], {}) == "developer"


def test_continuing_keeps_trailing_blanks() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b "}]
    assert template.render(messages, {}, continue_final=True) == "[a][b "


@pytest.mark.parametrize(("add_bos", "begins"), [(True, True), (False, False), (None, False)])
def test_beginning_of_text(tmp_path: Path, add_bos: bool | None, begins: bool) -> None:
    tokenizer = _load(_folder(tmp_path, bos_token="<|end|>", add_bos_token=add_bos))
    plain = tokenizer.encode("The", add_special_tokens=False)
    assert tokenizer.encode("The") == ([tokenizer.bos_id] if begins else []) + plain
    assert tokenizer.encode("<|end|>The") == [tokenizer.bos_id, *plain]


def test_chat_template_sources(tmp_path: Path) -> None:
    folder = _folder(tmp_path, chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])
    assert _load(folder).render_chat(_MESSAGES, {}) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert _load(folder).render_chat(_MESSAGES, {}) == "file"
    (folder / "mine.jinja").write_text("mine")
    assert _load(folder, chat_template=str(folder / "mine.jinja")).render_chat(_MESSAGES, {}) == "mine"


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        _load(_folder(tmp_path)).render_chat(_MESSAGES, {})


def test_no_tokenizer_file_means_bytes(tmp_path: Path) -> None:
    config = ServerConfig(engine=EngineConfig(model_path=str(tmp_path)), served_model_name="m")
    tokenizer = load_tokenizer(config)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é") == [195, 169]
    assert tokenizer.render_chat(_MESSAGES, {}) == "user: hi\nassistant: Well\nassistant: "
    assert tokenizer.render_chat(_MESSAGES, {}, continue_final=True) == "user: hi\nassistant: Well"


def test_unusable_files_are_startup_errors(tmp_path: Path) -> None:
    config = ServerConfig(engine=EngineConfig(model_path="x"), served_model_name="m", tokenizer_path=str(tmp_path))
    with pytest.raises(StartupError, match="--tokenizer-path"):
        load_tokenizer(config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(config)
    _folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(StartupError, match="does not parse"):
        load_tokenizer(config)
    missing = ServerConfig(engine=config.engine, served_model_name="m", chat_template=str(tmp_path / "none"))
    with pytest.raises(StartupError, match="--chat-template"):
        load_tokenizer(missing)
