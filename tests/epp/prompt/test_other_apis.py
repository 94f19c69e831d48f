"""Tests say what of the Responses and Messages APIs is claimed, and what is not."""

import json
from typing import Any

import pytest

from kvist_epp.prompt.chat import MAX_MESSAGES, UnrenderableError, template_messages, with_system_first
from kvist_epp.prompt.request import Chat, Kind, parse
from kvist_epp.prompt.template import Template

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}


def ask(path: str, **fields: Any) -> Any:
    """A parsed request."""
    return parse(path, json.dumps({"model": "m", **fields}).encode())


def test_responses_become_a_chat() -> None:
    """Instructions first; the engine adds the tokenizer's own tokens here."""
    request = ask(RESPONSES, input="hi", instructions="Brief.", max_output_tokens=5, stream=True)
    messages = [{"role": "system", "content": "Brief."}, USER]
    assert (request.kind, request.chat, request.max_tokens, request.stream, request.add_special_tokens) == (
        Kind.RESPONSES,
        Chat(messages, reorder_calls=False, items=messages),
        5,
        True,
        True,
    )


def test_messages_become_a_chat() -> None:
    """A system text, turns, and results of tools before what the user says."""
    content = [{"type": "text", "text": "so?"}, {"type": "tool_result", "tool_use_id": "c", "content": "17"}]
    request = ask(MESSAGES, system="Brief.", messages=[{"role": "user", "content": content}], max_tokens=5)
    assert (request.kind, request.chat, request.max_tokens, request.exact) == (
        Kind.MESSAGES,
        Chat(
            [
                {"role": "system", "content": "Brief."},
                {"role": "tool", "tool_call_id": "c", "content": "17"},
                {"role": "user", "content": "so?"},
            ],
            parsed_arguments=True,
        ),
        5,
        True,
    )


SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
SHOWN = {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "fields", "tool"),
    [
        (RESPONSES, {"input": "hi"}, {"type": "function", **SHOWN["function"]}),  # type: ignore[dict-item]
        (MESSAGES, {"messages": [USER]}, {"name": "f", "description": "does", "input_schema": SCHEMA}),
    ],
)
def test_tools_are_parsed_once(path: str, fields: dict[str, Any], tool: dict[str, Any]) -> None:
    """A request gets the tools of an earlier one with the same bytes, whose texts are kept with them; an
    empty list is none in the Responses API only."""
    first, second = (ask(path, **fields, tools=[tool]).chat.tools for _ in range(2))
    assert first == [SHOWN]
    assert second is first
    assert ask(path, **fields, tools=None).chat.tools is None
    assert ask(path, **fields, tools=[]).chat.tools == ([] if path == MESSAGES else None)
    assert ask(path, **fields, tools=[1]).why == ask(path, **fields, tools={}).why == "shape"


def test_tools_of_one_api_are_none_of_another() -> None:
    """Tools that are the same bytes in two APIs are read as each of them reads tools."""
    tool = {"type": "function", "name": "f", "function": {"name": "g"}, "input_schema": SCHEMA}
    chats = [
        ask(path, **fields, tools=[tool]).chat.tools[0]["function"]["name"]
        for path, fields in (
            ("/v1/chat/completions", {"messages": [USER]}),
            (MESSAGES, {"messages": [USER]}),
            (RESPONSES, {"input": "hi"}),
        )
    ]
    assert chats == ["g", "f", "f"]


def test_arguments_of_tools_reach_the_template_unchanged() -> None:
    """A call's input is the object that the template gets, whatever is in it."""
    given = {"n": 1.50, "big": 10**30, "text": "\u00e9\U0001f600", "deep": [{"x": None}], "e": 1e22}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": given}
    chat = ask(MESSAGES, messages=[USER, {"role": "assistant", "content": [block]}]).chat
    [call] = template_messages(chat.messages, "string")[1]["tool_calls"]
    assert call["function"]["arguments"] == given


