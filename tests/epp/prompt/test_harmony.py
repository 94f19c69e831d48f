"""Chats of gpt-oss, and its declarations of tools against the library that engines write them with."""

import json
from pathlib import Path
from typing import Any

import openai_harmony
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models import folders, vocabularies

from kvist_epp.prompt import harmony
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.harmony import HarmonyChats
from kvist_epp.prompt.harmony_tools import MAX_DEPTH, declare_tools
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.tools import template_tools

ROOM = 1_000_000
WORDS = ("a", "two words", "", 'q"t', "é😀", "a\nb", "x // y", "a\r\nb\rc\x85d\n\n")
KINDS = ("string", "number", "integer", "boolean", "object", "array", "null", "weird")
values = st.recursive(
    st.sampled_from((*WORDS, 0, -5, 1.5, 1e20, True, False, None)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2),
    max_leaves=4,
)
leaves: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), max_size=2),
    "description": st.sampled_from(WORDS),
    "title": st.sampled_from(WORDS),
    "default": values,
    "enum": st.lists(values, max_size=3),
    "examples": st.lists(values, max_size=2),
    "nullable": st.sampled_from((True, False, 1)),
    "required": st.lists(st.sampled_from("abc"), max_size=2),
}
schemas = st.recursive(
    st.fixed_dictionaries({}, optional=leaves),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **leaves,
            "properties": st.dictionaries(st.sampled_from(("c", "a", "b-d", "e f")), inner, max_size=3),
            "items": inner,
            "oneOf": st.lists(inner, max_size=3),
            "anyOf": st.lists(inner, max_size=1),
        },
    ),
    max_leaves=8,
)


def function(parameters: Any = None, description: str | None = "D", name: str = "f") -> dict[str, Any]:
    """A tool as a template sees it."""
    return {"function": {"name": name, "description": description, "parameters": parameters}}


def by_library(tools: list[dict[str, Any]]) -> str:
    """The section of a developer message in which engines declare these tools."""
    described = [
        openai_harmony.ToolDescription.new(
            name=one["function"]["name"],
            description=one["function"]["description"] or "",
            parameters=one["function"]["parameters"],
        )
        for one in tools
    ]
    content = openai_harmony.DeveloperContent.new().with_function_tools(described)
    message = openai_harmony.Message.from_role_and_content(openai_harmony.Role.DEVELOPER, content)
    encoding = vocabularies.harmony_encoding()
    written: str = encoding.decode(encoding.render(message))
    return written[written.index("# Tools") : written.rindex("<|end|>")]


@given(st.lists(st.builds(function, st.none() | schemas, st.none() | st.sampled_from(WORDS)), min_size=1))
def test_tools_are_declared_as_the_library_declares_them(tools: list[dict[str, Any]]) -> None:
    """Any schema gives the same text, valid or not."""
    assert declare_tools(tools, ROOM) == by_library(tools)


def test_a_declaration_names_what_a_call_may_have() -> None:
    """Comments, types, alternatives, optional properties and defaults are where the model expects them."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": ["integer", "null"]},
            "when": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"at": {}}}]},
        },
        "required": ["city"],
    }
    assert declare_tools([function(schema, "Weather", "get")], ROOM) == "\n".join(
        (
            *("# Tools", "", "## functions", "", "namespace functions {", ""),
            *("// Weather", "type get = (_: {", "// Where", "city: string,"),
            *('unit?: "c" | "f", // default: c', "days?: number | null,"),
            *("when?:", " | string", " | {", "   at?: any,", "   }", ","),
            *("}) => any;", "", "} // namespace functions"),
        )
    )


def nested(levels: int) -> dict[str, Any]:
    """A schema with so many levels of objects."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_deep_schemas_are_refused() -> None:
    """A schema has so many levels at most, since each is indented further; engines refuse sooner."""
    assert declare_tools([function(nested(50))], ROOM) == by_library([function(nested(50))])
    assert declare_tools([function(nested(MAX_DEPTH))], ROOM)
    with pytest.raises(UnrenderableError, match="tools"):
        declare_tools([function(nested(MAX_DEPTH + 1))], ROOM)


@pytest.mark.parametrize("tool", [function([]), function(name=5), function(description=5)])  # type: ignore[arg-type]
def test_tools_that_the_engine_refuses_are_not_declared(tool: dict[str, Any]) -> None:
    """Parameters that are no object, and names and descriptions that are no texts."""
    with pytest.raises(UnrenderableError, match="tool"):
        declare_tools([tool], ROOM)


