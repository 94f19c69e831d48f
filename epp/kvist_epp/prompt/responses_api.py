"""Parse the OpenAI Responses API as chats, as vLLM 0.33 does (``vllm.entrypoints.openai.responses.utils``).

Only shapes that are proven equal against vLLM's render endpoints are marked exact; anything else is
matched approximately.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UNREADABLE, UnrenderableError, system_message
from kvist_epp.prompt.request_types import (
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
from kvist_epp.prompt.tools import parse_tools, template_tools


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
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    prompt: Any = None
    truncation: Any = "disabled"
    kv_transfer_params: dict[str, Any] | None = None


def parse_responses(body: bytes) -> Request:
    """Parse a Responses request; raises as ``request.parse`` does."""
    sent = _responses_decoder.decode(body)
    given = (sent.previous_response_id, sent.previous_input_messages, sent.prompt)
    if (
        any(one is not None for one in given)
        or sent.truncation != "disabled"
        or sent.kv_transfer_params
        or replaces_prompt(sent.chat_template_kwargs)
    ):
        return by_load(Kind.RESPONSES, sent.model, body, "stateful", salt=sent.cache_salt)
    try:
        chat = _responses_chat(sent)
    except UNREADABLE:
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


def _responses_chat(sent: ResponsesBody) -> Chat:
    messages: list[dict[str, Any]] = []
    if sent.instructions:
        messages.append(system_message(sent.instructions))
    items = [{"role": "user", "content": sent.input}] if isinstance(sent.input, str) else sent.input
    refusal = ""
    try:
        for item in items:
            _add_item(messages, item)
    except UNREADABLE:
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
        template_kwargs=sent.chat_template_kwargs,
        tools_unwanted=sent.tool_choice == "none",
        items=items if sent.instructions is None else [system_message(sent.instructions), *items],
        refusal=refusal,
    )


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
_responses_decoder: Final = msgspec.json.Decoder(ResponsesBody)
