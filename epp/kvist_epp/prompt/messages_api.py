"""Parse the Anthropic Messages API as chats, as vLLM 0.33 does (``vllm.entrypoints.anthropic.serving``).

Only shapes that are proven equal against vLLM's render endpoints are marked exact; anything else is
matched approximately.
"""

from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import MAX_MESSAGES, UNREADABLE, UnrenderableError, system_message
from kvist_epp.prompt.request_types import (
    BILLING_HEADER,
    Chat,
    Kind,
    Request,
    by_load,
    checked,
    count,
    replaces_prompt,
    text_or_none,
    variables,
)
from kvist_epp.prompt.tools import parse_tools, sent_tools, template_tools


class MessagesBody(msgspec.Struct):
    """Read the body of ``POST /v1/messages``."""

    messages: list[dict[str, Any]]
    model: Any = None
    system: str | list[dict[str, Any]] | None = None
    stream: Any = None
    max_tokens: Any = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def parse_messages(body: bytes) -> Request:
    """Parse an Anthropic Messages request; raises as ``request.parse`` does."""
    sent = _messages_decoder.decode(body)
    if sent.kv_transfer_params or replaces_prompt(sent.chat_template_kwargs):
        return by_load(Kind.MESSAGES, sent.model, body, "shape", salt=sent.cache_salt)
    try:
        chat = _messages_chat(sent)
    except UNREADABLE:
        told = [] if sent.system is None else [system_message(sent.system)]
        chat = Chat([*told, *sent.messages], _readable_tools(sent), refusal="shape")
    return Request(
        kind=Kind.MESSAGES,
        model=checked(sent.model),
        salt=sent.cache_salt,
        max_tokens=count(sent.max_tokens),
        stream=sent.stream is True,
        size=len(body),
        exact=not chat.refusal,
        chat=chat,
    )


def _messages_chat(sent: MessagesBody) -> Chat:
    chat: list[dict[str, Any]] = []
    system = _system(sent.system)
    if system:
        chat.append(system_message(system))
    told = len(chat)
    changes: list[dict[str, Any]] = []
    blocks = 0
    for message in sent.messages:
        content = message["content"]
        blocks += 1 if isinstance(content, str) else len(content)
        if blocks > MAX_MESSAGES:
            raise UnrenderableError("work")
        if message["role"] != "system":
            _add_turn(chat, message["role"], content)
            continue
        if not isinstance(content, str):
            changes += [block for block in content if block["type"] in _TOOL_CHANGES]
        if text := _inline_system(content):
            chat.append(system_message(text))
    tools = _changed_tools(sent.tools, changes) if changes else parse_tools(sent.tools, _schema_functions)
    return Chat(
        chat,
        tools,
        variables=variables(sent.chat_template_kwargs, _effort(sent)),
        effort=_effort(sent),
        template_kwargs=sent.chat_template_kwargs,
        thinking_off=_thinking_is_off(sent),
        tools_unwanted=(sent.tool_choice or {}).get("type") == "none",
        parsed_arguments=True,
        inline_system=any(message["role"] == "system" for message in chat[told:]),
    )


def _readable_tools(sent: MessagesBody) -> list[dict[str, Any]] | None:
    """Return the tools of a request that no template renders; None if they cannot be read either."""
    try:
        return parse_tools(sent.tools, _schema_functions)
    except UNREADABLE:
        return None


def _system(system: str | list[dict[str, Any]] | None) -> str:
    """Return the text of instructions, without what a client changes with each request."""
    if not isinstance(system, list):
        return system or ""
    texts = [block["text"] for block in system if block["type"] == "text" and block["text"]]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _inline_system(content: str | list[dict[str, Any]]) -> str:
    return "" if isinstance(content, str) and content.startswith(BILLING_HEADER) else _system(content)


