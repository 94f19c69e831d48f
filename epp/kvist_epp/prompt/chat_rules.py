"""Engines change some chats before they render them, by flags of theirs that no template sees.

The rules are vLLM 0.33's (``vllm.renderers.online_renderer``, ``vllm.entrypoints.anthropic.serving``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from kvist_epp.names import THINKING_EFFORTS
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.request_types import Chat, variables

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Changes a chat as the engines do with these flags."""

    hide_unwanted_tools: bool = False
    """``--exclude-tools-when-tool-choice-none``."""
    hide_in_responses: bool = True
    """Also in the Responses API; not so with gpt-oss."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """``--reasoning-effort-map``: what a template gets for the effort of a request."""
    thinking_off: str = AUTO
    """``--anthropic-disabled-thinking-effort``: the effort for thinking that is switched off."""

    def apply(self, chat: Chat) -> Chat:
        """Return the chat as the engines render it; the same object if they change nothing."""
        effort = chat.effort
        if chat.thinking_off and self.thinking_off != AUTO:
            effort = self.thinking_off
        if effort is not None:
            effort = self.efforts.get(effort, effort)
        shown_anyway = chat.items is not None and not self.hide_in_responses
        hide = self.hide_unwanted_tools and chat.tools_unwanted and not shown_anyway
        if effort == chat.effort and not hide:
            return chat
        return msgspec.structs.replace(
            chat,
            effort=effort,
            variables=variables(chat.template_kwargs, effort),
            tools=None if hide else chat.tools,
        )

    def with_thinking_off(self, render: Callable[[Chat], str]) -> "ChatRules":
        """Return the rules with "auto" decided as engines do: by what they render for each effort.

        It is "low" if the model refuses "none", or takes it for one of the efforts to think.
        """
        if self.thinking_off != AUTO:
            return self

        def rendered(effort: str) -> str | None:
            chat = Chat([{"role": "user", "content": "Hi"}], variables=variables(None, effort), effort=effort)
            try:
                return render(self.apply(chat))
            except UnrenderableError:
                return None

        off = rendered("none")
        ignored = off is None or any(rendered(effort) == off for effort in THINKING_EFFORTS)
        return replace(self, thinking_off="low" if ignored else "none")


NO_RULES: Final = ChatRules()
