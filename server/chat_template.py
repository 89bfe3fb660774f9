"""Chat templates: Jinja, in a sandbox, with the helpers that templates of model repositories expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Put behind the final message to find where the template renders its end; no client text holds these characters.
_END_MARK = "\ue000lockstep-end\ue001"


class ChatTemplateError(ValueError):
    """The template refused the messages, or cannot be rendered. The message is for the client."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks trained text; rendering only needs its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """source: Jinja text. special_tokens: bos_token and so on, as templates name them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, continue_final: bool = False
    ) -> str:
        """The prompt. continue_final: it ends inside the last message, for the model to go on.

        options: extra variables of the template. ChatTemplateError with the template's own words when it refuses.
        """
        shown = [self._known_role(message) for message in messages]
        if continue_final:
            shown[-1] = {**shown[-1], "content": (shown[-1].get("content") or "") + _END_MARK}
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            "add_generation_prompt": not continue_final,
            **options,
            "messages": shown,
        }
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program of somebody else: whatever it raises is about this input
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error
        if continue_final:
            end = text.rfind(_END_MARK)
            if end < 0:
                raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
            text = text[:end]
        return text

    def _known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # "developer" is the newer name of the system role; templates that do not know it would refuse or drop it.
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
