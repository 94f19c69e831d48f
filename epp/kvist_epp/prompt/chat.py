"""Messages as vLLM passes them to a chat template.

vLLM validates the messages (its types put fields in their own order), then flattens or wraps contents by
the template's style, and parses tool call arguments. The result decides bytes as soon as a template prints
one of them as JSON, so order and defaults matter. Source: ``vllm.renderers.chat_utils``, seen through a
template that prints ``messages | tojson``.
"""

import json
import secrets
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from kvist_epp.prompt.request_types import BILLING_HEADER, Chat

ContentFormat = Literal["string", "openai"]
"""The content that a template expects: one text, or a list of parts."""

MEDIA_MARK: Final = f"KVIST-MEDIA-{secrets.token_hex(8)}"
"""Stands for a medium where the engine, and not the template, writes the placeholder. No client knows it."""


class UnrenderableError(Exception):
    """A prompt that cannot be rendered here; the argument is a fixed word, never text of a request."""


MALFORMED: Final = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
"""What code that reads a request may raise where the engine's validation would refuse it."""


UNREADABLE: Final = (UnrenderableError, LookupError, TypeError, AttributeError)
"""What reading a shape that is unknown here, or that the engine refuses, may raise."""


def system_message(content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that instructions of other APIs become."""
    return {"role": "system", "content": content}


MAX_MESSAGES: Final = 20_000
"""Most messages of a chat that code writes, at some 6 us each, and most blocks of the Messages API."""
_GROWTH: Final = 4
_MAX_PROMPT: Final = 20_000_000
"""Characters: some four million tokens."""


def join_prompt(parts: Iterable[str], chat: Chat, size: int) -> str:
    """Join the parts of the prompt of a chat that code writes, and not a template; ``size`` is that of the
    request in bytes.

    Raises:
        UnrenderableError: there are too many messages, or the prompt is much longer than the request.
    """
    if len(chat.messages if chat.items is None else chat.items) > MAX_MESSAGES:
        raise UnrenderableError("work")
    room = min(_GROWTH * size + 1_000_000, _MAX_PROMPT)
    written = []
    for part in parts:
        room -= len(part)
        if room < 0:
            raise UnrenderableError("work")
        written.append(part)
    return "".join(written)


def template_messages(
    messages: list[dict[str, Any]], style: ContentFormat, *, reorder_calls: bool = True
) -> list[dict[str, Any]]:
    """Return the messages as a template of this content format sees them.

    Raises:
        UnrenderableError: a shape that the engine would reject or that is unknown here.
    """
    return [_message(message, style, reorder_calls) for message in messages]


def have_media(messages: list[dict[str, Any]]) -> bool:
    """Return whether ``template_messages`` put a ``MEDIA_MARK`` into one of these; it puts them in front."""
    contents = [message["content"] for message in messages]
    return any(type(content) is str and content.startswith(MEDIA_MARK) for content in contents)


def medium_kind(part: Any) -> str | None:
    """Return the kind of a part of a content that is a medium ("image", …); None for any other part."""
    kind = _named_type(part) if type(part) is dict else None
    return MODALITY.get(kind) if type(kind) is str else None


def merge_developer_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developer messages into system messages, joined in front, for templates without the role."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    renamed = [_as_system(message) for message in messages]
    systems = [message for message in renamed if message["role"] == "system"]
    if len(systems) == 1 and renamed[0] is systems[0]:
        return renamed
    texts = [_joined(message["content"]) for message in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def with_system_first(chat: Chat) -> Chat:
    """Return the chat with the texts of its system messages joined in one at the beginning."""
    texts = [message["content"] for message in chat.messages if message["role"] == "system"]
    others = [message for message in chat.messages if message["role"] != "system"]
    messages = [{"role": "system", "content": "".join(texts)}, *others]
    return msgspec.structs.replace(chat, messages=messages)


def _message(message: dict[str, Any], style: ContentFormat, reorder_calls: bool) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if type(role) is not str:
        raise UnrenderableError("shape")
    if content is None:
        content = "" if style == "string" or role == "tool" else []
    elif type(content) is not str or (role == "system" and content.startswith(BILLING_HEADER)):
        content = _content(role, content, style)
    elif style == "openai" and role != "tool":
        content = [{"type": "text", "text": content}]
    seen: dict[str, Any] = {"role": role, "content": content}
    if len(message) > 2 or "content" not in message:
        _add_assistant(seen, message, reorder_calls) if role == "assistant" else _add_others(
            seen, message, role
        )
        if type(message.get("name")) is str:
            seen["name"] = message["name"]
        if type(message.get("task")) is str:
            seen["task"] = message["task"]
    if role == "developer":
        tools = message.get("tools")
        seen["tools"] = ordered_tools(tools) if tools and reorder_calls else tools
    return seen


def ordered_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools of a developer message with their fields in the order of the validation, which leaves
    all as they are if it does not know one."""
    if not all(map(_is_declared, tools)):
        return tools
    ordered = []
    for tool in tools:
        function = tool["function"]
        shown = {name: function[name] for name in _TOOL_FIELDS if name in function} | function
        ordered.append({"function": shown, "type": tool["type"]} | tool | {"function": shown})
    return ordered


def _is_declared(tool: Any) -> bool:
    function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
    if type(function) is not dict or type(function.get("name")) is not str:
        return False
    kinds = {"description": (str,), "parameters": (dict,), "strict": (bool, type(None))}
    return all(type(function[name]) in kinds[name] for name in kinds if name in function)


def _add_assistant(seen: dict[str, Any], message: dict[str, Any], reorder_calls: bool) -> None:
    calls = message.get("tool_calls")
    if calls:
        seen["tool_calls"] = [_call(call, reorder_calls) for call in calls]
    reasoning = reasoning_of(message)
    if reasoning is not None:
        seen["reasoning"] = seen["reasoning_content"] = reasoning


def reasoning_of(message: dict[str, Any]) -> Any:
    """Return the reasoning of an answer, which a template gets under both of its names; None: it has none."""
    reasoning = message.get("reasoning")
    return message.get("reasoning_content") if reasoning is None else reasoning


def _add_others(seen: dict[str, Any], message: dict[str, Any], role: str) -> None:
    if role == "tool" and "tool_call_id" in message:
        seen["tool_call_id"] = message["tool_call_id"]


def _call(call: dict[str, Any], reorder: bool) -> dict[str, Any]:
    try:
        return ordered_call(call, parsed_function(call["function"]), reorder=reorder)
    except (KeyError, TypeError):
        raise UnrenderableError("tool-call") from None


def parsed_function(function: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a call with its arguments as an object. Raises KeyError if it has none."""
    return {**function, "arguments": call_arguments(function["arguments"])}


def ordered_call(call: dict[str, Any], function: dict[str, Any], *, reorder: bool) -> dict[str, Any]:
    """Return a call with this function, its fields in the order of the chat API's validation (``reorder``) or
    as sent. Raises KeyError for a field that the validation requires."""
    if not reorder:
        return {**call, "function": function}
    shown = {"arguments": function["arguments"], "name": function["name"]}
    if len(function) > 2:
        shown |= function
    ordered = {"id": call["id"], "function": shown, "type": call["type"]}
    return ordered if len(call) == 3 else ordered | call | {"function": shown}


def call_arguments(arguments: str) -> dict[str, Any]:
    """Return a JSON object; empty for invalid arguments, as in vLLM, so that a chat can go on.

    Agents send all calls so far with each turn: short ones are parsed once.
    """
    if not arguments:
        return {}
    short = type(arguments) is str and len(arguments) <= KEPT_ARGUMENTS
    return _kept_arguments(arguments) if short else _parsed(arguments)


KEPT_ARGUMENTS: Final = 512
"""Longest arguments of a call that are cached, in characters. 1,024 calls are: 2 MB of usual ones, some 25 MB
of lists in lists."""


@lru_cache(maxsize=1_024)
def _kept_arguments(arguments: str) -> dict[str, Any]:
    return _parsed(arguments)


def _parsed(arguments: str) -> dict[str, Any]:
    """Parse as vLLM does, by ``json``; msgspec, which takes a third of the time, refuses more."""
    try:
        parsed = _arguments_decoder.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return parsed if isinstance(parsed, dict) else {}


_arguments_decoder: Final = msgspec.json.Decoder()


def _content(role: str, content: Any, style: ContentFormat) -> str | list[dict[str, Any]]:
    parts = content_parts(content)
    if role == "system":
        parts = _without_billing(parts)
    if style == "string":
        return _flat(parts)
    wrapped = [wrap for part in parts if (wrap := _wrapped(part)) is not None]
    if role == "tool" and all(part["type"] == "text" for part in wrapped):
        return "\n".join(part["text"] for part in wrapped)
    return wrapped


def content_parts(content: Any) -> list[Any]:
    """Return the parts of a content; a text is one part. Raises UnrenderableError."""
    if type(content) is list:
        return content
    if type(content) is str:
        return [content]
    if content is None:
        return []
    raise UnrenderableError("content")


def _without_billing(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part if type(part) is str else part.get("text") if _kind(part) == "text" else None
        if type(text) is str and text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2]
            part = text if type(part) is str else {**part, "text": text}
            if not text:
                continue
        kept.append(part)
    return kept


def _flat(parts: list[Any]) -> str:
    """Join texts by newlines, after the media, whose placeholders the engine puts first. Empty texts are left
    out."""
    texts = [text for part in parts if (text := _text(part))]
    marks = [MEDIA_MARK for part in parts if _kind(part) in MODALITY]
    return "\n".join((*marks, *texts))


def _wrapped(part: Any) -> dict[str, Any] | None:
    """Return a part as a template sees it, or None for a text part without a text."""
    kind = _kind(part)
    if kind in MODALITY:
        return {"type": MODALITY[kind], **_extra(part)}
    if kind == "tool_reference":
        return {"type": kind, "name": part.get("name")}
    text = _text(part)
    if text is None:
        return None
    return {"type": "text", "text": text, **(_extra(part) if type(part) is dict else {})}


def _text(part: Any) -> str | None:
    kind = _kind(part)
    if kind in MODALITY:
        return None
    text = part if type(part) is str else part.get(TEXT_FIELD[kind])
    if type(text) is str or (text is None and kind in ("text", "refusal")):
        return text
    raise UnrenderableError("content")


def _kind(part: Any) -> str:
    """Return the type of a content part; a plain string is a text."""
    if type(part) is str:
        return "text"
    kind = _named_type(part) if type(part) is dict else None
    if type(kind) is not str or (kind not in TEXT_FIELD and kind not in MODALITY):
        raise UnrenderableError("content")
    return kind


def _named_type(part: dict[str, Any]) -> Any:
    """Return the type that a part names, or that the field of its medium implies."""
    kind = part.get("type")
    return kind if kind is not None else next((name for name in MODALITY if name in part), None)


def _extra(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _PART_FIELDS} if len(part) > 2 else {}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _joined(content: Any) -> str:
    return (
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
    )


_TOOL_FIELDS: Final = ("name", "description", "parameters", "strict")
TEXT_FIELD: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""Field with the text of a part, by the type of the part."""
MODALITY: Final = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "prompt_embeds": "prompt_embeds",
}
"""Kind of a medium, by the type of its part, or by the field that has it."""
_PART_FIELDS: Final = frozenset((*TEXT_FIELD, *MODALITY, "type", "name", "data", "uuid", "closed", "file"))
