"""Chats of DeepSeek V3.2, V4 and V4.1, as they are written; ``tests/engine`` compares them with vLLM."""

import json
from typing import Any

import pytest

from kvist_epp.prompt.chat import MAX_MESSAGES, UnrenderableError
from kvist_epp.prompt.deepseek import MODES, PICTURE
from kvist_epp.prompt.deepseek_tools import MAX_ARGUMENTS
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.tools import Tool, template_tools

V32, V4, V41 = MODES
BEGIN, END, USER, ASKED = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
OFF = {"thinking": False}
MANY = json.dumps({str(number): 0 for number in range(MAX_ARGUMENTS + 1)})


def said(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content, **fields}


def call(identifier: str, arguments: str = "{}") -> dict[str, Any]:
    """A call of the function ``f``."""
    return {"id": identifier, "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(identifier: str) -> dict[str, Any]:
    """A result that names its call."""
    return said("tool", f"of {identifier}", tool_call_id=identifier)


def render(mode: str, *messages: dict[str, Any], tools: Any = None, **variables: Any) -> str:
    """The prompt without its first token."""
    prompt = MODES[mode]({}).render(Chat(list(messages), tools, variables=variables))
    assert prompt.startswith(BEGIN)
    return prompt.removeprefix(BEGIN)


CHAT = (said("system", "S"), said("user", "U"), said("assistant", "A", reasoning="R"), said("user", "V"))


@pytest.mark.parametrize(
    ("mode", "variables", "expected"),
    [
        (V32, {}, f"S{USER}U{ASKED}</think>A{END}{USER}V{ASKED}</think>"),
        (V32, {"thinking": True}, f"S{USER}U{ASKED}</think>A{END}{USER}V{ASKED}<think>"),
        (V4, OFF, f"S{USER}U{ASKED}</think>A{END}{USER}V{ASKED}</think>"),
        (V4, {"reasoning_effort": "low"}, f"S{USER}U{ASKED}</think>A{END}{USER}V{ASKED}<think>"),
        (
            V4,
            {"reasoning_effort": "low", "drop_thinking": False},
            f"S{USER}U{ASKED}<think>R</think>A{END}{USER}V{ASKED}<think>",
        ),
        (V41, OFF, f"<｜System｜>S{USER}U{ASKED}</think>A{END}{USER}V{ASKED}</think>"),
    ],
)
def test_a_chat_is_written_by_its_version(mode: str, variables: dict[str, Any], expected: str) -> None:
    """Instructions come first, answers end with a token, and reasoning is kept where it is asked for."""
    assert render(mode, *CHAT, **variables) == expected


@pytest.mark.parametrize(
    ("mode", "effort", "begins"),
    [
        (V4, None, "Reasoning Effort: Absolute maximum"),
        (V4, "max", "Reasoning Effort: Beyond maximum"),
        (V41, None, "<｜System｜>Reasoning Effort: 75 (range"),
        (V41, "low", "<｜System｜>Reasoning Effort: 50 (range"),
        (V41, 33, "<｜System｜>Reasoning Effort: 33 (range"),
    ],
)
def test_an_effort_is_written_in_front(mode: str, effort: Any, begins: str) -> None:
    """Versions that think by default get an effort, in words or as a number."""
    assert render(mode, *CHAT, **({} if effort is None else {"reasoning_effort": effort})).startswith(begins)


def test_results_of_v32_close_when_all_calls_have_one() -> None:
    """Each result is an element, and the last one opens the next answer."""
    calls = [call("a", '{"n": 1, "t": "x"}'), call("b")]
    called = said("assistant", None, tool_calls=calls)
    prompt = render(V32, said("user", "U"), called, result("a"), result("b"))
    given = (
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="t" string="true">x</｜DSML｜parameter>'
    )
    assert prompt == (
        f"{USER}U{ASKED}</think>\n\n<｜DSML｜function_calls>\n"
        f'<｜DSML｜invoke name="f">\n{given}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜function_calls>{END}\n\n<function_results>\n"
        "<result>of a</result>\n<result>of b</result>\n</function_results>\n\n</think>"
    )


@pytest.mark.parametrize("mode", [V4, V41])
def test_results_from_v4_on_come_in_the_order_of_the_calls(mode: str) -> None:
    """Results are parts of the user's turn, in the places that the results have among its texts."""
    prompt = render(
        mode,
        said("user", "U"),
        said("assistant", "A", tool_calls=[call("a"), call("b")]),
        result("b"),
        said("user", "V"),
        result("a"),
        **OFF,
    )
    turn = "<tool_result>of a</tool_result>\n\nV\n\n<tool_result>of b</tool_result>"
    assert prompt.endswith(f"{END}{USER}{turn}{ASKED}</think>")


def test_a_result_of_no_call_is_a_result() -> None:
    """Engines take null for an identifier: such a result has a place among the others."""
    chat = (
        said("user", "U"),
        said("assistant", "", tool_calls=[call("a"), call("b")]),
        result("b"),
        said("tool", "N", tool_call_id=None),
    )
    assert "<tool_result>N</tool_result>\n\n<tool_result>of b</tool_result>" in render(V4, *chat)


def test_results_alone_are_no_question_to_v41() -> None:
    """The reasoning before a result that closes a chat is kept, where V4 takes it for an earlier one's."""
    chat = (
        said("user", "U"),
        said("assistant", "", reasoning="R", tool_calls=[call("a")]),
        result("a"),
        said("assistant", "A", reasoning="Q"),
    )
    v4, v41 = render(V4, *chat), render(V41, *chat)
    assert ("R</think>" in v4, "R</think>" in v41, "Q</think>A" in v4, "Q</think>A" in v41) == (
        False,
        True,
        True,
        True,
    )


@pytest.mark.parametrize("mode", MODES)
def test_tools_are_declared_with_the_first_instructions(mode: str) -> None:
    """Each function is one line of JSON; instructions are made for them if there are none. The text is kept
    with the tools."""
    tools = template_tools([{"type": "function", "function": {"name": "f", "description": "é"}}])
    line = '\n{"name": "f", "description": "é", "parameters": null}\n'
    with_instructions = render(mode, said("system", "S"), said("user", "U"), tools=tools, **OFF)
    alone = render(mode, said("user", "U"), tools=tools, **OFF)
    first = tools[0]
    assert isinstance(first, Tool)
    assert (line in with_instructions, line in alone, len(first.texts)) == (True, True, 1)
    assert with_instructions.index(line) < with_instructions.index(f"{USER}U")


def test_tasks_ask_for_a_classification() -> None:
    """A message with a task is followed by the task's token, and its answer has no reasoning."""
    chat = (said("user", "U", task="title"), said("assistant", "A", reasoning="R"))
    prompt = render(V4, *chat, reasoning_effort="low", drop_thinking=False)
    assert prompt == f"{USER}U<｜title｜>A{END}"
    action = render(V4, said("user", "U", task="action"), **OFF)
    assert action == f"{USER}U{ASKED}</think><｜action｜>"


def test_pictures_stand_among_the_texts() -> None:
    """A picture is one placeholder in the place of its part."""
    a, b = ({"type": "text", "text": text} for text in "ab")
    parts = [a, {"type": "image_url", "image_url": {}}, b]
    for mode in (V4, V41):
        chats = MODES[mode]({})
        assert f"a\n\n{chats.media_text('image')}\n\nb" in render(mode, said("user", parts))
        assert (chats.media_text("image"), chats.media_text("audio")) == (PICTURE, "")


@pytest.mark.parametrize(
    ("mode", "chat", "variables"),
    [
        (V32, (said("tool", "x"),), {}),
        (V32, (said("user", "U"), result("a")), {}),
        (V32, (said("user", "U"), said("assistant", "A")), {"thinking": True}),
        (V32, (said("developer", ""),), {}),
        (V32, (said("critic", "x"),), {}),
        (V32, (said("user", [{"type": "image_url", "image_url": {}}]),), {}),
        (V32, (), {}),
        (V4, (said("critic", "x"),), {}),
        (V4, (said("user", "U", task="unknown"),), {}),
        (V4, (said("developer", None),), {}),
        (V4, (said("user", [{"type": "tool_reference", "name": "f"}]),), {}),
        (V41, (said("latest_reminder", "x"),), {}),
        (V41, (said("user", None),), {}),
        (V41, (said("user", "U"), said("assistant", "A", wo_eos=True)), {}),
        (V41, (said("system", "S", response_format={"a": 1}),), {}),
        (V41, (said("user", "U", content_blocks=[{"type": "text", "text": "other"}]),), {}),
        (V41, (said("user", "U", tools=[{"function": {}}]),), {}),
        (V41, (said("user", [{"type": "input_audio", "input_audio": {}}]),), {}),
        (V41, (said("user", f"{PICTURE}"),), {}),
        (V41, (said("user", "U"),), {"reasoning_effort": "medium"}),
        (V41, (said("user", "U"),), {"reasoning_effort": 101}),
        (V41, (said("user", "U"),), {"reasoning_effort": [1]}),
        (V41, (said("user", "U"), said("assistant", "", tool_calls=[{"id": "a"}])), {}),
    ],
)
def test_what_the_engine_refuses_or_reads_otherwise_is_not_rendered(
    mode: str, chat: tuple[dict[str, Any], ...], variables: dict[str, Any]
) -> None:
    """Such a chat has no prompt, and raises nothing else."""
    with pytest.raises(UnrenderableError):
        render(mode, *chat, **variables)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "chat",
    [
        [said("developer", "D", tools=[{"function": {}}])] * 3_000,
        [said("user", "U")] * (MAX_MESSAGES + 1),
        [said("user", "U"), said("assistant", "", tool_calls=[call("a", MANY)])],
    ],
    ids=["declarations", "messages", "arguments"],
)
def test_the_work_of_a_chat_is_bounded(mode: str, chat: list[dict[str, Any]]) -> None:
    """A chat that makes much of little, or takes long, is not rendered."""
    with pytest.raises(UnrenderableError, match="work"):
        MODES[mode]({}).render(Chat(chat), 100_000)


def test_defaults_of_the_engines_yield_to_the_request() -> None:
    """A variable that engines were started with holds for requests that do not set it."""
    chats = MODES[V32]({"thinking": True})
    asked = [said("user", "U")]
    assert chats.render(Chat(asked)).endswith("<think>")
    assert chats.render(Chat(asked, variables=OFF)).endswith("</think>")
