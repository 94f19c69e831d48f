"""Promises of ``chat``: messages and tools as a template sees them (the engine's side: ``tests/engine``)."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist_epp.prompt.chat import (
    MEDIA_MARK,
    ContentFormat,
    UnrenderableError,
    call_arguments,
    merge_developer_messages,
    template_messages,
)
from kvist_epp.prompt.tools import parse_tools, template_tools

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "what is it?"}


def call(arguments: Any) -> dict[str, Any]:
    """An assistant message with one call."""
    function = {"name": "f", "arguments": arguments, "extra": 1}
    return {
        "role": "assistant",
        "tool_calls": [{"function": function, "type": "function", "id": "c", "index": 0}],
    }


@pytest.mark.parametrize(
    ("style", "content"),
    [
        ("string", f"{MEDIA_MARK}\nwhat is it?"),
        ("openai", [{"type": "image"}, {"type": "text", "text": "what is it?"}]),
    ],
    ids=("string", "openai"),  # the mark differs between processes
)
def test_media_stand_where_the_engine_puts_them(style: ContentFormat, content: Any) -> None:
    """In front of the message's text, or as a part of their own."""
    assert template_messages([{"role": "user", "content": [IMAGE, TEXT]}], style) == [
        {"role": "user", "content": content}
    ]


@pytest.mark.parametrize(
    ("style", "role", "content"),
    [
        ("string", "user", "a\nb"),
        ("string", "tool", "a\nb"),
        ("openai", "tool", "\na\n\nb"),
        ("openai", "user", [{"type": "text", "text": text} for text in ("", "a", "", "b")]),
    ],
)
def test_empty_texts_are_left_out_of_one_text(style: ContentFormat, role: str, content: Any) -> None:
    """A template that takes one text gets none of the empty parts; one that takes parts gets them all."""
    parts = [{"type": "text", "text": text} for text in ("", "a", "", "b")]
    [message] = template_messages([{"role": role, "content": parts}], style)
    assert message["content"] == content


def test_tool_calls_have_the_validated_order_and_parsed_arguments() -> None:
    """Fields as the chat API's types order them, unknown ones behind."""
    [message] = template_messages([call('{"b": 1, "a": 2}')], "string")
    [seen] = message["tool_calls"]
    assert (list(seen), list(seen["function"].items())) == (
        ["id", "function", "type", "index"],
        [("arguments", {"b": 1, "a": 2}), ("name", "f"), ("extra", 1)],
    )


@pytest.mark.parametrize("size", [1, 480, 512, 5_000])
def test_arguments_of_any_length_are_parsed_each_time_alike(size: int) -> None:
    """Arguments that are cached, and those that are too long for it, are the same object in each turn."""
    sent = {"path": "x" * size, "n": [1, {"é": None}]}
    for _ in range(2):
        [message] = template_messages([call(json.dumps(sent))], "string")
        assert message["tool_calls"][0]["function"]["arguments"] == sent


def parsed_as_vllm_does(arguments: str) -> Any:
    """Return what ``json`` makes of arguments: an object, or an empty one."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_OBJECTS = st.dictionaries(st.text(), st.recursive(_LEAVES, st.lists, max_leaves=5), max_size=4)


@given(arguments=_OBJECTS.map(json.dumps) | st.text().map(lambda text: f'{{"a": {text}}}'))
@example('{"a": 1e400}')
@example('{"a": NaN, "b": -Infinity}')
@example('{"a": "\\ud800"}')
@example('{"a": 1, "a": 2}')
@example('{"a": "\ud800"}')
@example('{"a": -0, "b": 123456789012345678901234567890, "c": 1.0}')
@example('{"a": "\x00"}')
@example('{"a": ' + "[" * 988 + "]" * 988 + "}")
def test_arguments_are_parsed_as_json_does(arguments: str) -> None:
    """A faster parser gives what vLLM's gives, whatever a model wrote."""
    expected = parsed_as_vllm_does(arguments)
    assert repr(call_arguments(arguments)) == repr(expected)


@pytest.mark.parametrize("arguments", ["", "nonsense", "[1]", "5", "null", "[" * 100_000, None, {}, 0])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: Any) -> None:
    """A conversation goes on after a model's malformed call."""
    [message] = template_messages([call(arguments)], "string")
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": 5, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "hologram"}]},
        {"role": "user", "content": [{"type": "thinking"}]},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "tool_calls": [5]},
    ],
)
@pytest.mark.parametrize("style", ["string", "openai"])
def test_shapes_the_engine_refuses_are_not_rendered(message: dict[str, Any], style: ContentFormat) -> None:
    """Messages that the engine refuses are not rendered."""
    with pytest.raises(UnrenderableError):
        template_messages([message], style)


def test_developer_messages_join_the_system_in_front() -> None:
    """For a template without that role all system texts become one, first."""
    before: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d", "tools": None},
        {"role": "system", "content": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]},
    ]
    assert merge_developer_messages(before) == [
        {"role": "system", "content": "d\n\ns\nt"},
        {"role": "user", "content": "u"},
    ]


def test_the_same_tools_are_the_same_objects() -> None:
    """An agent's tools are decoded once, so that their JSON is remembered."""
    raw = b'[{"type":"function","function":{"name":"f"}}]'
    first, second = parse_tools(msgspec.Raw(raw)), parse_tools(msgspec.Raw(raw))
    assert first is not None
    assert first is second


@pytest.mark.parametrize("tools", [[], [{}], [{"type": "web"}], [{"function": 5}]])
def test_what_is_no_function_is_not_rendered(tools: list[dict[str, Any]]) -> None:
    """The engine refuses it, or knows better."""
    with pytest.raises(UnrenderableError):
        template_tools(tools)