def _add_turn(messages: list[dict[str, Any]], role: str, content: str | list[dict[str, Any]]) -> None:
    """Add the chat messages of one turn: tool results first, then the other content."""
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    said: dict[str, Any] = {"role": role}
    for block in content:
        if block["type"] == "tool_result" and role == "user":
            _add_result(messages, block)
        else:
            _say(said, block)
    if "reasoning" in said:
        said["reasoning"] = "".join(said["reasoning"])
    parts = said.get("content")
    if parts is not None and len(parts) == 1 and parts[0]["type"] == "text":
        said["content"] = parts[0]["text"]
    if role != "user" or parts is not None:
        messages.append(said)


def _say(said: dict[str, Any], block: dict[str, Any]) -> None:
    kind = block["type"]
    if kind == "text":
        if block["text"]:
            said.setdefault("content", []).append({"type": "text", "text": block["text"]})
    elif kind == "image":
        if block.get("source"):
            said.setdefault("content", []).append(_picture(block["source"]))
    elif kind == "thinking":
        said.setdefault("reasoning", []).append(block["thinking"])
    elif kind == "tool_use":
        arguments = _encoder.encode(block.get("input") or {}).decode()  # see Chat.parsed_arguments
        function = {"name": block["name"], "arguments": arguments}
        call = {"id": block["id"], "type": "function", "function": function}
        said.setdefault("tool_calls", []).append(call)
    elif kind == "tool_result" and isinstance(block.get("content") or "", str):
        # of a list, the engine shows Python's words for it, which take long for a deep one
        text = f"Tool result: {block.get('content') or ''}"
        said.setdefault("content", []).append({"type": "text", "text": text})
    elif kind not in ("redacted_thinking", "tool_reference"):
        raise UnrenderableError("shape")


def _add_result(messages: list[dict[str, Any]], block: dict[str, Any]) -> None:
    """Add the result of a call: its texts, then its pictures, which the user shows, then tools it found."""
    content = block.get("content") or ""
    items = [] if isinstance(content, str) else content
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    sources = [item["source"] for item in items if item.get("type") == "image"]
    pictures = [_picture(one) for one in sources if one.get("type") != "url" or one.get("url")]
    names = [
        item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"
    ]
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    messages.append({**result, "content": "\n".join(texts) if items else content})
    if pictures:
        messages.append({"role": "user", "content": pictures})
    if found := [{"type": "tool_reference", "name": name} for name in names if name]:
        messages.append({**result, "content": found})


def _picture(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": source}


def _changed_tools(sent: msgspec.Raw, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that are left when all changes are made, as a template sees them; it sees one list."""
    tools = {tool["name"]: tool for tool in sent_tools(sent) or []}
    removed: set[str] = set()
    shown: set[str] = set()
    for block in changes:
        change = block["tool"]
        if change["type"] == "tool_definition":
            name = change["definition"]["name"]
            tools[name] = change["definition"]
            shown.discard(name)
        else:
            name = change["name"]
            if name not in tools:
                raise UnrenderableError("tool")
            if block["type"] == _ADDITION:
                shown.add(name)
        (removed.discard if block["type"] == _ADDITION else removed.add)(name)
    left = [
        {**tool, "defer_loading": None} if name in shown else tool
        for name, tool in tools.items()
        if name not in removed
    ]
    return _schema_functions(left, len(sent))


def _schema_functions(tools: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    return template_tools([_schema_function(tool) for tool in tools], size) if tools else []


def _schema_function(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _thinking_is_off(sent: MessagesBody) -> bool:
    return (sent.thinking or {}).get("type") == "disabled"


def _effort(sent: MessagesBody) -> str | None:
    if _thinking_is_off(sent):
        return "none"
    return text_or_none((sent.output_config or {}).get("effort"))


_ADDITION: Final = "tool_addition"
_TOOL_CHANGES: Final = frozenset((_ADDITION, "tool_removal"))
"""Blocks of system messages that change the tools of the request."""
_encoder: Final = msgspec.json.Encoder()
_messages_decoder: Final = msgspec.json.Decoder(MessagesBody)
