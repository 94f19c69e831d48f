"""Chats of Kimi K2 and its successors, whose tokenizer has code that prepares tools for the template.

``tokenization_kimi.py`` beside the model sorts the fields of tools, declares them in TypeScript if the
template asks for it (from K2.5 on), and has values for variables that requests leave out.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvist_epp.prompt.kimi_tools import declare_tools
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import declaration_room, kept_text, with_sorted_fields

CODE: Final = "tokenization_kimi."
"""Begins the name of the tokenizer's class in ``tokenizer_config.json``."""

_DECLARED: Final = "tools_ts_str"
_VARIABLES: Final[Mapping[str, Any]] = {"thinking": True, "preserve_thinking": False}
_TOOLS_KEY: Final = ("kimi",)


class KimiChats:
    """Renders the chats of such a model by its template."""

    def __init__(self, template: Template, source: str, defaults: Mapping[str, Any]) -> None:
        """``source``: of the template; ``defaults``: the variables that the engines have."""
        self._template = template
        self._declares = _DECLARED in source
        self._variables = {name: _VARIABLES[name] for name in _VARIABLES if name not in defaults}

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt; ``size`` is that of the request. Raises UnrenderableError as a template does."""
        variables = {**self._variables, **chat.variables}
        tools = chat.tools
        if tools:
            tools = with_sorted_fields(tools)
            if self._declares and (declared := _declared(tools, size)):
                variables[_DECLARED] = declared
        return self._template.render(msgspec.structs.replace(chat, tools=tools, variables=variables), size)

    def media_text(self, kind: str) -> str:
        """Return what stands for each medium of this kind in the prompt; empty: it does not show."""
        return self._template.media_text(kind)


def _declared(tools: list[dict[str, Any]], size: int) -> str:
    return kept_text(tools, _TOOLS_KEY, lambda: declare_tools(tools, declaration_room(size)) or "")
