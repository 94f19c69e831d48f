"""Promises of plans for the chats of agents: calls, their arguments and results, and reasoning."""

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.prompt.test_render_plan import (
    LOOKS,
    PUBLISHED,
    contents,
    pair_source,
    plans,
    without_addresses,
)
from tests.epp.prompt.test_template_parity import SPECIALS

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.render_plan import RenderPlan, shape_of
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template

ARGUMENTS = ['{"a": 1}', '{"path": "é", "n": [1, {"b": null}]}', "{}", "", "no JSON", "[1]", '{"x": 1.50}']
_EACH = "{% for m in messages %}"
_CALL = _EACH + "{% for c in m.tool_calls or [] %}"
_ENDS = "{% endfor %}{% endfor %}"
CALLS_SHOWN = [
    _EACH + "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}: "
    "{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{{ m.name }}{% endfor %}",
    _EACH + "{{ m.content | tojson }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}",
    _CALL + "{% if c.function.arguments is mapping %}"
    "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson(indent=2) }}{% endif %}"
    "{{ 'none' if not c.function.arguments }}{{ c.function.arguments is string }}{{ m.content }}" + _ENDS,
    _CALL + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}" + _ENDS,
    _CALL + "{{ c.function.arguments }}{{ c.function.arguments | length }}" + _ENDS,
    _CALL + "{{ c.function.arguments.a }}{{ c.function.arguments['a'] }}" + _ENDS,
    _EACH + "{{ (m.tool_calls or []) | map(attribute='function') | list | tojson }}{% endfor %}",
    _CALL + "{{ c | tojson }}{% for k, v in c.items() %}{{ k }}{% endfor %}"
    "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}" + _ENDS,
    _EACH + "{{ m | tojson }}{% for c in m.tool_calls or [] %}{{ c.function.arguments == {} }}"
    "{{ c.function.arguments is iterable }}{{ c.function.arguments ~ 1 }}" + _ENDS,
]
"""Templates that do all kinds of things with calls; all but the first three cannot be traced."""
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
    "(m.content.startswith('<t>') and m.content.endswith('</t>')) %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
REASONING_SHOWN = [
    _LAST_QUESTION + _EACH + "<{{ m.role }}>{% if m.reasoning_content is string and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content.strip('\\n') }}</think>{% endif %}{{ m.content }}{% endfor %}",
    _EACH + "{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content or '' }}{{ m.name }}{% endfor %}",
    _EACH + "{{ m.content ~ m.get('reasoning', '') }}{{ m.keys() | list }}{% endfor %}",
]
"""Templates that show reasoning: that behind the last question, all of it, and the names of all fields."""


@st.composite
def chats_of_agents(draw: st.DrawFn) -> list[Chat]:
    """Return several chats of agents with the same roles, whose calls and contents have few forms."""
    turns = draw(st.lists(st.sampled_from(["user", "assistant", "calls", "tool"]), min_size=1, max_size=5))
    counts = [draw(st.integers(0, 2)) for _ in turns]
    with_names, canonical = draw(st.booleans()), draw(st.booleans())
    thinking = draw(st.lists(st.sampled_from(["reasoning", "reasoning_content"]), unique=True))

    def call(number: int) -> dict[str, Any]:
        function = {"name": draw(contents), "arguments": draw(st.sampled_from(ARGUMENTS))}
        made = {"id": f"call_{number}", "type": "function", "function": function}
        return made if canonical else dict(reversed(made.items()))

    def message(kind: str, count: int) -> dict[str, Any]:
        if kind == "calls":
            content = draw(st.sampled_from([None, "", "text", "</think> x"]))
            more = {field: draw(contents) for field in thinking}
            calls = list(map(call, range(count)))
            return {"role": "assistant", "content": content, "tool_calls": calls, **more}
        if kind == "tool":
            more = {"name": draw(contents)} if with_names else {}
            return {"role": "tool", "content": draw(contents), "tool_call_id": "call_0", **more}
        more = {field: draw(contents) for field in thinking} if kind == "assistant" else {}
        return {"role": kind, "content": draw(contents), **more}

    reorder = draw(st.booleans())
    return [
        Chat([message(*turn) for turn in zip(turns, counts, strict=True)], reorder_calls=reorder)
        for _ in range(draw(st.integers(4, 6)))
    ]


