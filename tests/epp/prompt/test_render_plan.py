"""Promises of ``render_plan`` and its traces: a plan gives what the template gives, or nothing."""

import datetime as dt
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.prompt.test_template_parity import SPECIALS, pair
from tests.models.folders import TEMPLATES

from kvist_epp.prompt import render_plan, traced_values
from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat, UnrenderableError, template_messages
from kvist_epp.prompt.render_plan import RenderPlan, shape_of
from kvist_epp.prompt.request_types import BILLING_HEADER, Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import template_tools

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
PUBLISHED = ["sim", *sorted(path.stem for path in TEMPLATES.iterdir())]

_LOOKS = """{% for m in messages %}{% if m.content %}[{{ m.content }}]{% else %}none{% endif %}{% endfor %}
---
{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}
{% endfor %}
---
{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all ~ m.content ~ 1 %}{% endfor %}
{{ ns.all.strip() }}|{{ ns.all | trim }}|{{ 'x' in ns.all }}
---
{% for m in messages %}{% if m.content.startswith('<t>') and m.content.endswith('</t>') %}tool{% endif %}
{{ m.content.lstrip('\\n') }}{{ m.content.rstrip() + '!' }}{{ m.content.replace('a', 'b') }}{% endfor %}
---
{% for m in messages %}{{ m.content == 'a' }}{{ m.content != 'a' }}{{ m.content is eq('x') }}
{{ m.content is none }}{{ m.content is string }}{{ m.content is iterable }}{{ m.content == none }}
{% endfor %}
---
{% macro show(c) %}<{{ c }}{{ caller() if caller else '' }}>{% endmacro %}
{% for m in messages %}{{ show(m.content) | trim }}{% call show(m.content) %}{{ m.content }}
{% endcall %}{% endfor %}
---
{% set all %}{% for m in messages %}{{ m['content'] or 'x' }}{% endfor %}{% endset %}{{ all }}{{ all }}
---
{% filter trim %}{% for m in messages %}{{ m.get('content') }}{% endfor %}{% endfilter %}
---
{% for m in messages | selectattr('content', 'equalto', 'a') %}{{ m.content | default('none', true) }}
{% endfor %}
---
{% for m in messages if m.content %}{{ loop.index }}{{ messages[loop.index0 - 1].content }}{% endfor %}
---
{{ messages | map(attribute='content') | join('-') }}
---
{% for m in messages %}{{ m | tojson }}{% endfor %}
---
{% for m in messages %}{{ m.content | length }}{{ m.content[:2] }}{% endfor %}
---
{% for m in messages %}{{ '%s' % m.content }}{{ '{}'.format(m.content) }}{{ '%s' | format(m.content) }}
{% endfor %}
---
{% for m in messages %}{{ m.content in ['a', 'b'] }}{{ m.content in 'ab' }}
{{ 'a'.startswith(m.content) }}{% endfor %}
---
{% for m in messages %}{{ {m.content: 1}['a'] }}{{ {'a': 1}[m.content] }}{% endfor %}
---
{% for m in messages %}{{ m.content | list | length }}{{ m.content | upper }}
{{ m.content.upper() }}{% endfor %}
---
{% for m in messages %}{{ 'a' < m.content < 'b' }}{{ m.content > 'a' }}{{ m.content * 2 }}{% endfor %}
---
{{ messages | sort(attribute='content') | length }}{{ (messages | first).content }}
{{ messages[0].content | string }}
---
{% for m in messages %}{{ loop.changed(m.content) }}{{ [m.content] | join }}{{ [m.content, 'x'] | max }}
{% endfor %}
---
{{ [messages[0].content] }}{{ dict(a=messages[0].content) }}{{ (messages[0].content, 1) | list }}
---
{% if messages[0].content == 'a' %}{{ raise_exception('a') }}{% endif %}{{ strftime_now('%Y') }}
{{ messages[-1].content }}
---
{{ messages[0].content | safe }}{{ messages[0].content | e }}{{ messages[0].content ~ messages }}
"""
LOOKS = _LOOKS.split("---\n")
"""Templates that look at contents in all kinds of ways; some of them cannot be traced."""

_THINKING = ["</think>", "<think>a</think> b"]
_CALLS = ["<t>x</t>", "<tool_call>\n{}\n</tool_call>", "<|im_end|>"]
_MARKS = [f"a{MEDIA_MARK}", BILLING_HEADER, "KVIST-MARK", "{{ x }}", "%s"]
contents = st.sampled_from(
    ["", " ", "a", "b", " x\n", "\n", "é\u2003", *_THINKING, *_CALLS, *_MARKS]
) | st.text(max_size=6)


