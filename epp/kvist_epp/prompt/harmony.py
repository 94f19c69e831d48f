"""Chats of gpt-oss: vLLM writes them in OpenAI's harmony format by code and ignores the model's template.

A prompt is a system message (date, effort, channels), a developer message (instructions and tools), and the
chat; answers have channels: ``final``, ``analysis`` for reasoning and ``commentary`` for calls. Sources:
``vllm.entrypoints.openai.parser.harmony_utils`` of vLLM 0.33 and the library oss-harmony, which the tests
compare with. Engines with ``VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS`` or ``VLLM_SYSTEM_START_DATE`` write
something else; the accuracy of the index shows it.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from kvist_epp.prompt.chat import (
    KEPT_ARGUMENTS,
    MALFORMED,
    UnrenderableError,
    join_prompt,
    reasoning_of,
)
from kvist_epp.prompt.harmony_tools import declare_tools
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template_environment import now
from kvist_epp.prompt.tools import declaration_room, kept_text

MODEL_TYPE: Final = "gpt_oss"
"""``model_type`` in the ``config.json`` of models that vLLM writes this format for."""

_EFFORTS: Final = (None, "low", "medium", "high")
_SYSTEM: Final = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: {effort}

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
_WITH_TOOLS: Final = "\nCalls to these tools must go to the commentary channel: 'functions'."
_INSTRUCTIONS: Final = "# Instructions\n\n"
_DEVELOPER: Final = "<|start|>developer<|message|>"
_USER: Final = "<|start|>user<|message|>"
_ANALYSIS: Final = "<|start|>assistant<|channel|>analysis<|message|>"
_COMMENTARY: Final = "<|start|>assistant<|channel|>commentary<|message|>"
_FINAL: Final = "<|start|>assistant<|channel|>final<|message|>"
_END: Final = "<|end|>"
_TOOLS_KEY: Final = ("harmony",)


class HarmonyChats:
    """Renders the chats of a model that reads the harmony format."""

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the engine refuses the chat, or its tools make too long a text.
        """
        try:
            return join_prompt(_render(chat, size), chat, size)
        except MALFORMED:
            raise UnrenderableError("shape") from None

    def media_text(self, kind: str) -> str:  # noqa: ARG002 - none of any kind
        """Return what stands for a medium in a prompt: nothing."""
        return ""


def _render(chat: Chat, size: int) -> Iterator[str]:
    if chat.refusal and chat.items is None:
        raise UnrenderableError(chat.refusal)
    messages, instructions = chat.messages if chat.items is None else chat.items, None
    if messages and messages[0].get("role") in ("system", "developer"):
        instructions = _flat(messages[0].get("content"))
        messages = messages[1:]
    if chat.effort not in _EFFORTS:
        raise UnrenderableError("effort")
    yield _SYSTEM.format(date=now("%Y-%m-%d"), effort=chat.effort or "medium")
    if chat.tools:
        yield _WITH_TOOLS
    yield _END
    if instructions or chat.tools:
        sections = [] if instructions is None else [_INSTRUCTIONS + instructions]
        sections += [_declared(chat.tools, size)] if chat.tools else []
        yield _DEVELOPER + "\n\n".join(sections) + _END
    yield from _conversation(chat, messages) if chat.items is None else _response_items(messages)
    yield "<|start|>assistant"


def _conversation(chat: Chat, messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the messages; reasoning is dropped up to the last answer."""
    called = {
        call.get("id"): call["function"].get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    last_answer = max((at for at, message in enumerate(messages) if _answers(message)), default=-1)
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield from _assistant(chat, message, with_reasoning=at > last_answer)
        elif role == "tool":
            yield _result(called.get(message.get("tool_call_id", ""), ""), _flat(content) or "")
        elif role in ("system", "developer"):
            if (text := _flat(content)) is not None:
                yield _DEVELOPER + _INSTRUCTIONS + text + _END
        elif role == "user":
            yield _USER + _joined(content) + _END
        else:
            raise UnrenderableError("shape")


def _response_items(items: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the items of a request of the Responses API, each of which is a message."""
    called: dict[str, str] = {}
    last_answer = max((at for at, item in enumerate(items) if item.get("role") == "assistant"), default=-1)
    for at, item in enumerate(items):
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "message" and role in ("system", "developer"):
            if text := _flat(item["content"]):
                yield _DEVELOPER + _INSTRUCTIONS + text + _END
        elif kind == "message" and role in ("user", "assistant"):
            yield (_USER if role == "user" else _FINAL) + _joined(item["content"]) + _END
        elif kind == "reasoning":
            if (parts := item.get("content")) and at > last_answer:
                yield _ANALYSIS + "\n".join([part["text"] for part in parts]) + _END
        elif kind == "function_call":
            called[item["call_id"]] = item["name"]
            yield _call(item["name"], item["arguments"])
        elif kind == "function_call_output":
            yield _result(called[item["call_id"]], "" + item["output"])
        else:
            raise UnrenderableError("shape")


def _answers(message: dict[str, Any]) -> bool:
    """Return whether a message has an answer in the channel ``final``."""
    return message.get("role") == "assistant" and not message.get("tool_calls") and _begins(message)


def _begins(message: dict[str, Any]) -> bool:
    """Return whether the content of an answer begins with a text: otherwise vLLM leaves it out."""
    content = message.get("content")
    return bool(content[0].get("text", "") if content and type(content) is list else content)


def _assistant(chat: Chat, message: dict[str, Any], *, with_reasoning: bool) -> Iterator[str]:
    calls, reasoning = message.get("tool_calls"), reasoning_of(message)
    if calls and (preamble := _flat(message.get("content"))):
        yield _COMMENTARY + preamble + _END
    if reasoning and with_reasoning:
        yield _ANALYSIS + reasoning + _END
    if not calls:
        if _begins(message):
            yield _FINAL + _joined(message["content"]) + _END
        return
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or ""
        if chat.parsed_arguments:
            arguments = _spaced(arguments)
        yield _call(function.get("name", ""), arguments)


def _call(name: str, arguments: str) -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def _result(name: str, text: str) -> str:
    return f"<|start|>functions.{name}<|channel|>commentary to=assistant<|message|>{text}<|end|>"


def _declared(tools: list[dict[str, Any]], size: int) -> str:
    return kept_text(tools, _TOOLS_KEY, lambda: declare_tools(tools, declaration_room(size)))


def _joined(content: Any) -> str:
    """Join the texts of the parts of a content; media count as empty ones."""
    if content is None or type(content) is str:
        return content or ""
    return "".join([part.get("text", "") for part in content])


def _flat(content: Any) -> str | None:
    """Join the texts of a content; None if it has none."""
    if content is None or type(content) is str:
        return content
    texts = [part if type(part) is str else part.get("text") for part in content]
    texts = [text for text in texts if text is not None]
    return "".join(texts) if texts else None


def _spaced(arguments: str) -> str:
    """Return arguments as Python prints the object that they were sent as."""
    return _kept_spaced(arguments) if len(arguments) <= KEPT_ARGUMENTS else json.dumps(json.loads(arguments))


@lru_cache(maxsize=1_024)
def _kept_spaced(arguments: str) -> str:
    return json.dumps(json.loads(arguments))
