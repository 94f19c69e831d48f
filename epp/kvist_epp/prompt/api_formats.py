"""Parse the OpenAI Responses and Anthropic Messages APIs as chats, as vLLM 0.32 does.

Only shapes that are proven equal against vLLM's render endpoints are marked exact; anything else is
matched approximately. Sources: ``vllm.entrypoints.openai.responses.utils``,
``vllm.entrypoints.anthropic.serving``.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.request_types import (
    BILLING_HEADER,
    Chat,
    Kind,
    Request,
    by_load,
    checked,
    count,
    text_or_none,
    variables,
)
from kvist_epp.prompt.tools import parse_tools, template_tools

_UNREADABLE: Final = (UnrenderableError, LookupError, TypeError, AttributeError)
"""What reading a shape that is unknown here, or that the engine refuses, may raise."""


class ResponsesBody(msgspec.Struct):
    """Read the body of ``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    model: Any = None
    instructions: str | None = None
    stream: Any = None
    max_output_tokens: Any = None
    cache_salt: str | None = None
    session_id: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    prompt: Any = None
    truncation: Any = "disabled"
    kv_transfer_params: dict[str, Any] | None = None


class MessagesBody(msgspec.Struct):
    """Read the body of ``POST /v1/messages``."""

    messages: list[dict[str, Any]]
    model: Any = None
    system: str | list[dict[str, Any]] | None = None
    stream: Any = None
    max_tokens: Any = None
    cache_salt: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def parse_responses(body: bytes) -> Request:
    """Parse a Responses request; raises as ``request.parse`` does."""
    sent = _responses_decoder.decode(body)
    given = (sent.previous_response_id, sent.previous_input_messages, sent.prompt)
    if (
        any(one is not None for one in given)
        or sent.truncation != "disabled"
        or sent.kv_transfer_params
        or _templated(sent)
    ):
        return by_load(Kind.RESPONSES, sent.model, body, "stateful", salt=sent.cache_salt)
    try:
        chat = _responses_chat(sent)
    except _UNREADABLE:
        return by_load(Kind.RESPONSES, sent.model, body, "shape", salt=sent.cache_salt)
    return Request(
        kind=Kind.RESPONSES,
        model=checked(sent.model),
        salt=sent.cache_salt,
        max_tokens=count(sent.max_output_tokens),
        stream=sent.stream is True,
        session=text_or_none(sent.session_id),
        size=len(body),
        exact=True,
        add_special_tokens=True,  # vLLM leaves the tokenizer's default here: a template's BOS comes twice
        chat=chat,
    )


def _templated(sent: ResponsesBody | MessagesBody) -> bool:
    given = sent.chat_template_kwargs
    return given is not None and not given.keys().isdisjoint(("chat_template", "tools", "conversation"))


def _responses_chat(sent: ResponsesBody) -> Chat:
    messages: list[dict[str, Any]] = []
    if sent.instructions:
        messages.append(_told(sent.instructions))
    items = [{"role": "user", "content": sent.input}] if isinstance(sent.input, str) else sent.input
    refusal = ""
    try:
        for item in items:
            _add_item(messages, item)
    except _UNREADABLE:
        refusal = "shape"
    tools = parse_tools(sent.tools, _flat_functions)
    effort = text_or_none((sent.reasoning or {}).get("effort"))
    open_ended = isinstance(sent.input, list) and _is_open(sent.input[-1:])
    return Chat(
        messages,
        tools if tools or tools is _NONE_SHOWN else None,
        variables=variables(sent.chat_template_kwargs, effort),
        add_generation_prompt=not open_ended,
        continue_final_message=open_ended,
        reorder_calls=False,
        effort=effort,
        items=items if sent.instructions is None else [_told(sent.instructions), *items],
        refusal=refusal,
    )


def _told(instructions: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "system", "content": instructions}