def test_system_messages_may_stand_between_others() -> None:
    """Claude Code sends some: they stay where they are, those of billing alone are left out, and a template
    that refuses them gets one at the beginning."""
    billing = {"role": "system", "content": "x-anthropic-billing-header: 1"}
    note = {"role": "system", "content": [{"type": "text", "text": "Note."}]}
    chat = ask(MESSAGES, messages=[USER, billing, note, USER], system="Brief.").chat
    noted = {"role": "system", "content": "Note."}
    told = {"role": "system", "content": "Brief."}
    assert (chat.messages, chat.inline_system) == ([told, USER, noted, USER], True)
    assert with_system_first(chat).messages == [{**told, "content": "Brief.Note."}, USER, USER]
    assert not ask(MESSAGES, messages=[USER, billing], system="Brief.").chat.inline_system


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (RESPONSES, {"input": "x", "prompt": {"id": "p"}}),
        (RESPONSES, {"input": "x", "previous_input_messages": [USER]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n" * 900, "tools": [{}] * 9}]}),
        (RESPONSES, {"input": "x", "truncation": "auto"}),
        (RESPONSES, {"input": "x", "chat_template_kwargs": {"chat_template": "t"}}),
        (RESPONSES, {"input": "x", "tools": [{"name": "no type"}]}),
        (RESPONSES, {"input": [{"type": "message"}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": []}]}),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}),
        (MESSAGES, {"messages": [{"role": "user"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
        ),
        (MESSAGES, {"messages": [USER], "tools": [{"name": "f"}]}),
    ],
)
def test_what_is_not_proven_is_not_claimed(path: str, fields: dict[str, Any]) -> None:
    """State on the server, truncation and unknown items are not rendered."""
    request = ask(path, **fields)
    assert request.model == "m"
    assert (request.chat, request.exact) == (None, False) or request.chat.refusal


def test_items_of_one_answer_are_one_message() -> None:
    """Reasoning, text and calls become a message of the chat, each at most once, and results follow it."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"}
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "é"}
    output = {"type": "custom_tool_call_output", "call_id": "2", "output": "done"}
    items = [USER, thought, said, call, custom, output, thought, thought]
    chat = ask(RESPONSES, input=items, instructions="Brief.").chat

    functions = [
        {"name": "n__f", "arguments": "{}"},
        {"name": "patch", "arguments": '{"input": "é"}'},
    ]
    calls = [
        {"id": str(number), "function": function, "type": "function"}
        for number, function in enumerate(functions, 1)
    ]
    assert chat.messages == [
        {"role": "system", "content": "Brief."},
        USER,
        {"role": "assistant", "reasoning": "hm", "content": "look", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "2"},
        {"role": "assistant", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "hm"},
    ]
    assert chat.items == [{"role": "system", "content": "Brief."}, *items]


def test_what_a_result_holds_besides_texts_becomes_messages_of_its_own() -> None:
    """Pictures are shown by the user, and tools that a search found are named by a second result."""
    source = {"type": "base64", "data": "A"}
    found = {"type": "tool_reference", "tool_name": "f"}
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "source": source},
        found,
        {"type": "document"},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    chat = ask(MESSAGES, messages=[{"role": "user", "content": [result, {"type": "text", "text": "b"}]}]).chat
    tool = {"role": "tool", "tool_call_id": "c"}
    assert chat.messages == [
        {**tool, "content": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": source}]},
        {**tool, "content": [{"type": "tool_reference", "name": "f"}]},
        {"role": "user", "content": "b"},
    ]
    assert not chat.refusal


def test_a_result_in_an_answer_is_a_text_of_it() -> None:
    """Engines print what it holds: a text, or Python's words for a list, which are not rendered here."""
    result: dict[str, Any] = {"type": "tool_result", "content": "it's"}
    chat = ask(MESSAGES, messages=[{"role": "assistant", "content": [result]}]).chat
    assert chat.messages == [{"role": "assistant", "content": "Tool result: it's"}]
    result = {"type": "tool_result", "content": [{"type": "text", "text": "it's"}]}
    assert ask(MESSAGES, messages=[{"role": "assistant", "content": [result]}]).chat.refusal


def test_a_picture_without_an_address_is_none() -> None:
    """Engines leave out pictures of results whose URL is empty."""
    empty = [{"type": "image", "source": source} for source in ({"type": "url"}, {"type": "url", "url": ""})]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}, *empty]}
    chat = ask(MESSAGES, messages=[{"role": "user", "content": [result]}]).chat
    assert chat.messages == [{"role": "tool", "tool_call_id": "c", "content": "a"}]


def test_thoughts_of_an_answer_are_one_text() -> None:
    """However many parts it has."""
    thoughts = [{"type": "thinking", "thinking": part} for part in ("a", "", "b")]
    chat = ask(MESSAGES, messages=[USER, {"role": "assistant", "content": thoughts}]).chat
    assert chat.messages[1] == {"role": "assistant", "reasoning": "ab"}


def test_a_chat_of_very_many_blocks_is_not_rendered() -> None:
    """Rendering takes too long for the only thread, so the chat is matched as it was sent."""
    blocks = [{"type": "text", "text": "a"}] * (MAX_MESSAGES + 1)
    assert ask(MESSAGES, messages=[{"role": "user", "content": blocks}]).chat.refusal


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ([("tool_addition", "f")], ["f", "h"]),
        ([("tool_removal", "h")], ["f"]),
        ([("tool_removal", "h"), ("tool_addition", "h")], ["f", "h"]),
        ([("tool_addition", {"name": "g", "input_schema": SCHEMA})], ["f", "h", "g"]),
        ([("tool_removal", "f"), ("tool_removal", "h")], []),
        ([("tool_addition", "f"), ("tool_addition", "f")], ["f", "h"]),
    ],
)
def test_a_template_sees_the_tools_that_are_left_at_the_end(
    blocks: list[tuple[str, Any]], names: list[str]
) -> None:
    """Messages of the system add tools, by name or by value, and remove them; what is added is not
    deferred."""
    tools = [{"name": "f", "input_schema": {}, "defer_loading": True}, {"name": "h", "input_schema": {}}]
    changes = [
        {
            "type": kind,
            "tool": {"type": "tool_reference", "name": change}
            if isinstance(change, str)
            else {"type": "tool_definition", "definition": change},
        }
        for kind, change in blocks
    ]
    chat = ask(MESSAGES, tools=tools, messages=[USER, {"role": "system", "content": changes}]).chat
    assert [tool["function"]["name"] for tool in chat.tools] == names
    deferred = [tool["function"]["name"] for tool in chat.tools if tool["function"].get("defer_loading")]
    assert deferred == [name for name in ["f"] if ("tool_addition", "f") not in blocks and name in names]


def test_a_change_of_an_unknown_tool_is_not_rendered() -> None:
    """Engines refuse it; its other messages are kept for their plain text."""
    change = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    request = ask(MESSAGES, messages=[USER, {"role": "system", "content": [change]}])
    assert (request.chat.refusal, request.exact) == ("shape", False)


@pytest.mark.parametrize(
    "item", [{"type": "telepathy"}, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]
)
def test_items_that_no_template_gets_are_named(item: dict[str, Any]) -> None:
    """A chat with such an item is kept for formats that may read it; a template refuses it."""
    chat = ask(RESPONSES, input=[USER, item]).chat
    assert (chat.refusal, chat.items) == ("shape", [USER, item])
    with pytest.raises(UnrenderableError, match="shape"):
        Template("x", {}).render(chat, 100)


def test_tools_of_the_responses_api_are_functions() -> None:
    """Functions of a namespace have its name, custom tools one text, and those of OpenAI are not shown."""
    inner = {"type": "function", "name": "find", "description": "does", "parameters": SCHEMA}
    space = {"type": "namespace", "name": "crm", "tools": [inner, {"type": "custom", "name": "x"}]}
    tools = [{"type": "web_search"}, space, {"type": "custom", "name": "patch", "description": "d"}]
    found, custom = (tool["function"] for tool in ask(RESPONSES, input="x", tools=tools).chat.tools)

    assert found == {"name": "crm__find", "description": "does", "parameters": SCHEMA}
    assert (custom["name"], custom["description"]) == ("patch", "d")
    assert custom["parameters"]["required"] == ["input"]


def test_tools_that_are_not_shown_are_no_tools_that_were_not_sent() -> None:
    """A template gets an empty list of tools that only OpenAI runs, and null where none were sent."""
    hidden = [{"type": "web_search"}]
    shown = [ask(RESPONSES, input="x", tools=tools).chat.tools for tools in (hidden, [], None)]
    assert shown == [[], None, None]


def test_thinking_that_is_switched_off_is_an_effort() -> None:
    """The effort is none, unless the rules of the model say another."""
    request = ask(MESSAGES, messages=[USER], thinking={"type": "disabled"})
    assert (request.exact, request.chat.thinking_off, request.chat.variables) == (
        True,
        True,
        {"reasoning_effort": "none", "enable_thinking": False},
    )