def rendered(messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt behind the system message."""
    prompt = HarmonyChats().render(Chat(messages, **fields), 10_000)
    assert prompt.endswith("<|start|>assistant")
    return prompt.partition("<|end|>")[2].removesuffix("<|start|>assistant")


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_the_system_message_has_date_and_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines name the day and the effort, which is medium by default, and the channel of calls."""
    monkeypatch.setattr(harmony, "now", lambda _: "2026-11-28")
    tools = template_tools([{"type": "function", "function": {"name": "f"}}])
    plain, told = (
        HarmonyChats().render(Chat([USER])),
        HarmonyChats().render(Chat([USER], tools, effort="low")),
    )

    assert "\nCurrent date: 2026-11-28\n\nReasoning: medium\n\n# Valid" in plain
    assert "every message.<|end|><|start|>user<|message|>Hi<|end|>" in plain
    assert "\nReasoning: low\n" in told
    assert (
        "every message.\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>" in told
    )


def test_reasoning_is_shown_since_the_last_answer() -> None:
    """Reasoning up to the last answer is dropped, calls are kept, and results name the tool."""
    early = {"role": "assistant", "content": "Yes", "reasoning": "old"}
    late = {"role": "assistant", "content": "Look", "reasoning": "new", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    system = {"role": "system", "content": "Brief."}

    assert rendered([system, USER, early, USER, late, result]) == "".join(
        (
            "<|start|>developer<|message|># Instructions\n\nBrief.<|end|>",
            "<|start|>user<|message|>Hi<|end|>",
            "<|start|>assistant<|channel|>final<|message|>Yes<|end|>",
            "<|start|>user<|message|>Hi<|end|>",
            "<|start|>assistant<|channel|>commentary<|message|>Look<|end|>",
            "<|start|>assistant<|channel|>analysis<|message|>new<|end|>",
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>',
            "<|start|>functions.f<|channel|>commentary to=assistant<|message|>2<|end|>",
        )
    )


@pytest.mark.parametrize(
    ("messages", "fields", "why"),
    [
        ([{"role": "critic", "content": "x"}], {}, "shape"),
        ([{"role": "user", "content": ["x"]}], {}, "shape"),
        ([{"role": "user", "content": 5}], {}, "shape"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "shape"),
        ([USER], {"effort": "none"}, "effort"),
    ],
)
def test_chats_that_the_engine_refuses_are_not_rendered(
    messages: list[dict[str, Any]], fields: dict[str, Any], why: str
) -> None:
    """Unknown roles, contents and efforts have a fixed word as the reason."""
    with pytest.raises(UnrenderableError, match=why):
        rendered(messages, **fields)


def test_tools_that_grow_too_much_are_not_rendered() -> None:
    """Declarations are bounded by the size of the request, and given up where they exceed it."""
    tools = template_tools([{"type": "function", "function": {"name": "f", "parameters": nested(90)}}] * 300)
    with pytest.raises(UnrenderableError, match="work"):
        HarmonyChats().render(Chat([USER], tools), 30_000)
    with pytest.raises(UnrenderableError, match="work"):
        declare_tools(tools, 1_000)


@pytest.mark.parametrize(
    "number", [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 1e-7, 1e22, 1.0, -0.0, 12.5]
)
def test_numbers_are_written_as_the_library_writes_them(number: float) -> None:
    """Defaults have the digits of Rust, in which large integers are floating point numbers."""
    tool = function({"type": "object", "properties": {"a": {"type": "number", "default": number}}})
    assert declare_tools([tool], ROOM) == by_library([tool])


def test_no_schema_and_no_chat_raises_anything_else() -> None:
    """Defaults of too many levels, and arguments and numbers that cannot be printed, refuse the chat."""
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    for default in (deep, 10**400):
        tool = function({"type": "object", "properties": {"a": {"default": default}}})
        with pytest.raises(UnrenderableError, match="shape"):
            HarmonyChats().render(Chat([USER], [tool]), 10_000)


def test_tools_are_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The declarations are kept with the tools, which agents send each turn."""
    tools = template_tools([{"type": "function", "function": {"name": "f"}}])
    first = rendered([USER], tools=tools)
    monkeypatch.setattr(harmony, "declare_tools", None)
    assert rendered([USER], tools=tools) == first


def test_objects_are_printed_as_the_engine_prints_them() -> None:
    """Calls of /v1/messages have their arguments as objects, which vLLM prints with blanks and escapes."""
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1.0, "é"]}}
    body = {
        "model": "m",
        "max_tokens": 1,
        "messages": [USER, {"role": "assistant", "content": [used]}],
    }
    request = parse("/v1/messages", json.dumps(body).encode())
    assert request.chat is not None
    prompt = HarmonyChats().render(request.chat, request.size)
    assert '<|message|>{"a": [1.0, "\\u00e9"]}<|call|>' in prompt


def test_a_gpt_oss_needs_no_template(tmp_path: Path) -> None:
    """The type of the model decides, and its template is not used."""
    specials = ["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|return|>"]
    folder = folders.write_harmony(tmp_path, vocabularies.byte_level(specials))
    body = {"model": "m", "messages": [USER]}
    [prompt] = Model.load(str(folder)).prompts(parse("/v1/chat/completions", json.dumps(body).encode()))
    assert prompt.endswith(b"<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant")