@st.composite
def chats_of_one_shape(draw: st.DrawFn) -> list[list[dict[str, str]]]:
    """Return the messages of several chats with the same roles."""
    first = draw(st.lists(st.sampled_from(["system", "tool"]), max_size=1))
    roles = first + ["user", "assistant"] * draw(st.integers(0, 2)) + ["user"]
    roles += draw(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=2))
    size = len(roles)
    texts = draw(st.lists(st.lists(contents, min_size=size, max_size=size), min_size=4, max_size=6))
    return [[{"role": r, "content": c} for r, c in zip(roles, of_one, strict=True)] for of_one in texts]


def check_against_jinja2(ours: Template, plain: Any, turns: list[dict[str, Any]], prompt: bool) -> None:
    """Compare a prompt with that of jinja2 itself."""
    variables = {**SPECIALS, "tools": None, "documents": None, "add_generation_prompt": prompt}
    try:
        expected = plain.render(messages=template_messages(turns, ours.style), **variables)
    except Exception:  # noqa: BLE001 a template may raise anything
        expected = None
    try:
        rendered = ours.render(Chat(turns, add_generation_prompt=prompt))
    except UnrenderableError:
        rendered = None
    assert without_addresses(rendered) == without_addresses(expected)


def without_addresses(text: str | None) -> str | None:
    """Return a prompt without the addresses of objects: a content may name a method of a dict."""
    return text and re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("name", [*PUBLISHED, *LOOKS])
@settings(max_examples=25, deadline=None)
@given(chats=chats_of_one_shape(), prompt=st.booleans())
def test_the_next_chats_of_a_shape_are_rendered_as_jinja2_does(
    name: str, chats: list[list[dict[str, str]]], prompt: bool
) -> None:
    """The prompt of the tenth chat of a shape is that of jinja2, however odd the contents are."""
    ours, plain = pair(name)
    for turns in chats:
        check_against_jinja2(ours, plain, turns, prompt)


