"""Promises of ``tool_texts``: declarations of tools are written once, and are what jinja2 writes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.prompt.test_template_parity import ODD, SPECIALS, pair

from kvist_epp.prompt.chat import UnrenderableError, template_messages
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.template_environment import LOOP_LIMIT
from kvist_epp.prompt.tools import Tool, template_tools

_PARAMETERS = """{% macro declared(p, depth=0) %}
{% if p.properties is mapping %}{% set ns = namespace(n=0) %}
{% for name, one in p.properties.items() %}
{% set ns.n = ns.n + 1 %}{{ depth }}{{ ns.n }}{{ name }}: {{ declared(one, depth=depth + 1) }}
{% if not loop.last %}, {% endif %}
{% endfor %}
{% else %}{{ p.type }}{% endif %}
{% endmacro %}"""
_ALONE = """{% for t in tools %}{{ loop.index }}{{ t.function.name }}
{% for p in t.function.parameters.properties %}{{ p }}{% endfor %}{% if not loop.last %};{% endif %}
{% endfor %}{{ messages[0].content }}
---
{% for t in tools %}{{ declared(t.function.parameters) }}{% endfor %}{{ messages | length }}
---
{% macro all(tools, end='!') %}
{% for t in tools %}{{ declared(t.function.parameters) }}{% endfor %}{{ end }}
{% endmacro %}
{{ all(tools) }}{{ all(tools, end='?') }}{{ all(tools[1:]) }}
{{ all(tools | rejectattr('function.strict') | list, '.') }}
{{ all([tools[0], tools[-1]]) }}{{ all(tools[:2]) }}
---
{% macro one(t) %}{% for x in [1, 2] %}{{ declared(t.function.parameters) }}{% endfor %}{% endmacro %}
{% for m in messages %}{% for t in tools %}{{ one(t) }}{% endfor %}{{ m.content }}{% endfor %}
---
{% if tools is not defined %}{% set tools = [] %}{% endif %}
{% for t in tools %}
{% set ns = namespace(x=t.function.name) %}{% set ns.x = ns.x ~ 1 %}{{ ns.x }}{{ t | tojson }}
{% endfor %}
"""
ALONE = [_PARAMETERS + source for source in _ALONE.split("---\n")]
"""Templates whose loops and macros use the tools alone."""
_TOGETHER = """{% for t in tools %}{{ messages[-1].content }}{{ t.function.name }}{% endfor %}
---
{% for t in tools %}{{ mood }}{{ t.function.name }}{% endfor %}
---
{% set ns = namespace(n=0) %}
{% for t in tools %}{% set ns.n = ns.n + messages | length %}{{ t.function.name }}{% endfor %}{{ ns.n }}
---
{% set ns = namespace(n=0) %}{% for t in tools %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
---
{% set ns = namespace(n=0) %}{% for t in tools %}{% set ns.n = t.function.name %}{% endfor %}{{ ns.n }}
---
{% macro say(t, m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(tools[0], m) }}{% endfor %}
---
{% macro say(t, x=1, y=1) %}{{ x }},{{ y }}{% endmacro %}{{ say(tools[0], x=2) }}{{ say(tools[0], y=2) }}
---
{% set before = messages[0].content %}{% macro inner(t) %}{{ before }}{% endmacro %}
{% macro say(t) %}{{ inner(t) }}{% endmacro %}{% macro all(t) %}{{ say(t) }}{% endmacro %}
{% for t in tools %}{{ all(t) }}{% endfor %}
---
{% set before = messages[0].content %}{% macro say(t) %}{{ before }}{{ t.function.name }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{{ t.function.name }}{{ mood }}{% endmacro %}{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t, x=mood) %}{{ t.function.name }}{{ x }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{% if t.function.strict %}{% set mood = 1 %}{% endif %}{{ mood }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}
{% if t.function.strict %}{% set x = 1 %}{% elif t.function.parameters %}{% set x = 2 %}{% endif %}{{ x }}
{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{% for x in [1] if mood %}{{ t.function.name }}{% endfor %}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{% for y in [1] %}{% set x = 1 %}{% endfor %}{{ x }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{% set mine %}{{ mood }}{% endset %}{{ mine }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro say(t) %}{{ caller() }}{{ t.function.name }}{% endmacro %}
{% for t in tools %}{% call say(t) %}{{ messages | length }}{% endcall %}{% endfor %}
---
{% macro say(t) %}{{ varargs }}{{ kwargs }}{{ t.function.name }}{% endmacro %}
{% for t in tools %}{{ say(t, messages | length) }}{{ say(t, more=mood) }}{% endfor %}
---
{% macro say(x) %}{{ x.y }}{% endmacro %}
{% for t in tools %}{{ say({'y': messages | length, 't': t}) }}{% endfor %}
---
{% macro all(tools, more) %}{% for t in tools %}{{ more }}{% endfor %}{% endmacro %}
{{ all(tools, messages | length) }}{{ all(tools, 1) }}{{ all(tools, true) }}
---
{% macro all(x) %}{% set more = x %}{% for t in tools %}{{ more }}{% endfor %}{% endmacro %}
{{ all(messages[0].content) }}
---
{% for m in messages %}
{% for t in tools %}{{ m.content }}{% endfor %}{% for t in tools %}{{ t.function.name }}{% endfor %}
{% endfor %}
---
{% for m in messages %}{% set x = m.content %}{% for t in tools %}{{ x }}{% endfor %}{% endfor %}
---
{% set say = messages | length %}{% for t in tools %}{{ say }}{% endfor %}{% macro say(t) %}x{% endmacro %}
---
{% macro say(t) %}1{% endmacro %}{% if mood %}{% macro say(t) %}2{% endmacro %}{% endif %}
{% for t in tools %}{{ say(t) }}{% endfor %}
---
{% macro inner(t) %}{{ mood }}{% endmacro %}{% macro say(t) %}{{ inner(t) }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}{{ say(tools[0]) }}
---
{% for t in tools %}{% set x, y = mood, t %}{{ x }}{% set y = x %}{{ y }}{% endfor %}{{ tools | tojson }}
---
{% for t in tools %}{{ [tools, mood] | tojson }}{% endfor %}
{{ tools[:1] | tojson }}{{ tools | tojson(indent=1) }}{{ [tools[0], mood] | tojson }}
---
{% set tools = tools[:messages | length] %}{% for t in tools %}{{ t.function.name }}{% endfor %}
---
{% for t in tools if mood %}{{ t.function.name }}{% endfor %}
{% for t in tools %}x{% else %}{{ mood }}{% endfor %}
---
{% filter upper %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endfilter %}{{ mood }}
---
{% set x %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endset %}{{ x }}{{ x }}{{ mood }}
---
{% set ns = namespace(x=1) %}
{% for t in tools %}{% set ns.x %}{{ t.function.name }}{% endset %}{% endfor %}[{{ ns.x }}]
---
{% set ns = namespace(x=1) %}{% macro say(t) %}{% set ns.x %}{{ t.function.name }}{% endset %}{% endmacro %}
{{ say(tools[0]) }}{{ say(tools[0]) }}{{ ns.x }}
---
{% set mood = messages[0].content %}
{% for t in tools %}{% set x | replace('a', mood) %}{{ t.function.name }}{% endset %}{{ x }}{% endfor %}
---
{% macro outer(m) %}{% macro say(t) %}{{ m.content }}{{ t.function.name }}{% endmacro %}
{% for t in tools %}{{ say(t) }}{% endfor %}{% endmacro %}
{% for m in messages %}{{ outer(m) }}{% endfor %}
---
{% for m in messages %}{% macro say(t) %}{{ loop.index }}{% endmacro %}{{ say(tools[0]) }}{% endfor %}
---
{% block b %}{{ messages | length }}{% endblock %}{% for t in tools %}{{ self.b() }}{% endfor %}
---
{% macro say(t, x) %}{{ x }}{% endmacro %}{{ say(tools[0], 0.0) }}{{ say(tools[0], -0.0) }}
---
{% with x = mood %}{% for t in tools %}{{ x }}{{ t.function.name }}{% endfor %}{% endwith %}
"""
TOGETHER = _TOGETHER.split("---\n")
"""Templates that use something else, too."""
TOOLS = [
    template_tools(tools)
    for tools in (
        [{"type": "function", "function": {"name": "a"}}],
        [
            {"type": "function", "function": {"name": "b", "strict": True, "parameters": {"type": "object"}}},
            {
                "type": "function",
                "function": {
                    "name": "c",
                    "parameters": {"properties": {"x": {"type": "int"}, "y": {"properties": {"z": {}}}}},
                },
            },
            {"type": "function", "function": {"name": "d", "description": "\u00e9"}},
        ],
    )
]
moods = st.sampled_from([{}, {"mood": "good"}, {"mood": 1}, {"mood": True}, {"ns": 1, "x": 2, "name": "y"}])
turns = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3)
chats = st.lists(st.tuples(turns, st.sampled_from([*TOOLS, None]), moods), min_size=2, max_size=8)


@pytest.mark.parametrize("source", [*ALONE, *TOGETHER, *ODD])
@settings(max_examples=40, deadline=None)
@given(chats=chats)
def test_declarations_of_tools_are_those_of_jinja2(source: str, chats: list[tuple[Any, ...]]) -> None:
    """Whatever was written about the same tools before, a prompt is what plain jinja2 renders."""
    ours, plain = pair(source)
    for texts, tools, variables in chats:
        messages = [{"role": "user", "content": text} for text in texts]
        given = {**SPECIALS, **variables, "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            expected = plain.render(messages=template_messages(messages, ours.style), **given)
        except Exception:  # noqa: BLE001 a template may raise anything
            expected = None
        try:
            rendered = ours._rendered(Chat(messages, tools, variables=variables))
        except UnrenderableError:
            rendered = None
        assert rendered == expected


def steps(template: Template, tools: list[dict[str, Any]]) -> int:
    """Return how many steps a render with these tools takes."""
    template._rendered(Chat([{"role": "user", "content": "x"}], tools))
    return LOOP_LIMIT - template._compiled._environment.left


@pytest.mark.parametrize("source", ALONE)
def test_tools_are_gone_through_once(source: str) -> None:
    """The second chat with the same tools takes fewer steps; one with other tools as many as the first."""
    tools, others = (
        template_tools([{"function": {"name": name}} for name in names]) for names in ("ab", "cd")
    )
    template = Template(source, SPECIALS)
    first = steps(template, tools)
    assert steps(template, tools) < first == steps(template, others)


@pytest.mark.parametrize(
    "varies", ["[1, 2] | random", "[[1, 2]] | map('random') | list", "strftime_now('%S')", "lipsum(n=1)"]
)
def test_what_varies_is_written_each_time(varies: str) -> None:
    """A loop that writes the time, or something random, is run for each chat."""
    tools = template_tools([{"function": {"name": "a"}}])
    template = Template("{% for t in tools %}{{ " + varies + " }}{% endfor %}", {})
    assert steps(template, tools) == steps(template, tools) == 1


def test_texts_are_of_their_template() -> None:
    """Two models that are served the same tools have their own declarations."""
    tools = template_tools([{"function": {"name": "a"}}])
    for mark in "xy":
        template = Template("{% for t in tools %}" + mark + "{{ t.function.name }}{% endfor %}", {})
        for _ in range(2):
            assert template._rendered(Chat([{"role": "user", "content": ""}], tools)) == f"{mark}a"


def test_few_texts_are_kept_with_a_tool() -> None:
    """A macro that gets a text of the chat besides the tools does not fill the memory, however long it is."""
    tools = template_tools([{"function": {"name": "a"}}])
    template = Template(
        "{% macro head(x, t) %}{{ x }}{% endmacro %}{{ head(messages[0].content, tools) }}", {}
    )
    for number in range(1_000):
        text = f"{number}" * (1 + number % 2 * 500)
        assert template._rendered(Chat([{"role": "user", "content": text}], tools)) == text
    first = tools[0]
    assert isinstance(first, Tool)
    assert 100 < len(first.texts) < 600


def test_separators_may_be_a_list() -> None:
    """The JSON of tools is kept for what a template writes as separators, too."""
    tools = template_tools([{"function": {"name": "a", "description": "b"}}])
    template = Template("{{ tools | tojson(separators=[',', ':']) }}", {})
    for _ in range(2):
        rendered = template._rendered(Chat([{"role": "user", "content": ""}], tools))
        assert rendered == json.dumps(tools, separators=(",", ":"))


def test_the_json_of_tools_is_kept_with_them() -> None:
    """A template that prints all tools at once has their JSON made once."""
    tools = template_tools([{"function": {"name": "a"}}, {"function": {"name": "b"}}])
    template = Template("{{ tools | tojson(indent=4) }}{{ tools[:1] | tojson }}", {})
    rendered = template._rendered(Chat([{"role": "user", "content": ""}], tools))
    before = [tool.texts for tool in tools if isinstance(tool, Tool)]
    assert len(before[0]) == 2
    assert template._rendered(Chat([{"role": "user", "content": ""}], tools)) == rendered
    assert before[0] is before[1]
    assert len(before[0]) == 2