@pytest.mark.parametrize("source", [*PUBLISHED, *LOOKS, *CALLS_SHOWN, *REASONING_SHOWN])
@settings(max_examples=15, deadline=None)
@given(chats=chats_of_agents())
def test_chats_of_agents_are_rendered_as_the_template_does(source: str, chats: list[Chat]) -> None:
    """Calls, their arguments and results, and reasoning come out as by the template, which parity tests
    compare with jinja2, whatever plans were made before."""
    template = Template(pair_source(source) if source in PUBLISHED else source, SPECIALS)
    for chat in chats:
        try:
            expected = template._rendered(chat)
        except UnrenderableError:
            expected = None
        try:
            rendered = template.render(chat)
        except UnrenderableError:
            rendered = None
        assert without_addresses(rendered) == without_addresses(expected)


def agent(*texts: str) -> Chat:
    """Return a chat in which the model calls a tool with each text, and answers at the end."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "do"}]
    for number, text in enumerate(texts):
        function = {"name": f"f{len(text)}", "arguments": json.dumps({"text": text})}
        call = {"id": f"call{number:05}", "type": "function", "function": function}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return Chat(turns)


@pytest.mark.parametrize("source", ["sim", "chatml", "deepseek", "llama3", *CALLS_SHOWN[:3]])
def test_agents_have_plans(source: str) -> None:
    """The third chat of a shape has a plan if the template prints arguments as JSON."""
    template = Template(pair_source(source) if source in PUBLISHED else source, SPECIALS)
    for text in ("one", "two"):
        template.render(agent(text, f"{text}!"))
    [plan] = plans(template)
    third = agent("three \u00e9", "")
    known = shape_of(third, {}, template.style)
    assert known is not None
    assert plan.render(known[1]) in (template._rendered(third), None)
    fourth = agent("four", "x")
    known = shape_of(fourth, {}, template.style)
    assert known is not None
    assert plan.render(known[1]) == template._rendered(fourth)


@pytest.mark.parametrize("source", ["sim", "chatml", *REASONING_SHOWN])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_answers_with_their_reasoning_have_plans(source: str, field: str) -> None:
    """Agents that send the reasoning of earlier answers back have a plan, under either name of the field."""
    template = Template(pair_source(source) if source in PUBLISHED else source, SPECIALS)
    for text in ("one", "two", "three"):
        chat = agent(text, f"{text}!")
        for answer in chat.messages[1::2]:
            answer[field] = f"because {text}"
        rendered = template.render(chat)
        assert rendered == template._rendered(chat)
        assert source != REASONING_SHOWN[1] or f"[because {text}]" in rendered
    assert len(plans(template)) == 1


@pytest.mark.parametrize("source", CALLS_SHOWN[3:7])
def test_templates_that_read_arguments_have_no_plan(source: str) -> None:
    """A template that goes through the arguments of a call runs for each chat."""
    template = Template(source, SPECIALS)
    for _ in range(6):
        template.render(agent("one"))
    assert plans(template) == []


def test_attempts_end_where_all_of_them_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that goes through arguments is traced for a few shapes with calls, and for those without."""
    template = Template(CALLS_SHOWN[3], SPECIALS)
    assert template._plans is not None
    attempts = []
    made = template._plans._made

    def counted(*arguments: Any) -> RenderPlan | None:
        attempts.append(arguments)
        return made(*arguments)

    monkeypatch.setattr(template._plans, "_made", counted)
    for count in range(1, 11):
        for _ in range(3):
            template.render(agent(*["x"] * count))
    assert len(attempts) == 8 + 1  # of 20
    for _ in range(2):
        template.render(Chat([{"role": "user", "content": "x"}]))
    assert len(plans(template)) == 1


def test_arguments_that_are_nested_too_deeply_fail_as_in_the_template() -> None:
    """Arguments that JSON cannot print are no plan's, and never an error of another kind."""
    template = Template(CALLS_SHOWN[0], {})
    for text in ("one", "two", "three"):
        template.render(agent(text))
    for depth in range(900, 1_000, 3):
        chat, nested = agent("x"), "[" * depth + "]" * depth
        chat.messages[1]["tool_calls"][0]["function"]["arguments"] = f'{{"a": {nested}}}'
        with contextlib.suppress(UnrenderableError):
            template.render(chat)


@pytest.mark.parametrize("source", ["sim", *CALLS_SHOWN[:3]])
def test_plans_of_agents_keep_nothing_of_their_calls(source: str) -> None:
    """Contents, ids, names and arguments of the chat that a plan was made of are not kept."""
    template = Template(pair_source(source) if source in PUBLISHED else source, SPECIALS)
    for _ in range(3):
        template.render(agent("a secret", "another secret"))
    [plan] = plans(template)
    shown = repr([plan._form, plan._order, plan._steps])
    kept = re.sub(r"0x[0-9a-f]+", "", shown)  # addresses of objects, any of which may have an "f8"
    assert not any(text in kept for text in ("secret", "call0", "f8"))