@st.composite
def as_clients_send_them(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Return such chats with contents in parts, and with the fields that a client library sends back."""
    chats = draw(chats_of_one_shape())
    counts = [draw(st.sampled_from([None, 0, 1, 1, 1, 2, 3])) for _ in chats[0]]
    extras = draw(st.booleans())

    def sent(message: dict[str, str], count: int | None) -> dict[str, Any]:
        text = message["content"]
        kind = draw(st.sampled_from(["text", "input_text", "output_text"]))
        parts = [{"type": kind, "text": text if at == 0 else draw(contents)} for at in range(count or 0)]
        more: dict[str, Any] = {}
        if extras and message["role"] == "assistant":
            more = {"refusal": None, "tool_calls": [], "reasoning": None, "annotations": []}
        return {**message, "content": text if count is None else parts, **more}

    return [[sent(*one) for one in zip(turns, counts, strict=True)] for turns in chats]


@pytest.mark.parametrize("name", [*PUBLISHED, *LOOKS])
@settings(max_examples=15, deadline=None)
@given(chats=as_clients_send_them(), prompt=st.booleans())
def test_contents_in_parts_are_rendered_as_jinja2_does(
    name: str, chats: list[list[dict[str, Any]]], prompt: bool
) -> None:
    """Chats whose contents are lists of texts are rendered as by jinja2, for templates of either style."""
    ours, plain = pair(name)
    for turns in chats:
        check_against_jinja2(ours, plain, turns, prompt)


def plans(template: Template) -> list[RenderPlan]:
    """Return the plans that a template has made."""
    assert template._plans is not None
    return [plan for plan in template._plans._plans.values() if isinstance(plan, RenderPlan)]


def talk(*texts: str) -> Chat:
    """Return a chat with these contents, user and assistant in turn."""
    return Chat(
        [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_have_plans_for_plain_chats(name: str) -> None:
    """A chat of questions and answers is rendered by a plan from the third time on."""
    template = Template(pair_source(name), SPECIALS)
    for text in ("one", "two", "three"):
        template.render(talk(text, f"answer {text}", "more"))
    [plan] = plans(template)
    expected = template._rendered(talk("x", "y", "z"))
    assert plan.render(["x", "y", "z"]) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_contents_in_parts_share_the_plan_of_one_text(name: str) -> None:
    """Whether a client sends a text, a list with one text, or all fields of an answer makes no difference."""
    template = Template(pair_source(name), SPECIALS)
    for text in ("one", "two"):
        template.render(talk(text, f"answer {text}", "more"))
    turns = talk("x", "y", "z").messages
    turns[0]["content"] = [{"type": "text", "text": "x"}]
    turns[1] |= {"refusal": None, "tool_calls": None, "function_call": None, "audio": None}
    known = shape_of(Chat(turns), {}, template.style)
    assert known is not None
    assert known[0] in template._plans._plans  # type: ignore[union-attr]
    [plan] = plans(template)
    assert plan.render(known[1]) == template._rendered(Chat(turns)) == template._rendered(talk("x", "y", "z"))


@pytest.mark.parametrize("style", ["string", "openai"])
def test_several_parts_are_one_text_or_several_values(style: ContentFormat) -> None:
    """A template of one text gets the parts in lines; one of parts gets as many, which are part of the
    shape."""
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    message = {"role": "user", "content": parts}
    known = shape_of(Chat([message]), {}, style)
    assert known is not None
    assert (known[0][0], known[1]) == (
        (("user",), ["a\nb"]) if style == "string" else ((render_plan.Turn("user", 2),), ["a", "b"])
    )
    tool = shape_of(Chat([{"role": "tool", "content": parts}]), {}, style)
    assert tool is not None
    assert (tool[0][0], tool[1]) == (("tool",), ["a\nb"])
    many = [{"role": "user", "content": parts * render_plan.MAX_VALUES}]
    assert (shape_of(Chat(many), {}, style) is None) is (style == "openai")


def pair_source(name: str) -> str:
    """Return the source of a published template."""
    if name != "sim":
        return (TEMPLATES / f"{name}.jinja").read_text()
    from kvist_sim import model as model_files

    return str(json.loads((model_files.folder() / "tokenizer_config.json").read_text())["chat_template"])


@pytest.mark.parametrize("source", [LOOKS[at] for at in (*range(10), 11)])
def test_templates_that_look_at_contents_can_be_traced(source: str) -> None:
    """Trimming, comparing, concatenating and testing for a text leave a template with a plan."""
    template = Template(source, SPECIALS)
    for text in ("one", "two", "three"):
        template.render(talk(text, "and", text))
    assert len(plans(template)) == 1


@pytest.mark.parametrize("source", [LOOKS[at] for at in (10, 12, 13, 14, 16, 18, 19, 20, 22)])
def test_templates_that_read_the_characters_of_contents_have_no_plan(source: str) -> None:
    """A template that a plan cannot check runs for each chat."""
    template = Template(source, SPECIALS)
    for _ in range(6):
        template.render(talk("one", "two", "three"))
    assert plans(template) == []


def test_a_chat_that_fails_a_check_is_rendered_by_the_template() -> None:
    """A content that the template would treat in another way is not put into the plan."""
    template = Template("{% for m in messages %}{{ m.content or 'nothing' }};{% endfor %}", {})
    for text in ("one", "two"):
        template.render(talk(text))
    [plan] = plans(template)
    assert plan.render([""]) is None
    assert template.render(talk("")) == "nothing;"


def test_a_plan_that_fails_again_and_again_is_made_anew() -> None:
    """The first contents of a shape do not decide for ever which chats have a plan."""
    template = Template("{% for m in messages %}{{ m.content or 'nothing' }};{% endfor %}", {})
    for text in ["", "", *["x"] * render_plan._MAX_FAILURES]:
        template.render(talk(text))
    template.render(talk("y"))
    [plan] = plans(template)
    assert plan.render(["z"]) == "z;"


def test_an_empty_chat_has_no_plan() -> None:
    """A chat without messages is refused however often it comes."""
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}end", {})
    for _ in range(5):
        with pytest.raises(UnrenderableError, match="empty"):
            template.render(Chat([]))


def test_a_plan_is_for_its_day_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with yesterday's date in it is not used."""
    template = Template("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", {})
    for text in ("one", "two"):
        template.render(talk(text))
    [plan] = plans(template)
    today = dt.datetime.now().strftime("%d %b %Y")  # noqa: DTZ005 as the template does
    assert plan.render(["x"]) in (f"{today}x", None)
    monkeypatch.setattr(render_plan, "now", lambda _pattern: "01 Jan 2001")
    assert plan.render(["x"]) is None


def test_tools_and_variables_are_part_of_the_shape() -> None:
    """Chats with other tools or other variables are not mixed up, nor are 1 and true."""
    template = Template(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ mood is true }}{{ messages[0].content }}",
        {},
    )
    tools = [template_tools([{"type": "function", "function": {"name": name}}]) for name in ("walk", "talk")]
    cases = [(tool, mood) for tool in (*tools, None) for mood in (1, True, False, "x")]
    for text in ("one", "two", "three"):
        for tool, mood in cases:
            chat = Chat(talk(text).messages, tool, variables={"mood": mood})
            shown = json.dumps(tool[0]) if tool else ""
            assert template.render(chat) == f"{shown}{mood is True}{text}"
    assert len(plans(template)) == len(cases)