def _is_open(last: list[dict[str, Any]]) -> bool:
    """Return whether the last message or reasoning is to be continued."""
    kind = last[0].get("type", "message") if last else ""
    return kind in ("message", "reasoning") and last[0].get("status") in ("in_progress", "incomplete")


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item)
    elif kind == "reasoning":
        _add_part(messages, "reasoning", _reasoning(item))
    elif kind == "function_call":
        name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
        _add_call(messages, item["call_id"], name, item["arguments"])
    elif kind == "custom_tool_call":
        arguments = json.dumps({_CUSTOM_INPUT: item.get("input") or ""}, ensure_ascii=False)
        _add_call(messages, item["call_id"], item["name"], arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    else:
        raise UnrenderableError("shape")


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    content = item["content"]
    if item["role"] != "assistant":
        messages.append({"role": item["role"], "content": content})
    else:
        _add_part(messages, "content", content if isinstance(content, str) else content[0]["text"])


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnrenderableError("shape")
    texts = item.get("content") or item["summary"]
    return texts[0]["text"] if texts else ""


def _add_part(messages: list[dict[str, Any]], name: str, text: str) -> None:
    """Add a text to the assistant's message before it, if it has none there, or as a message of its own."""
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(name) is None:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _add_call(messages: list[dict[str, Any]], identifier: str, name: str, arguments: str) -> None:
    """Add a call to the assistant's message before it, or as a message of its own."""
    function = {"name": name, "arguments": arguments}
    call = {"id": identifier, "function": function, "type": "function"}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _flat_functions(tools: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    if sum(len(space["name"]) * len(space["tools"]) for space in spaces) > _GROWTH * size:
        raise UnrenderableError("work")
    functions = [function for tool in tools for function in _functions_of(tool)]
    if functions:
        return template_tools(functions, size)
    return _NONE_SHOWN if tools else []


def _functions_of(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions that vLLM shows of a tool; none of those that only OpenAI runs."""
    kind = tool["type"]
    if kind == "function":
        yield _flat_function(tool)
    elif kind == "custom":
        yield _flat_function({**tool, "parameters": _CUSTOM_PARAMETERS})
    elif kind == "namespace":
        for inner in tool["tools"]:
            if inner["type"] == "function":
                yield _flat_function({**inner, "name": f"{tool['name']}__{inner['name']}"})


def _flat_function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def parse_messages(body: bytes) -> Request:
    """Parse an Anthropic Messages request; raises as ``request.parse`` does."""
    sent = _messages_decoder.decode(body)
    if sent.kv_transfer_params or _templated(sent):
        return by_load(Kind.MESSAGES, sent.model, body, "shape", salt=sent.cache_salt)
    try:
        chat = _messages_chat(sent)
    except _UNREADABLE:
        told = [] if sent.system is None else [_told(sent.system)]
        chat = Chat([*told, *sent.messages], _readable_tools(sent), refusal="shape")
    return Request(
        kind=Kind.MESSAGES,
        model=checked(sent.model),
        salt=sent.cache_salt,
        max_tokens=count(sent.max_tokens),
        stream=sent.stream is True,
        size=len(body),
        # the engine probes which effort its template takes for thinking that is off
        exact=not (chat.refusal or _thinking_is_off(sent)),
        chat=chat,
    )


def _messages_chat(sent: MessagesBody) -> Chat:
    chat: list[dict[str, Any]] = []
    system = _system(sent.system)
    if system:
        chat.append(_told(system))
    told = len(chat)
    for message in sent.messages:
        if message["role"] != "system":
            _add_turn(chat, message["role"], message["content"])
        elif text := _inline_system(message["content"]):
            chat.append(_told(text))
    return Chat(
        chat,
        parse_tools(sent.tools, _schema_functions) or None,
        variables=variables(sent.chat_template_kwargs, _effort(sent)),
        effort=_effort(sent),
        parsed_arguments=True,
        inline_system=any(message["role"] == "system" for message in chat[told:]),
    )


def _readable_tools(sent: MessagesBody) -> list[dict[str, Any]] | None:
    """Return the tools of a request that no template renders; None if they cannot be read either."""
    try:
        return parse_tools(sent.tools, _schema_functions)
    except _UNREADABLE:
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
            called = block.get("tool_use_id") or ""
            messages.append({"role": "tool", "tool_call_id": called, "content": _result(block)})
        else:
            _say(said, block)
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
        picture = {"type": "image_url", "image_url": block.get("source")}
        said.setdefault("content", []).append(picture)
    elif kind == "thinking":
        said["reasoning"] = said.get("reasoning", "") + block["thinking"]
    elif kind == "tool_use":
        arguments = _encoder.encode(block.get("input") or {}).decode()  # see Chat.parsed_arguments
        function = {"name": block["name"], "arguments": arguments}
        call = {"id": block["id"], "type": "function", "function": function}
        said.setdefault("tool_calls", []).append(call)
    elif kind != "redacted_thinking":
        raise UnrenderableError("shape")


def _result(block: dict[str, Any]) -> str:
    content = block.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    if {item["type"] for item in content} != {"text"}:
        raise UnrenderableError("tool_result")
    return "\n".join([item["text"] for item in content])


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


_NONE_SHOWN: Final[list[dict[str, Any]]] = []
"""What a template gets of tools of which vLLM shows none: an empty list, and null where none were sent."""
_GROWTH: Final = 4
"""Characters that names of namespaces may take in the names of their functions, for each byte of tools."""
_CUSTOM_INPUT: Final = "input"
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        _CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}
"""Parameters with which vLLM shows tools of type ``custom`` as functions (``vllm.tool_parsers.utils``)."""
_encoder: Final = msgspec.json.Encoder()
_responses_decoder: Final = msgspec.json.Decoder(ResponsesBody)
_messages_decoder: Final = msgspec.json.Decoder(MessagesBody)