def test_the_number_of_plans_and_their_literals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes come, the plans of a template take a bounded amount of memory."""
    monkeypatch.setattr(render_plan, "MAX_PLANS", 10)
    template = Template(EACH, {})
    for count in range(1, 40):
        for _ in range(3):
            template.render(talk(*["x"] * count))
    assert template._plans is not None
    assert len(template._plans._plans) == 10
    monkeypatch.setattr(render_plan, "MAX_CHARACTERS", 500)
    template.render(talk("x"))
    assert template._plans._size == sum(plan.size for plan in plans(template)) <= 500


def of_roles(number: int, count: int = 8) -> Chat:
    """Return a chat whose roles are the digits of a number, so that each number is another shape."""
    roles = ["user", "assistant", "system", "tool"]
    return Chat([{"role": roles[number >> 2 * at & 3], "content": "x"} for at in range(count)])


def test_shapes_that_never_come_again_are_seldom_looked_for() -> None:
    """Agents that do different things have a new shape at each turn: of a length at which none came again,
    one chat in sixteen is looked at; it is rendered as before."""
    template = Template(EACH, {})
    for number in range(400):
        chat = of_roles(number)
        expected = "".join(f"<{message['role']}>x" for message in chat.messages)
        assert template.render(chat) == expected

    assert template._plans is not None
    looked_at = len(template._plans._plans)
    assert looked_at <= render_plan.PATIENCE + 1 + 400 // 16


def test_a_shape_that_comes_again_is_found_after_many_that_did_not() -> None:
    """Then all chats of the length are looked at again, and those of other lengths always were."""
    template = Template(EACH, {})
    for number in range(400):
        template.render(of_roles(number))
    for _ in range(3):
        template.render(of_roles(0, count=3))
    assert len(plans(template)) == 1

    for _ in range(3 * 16):
        template.render(of_roles(1_000))
    assert len(plans(template)) == 2
    assert template._plans is not None
    before = len(template._plans._plans)
    for number in range(2_000, 2_000 + render_plan.PATIENCE):
        template.render(of_roles(number))
    assert len(template._plans._plans) == before + render_plan.PATIENCE


def test_only_plain_messages_have_a_shape() -> None:
    """Media, odd parts and calls, unknown roles, documents and very long chats are left to the template."""
    plain = {"role": "user", "content": "x"}
    assert shape_of(Chat([plain]), {}) is not None
    for odd in (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [1]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "system", "content": [{"type": "text", "text": BILLING_HEADER}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": MEDIA_MARK}]},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        {"role": "assistant", "content": "x", "reasoning": 1},
        {"role": "assistant", "content": "x", "reasoning_content": ["y"]},
        {"role": "tool", "content": "x", "tool_call_id": 1},
        {"role": "assistant", "content": "x", "tool_calls": ["x"]},
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"id": "1", "type": "function", "function": {}}],
        },
        {"role": "user", "content": "x", "task": "t"},
        {"role": "user", "content": 1},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "developer", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "system", "content": BILLING_HEADER},
        {"role": "user", "content": MEDIA_MARK},
        {"content": "x", "name": "y"},
    ):
        assert shape_of(Chat([plain, odd]), {}) is None
    seen = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}
    assert shape_of(Chat([seen]), {}, "string") is not None
    assert shape_of(Chat([seen]), {}, "openai") is None
    assert shape_of(Chat([plain] * (render_plan.MAX_MESSAGES + 1)), {}) is None
    assert shape_of(Chat([plain], documents=[]), {}) is None
    assert shape_of(Chat([plain]), {"mood": [1]}) is None


def test_a_traced_text_can_only_be_used_in_ways_that_are_noted() -> None:
    """Every method of a text, and every operator, is traced or raises."""
    traced = {"__new__", "__str__", "__add__", "__radd__", "__bool__", *traced_values.METHODS}
    for name in set(dir(str)) - traced_values._NEEDED - traced:
        trace = traced_values.Trace(["x"])
        method = getattr(trace.contents[0], name)
        with pytest.raises(traced_values.UntraceableError):
            method()
        assert trace.spoiled


def test_plans_keep_no_content() -> None:
    """The contents of the chat that a plan was made of are not kept."""
    template = Template(EACH, {})
    for _ in range(3):
        template.render(talk("a secret"))
    [plan] = plans(template)
    assert "secret" not in repr([plan._form, plan._order, plan._steps, plan._dates])
