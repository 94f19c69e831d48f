"""Promises of ``template`` and ``chat`` on random messages: short cuts give what the general ways give."""

import datetime as dt
import json
import sys
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import ext, sandbox
from tests.models.folders import TEMPLATES

from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat, UnrenderableError, template_messages
from kvist_epp.prompt.request_types import BILLING_HEADER, Chat
from kvist_epp.prompt.template import Template
from kvist_sim import model as model_files

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
_ODD = """{% macro show(m, by='-') %}{{ m.role ~ by }}
{{ m.items() | list | length }}{{ m.absent }}{{ caller and 1 }}
{% endmacro %}
{% for m in messages recursive %}
{{ show(m) }}{{ show(m, by='+') }}{{ loop.index }}{{ (loop.previtem or m).role }}{{ loop.cycle('a', 'b') }}
{{ loop['last'] }}{{ loop.changed(m.role) }}{{ m['role'] }}{{ m['items'] is defined }}{{ m.get('content') }}
{{ m.content.absent }}{{ '%s' | format(m.role) }}{{ '{}'.format(m.role) }}{{ m.role.upper() }}{{ nothing }}
{% if loop.depth < 3 %}{{ loop(messages) }}{% endif %}
{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}
---
{% for m in messages %}
{% set role = m.role.strip().split('s')[-1] %}{{ role.startswith('u') }}{{ m.content.count('x') }}
{{ (m.content if m.content is string else m.content[0].text)[:5] | trim }}
{{ (m.name or '').lstrip is defined }}
{% endfor %}
---
{% macro inner(x) %}{{ caller(x) }}{% endmacro %}
{% for m in messages %}{% call(x) inner(m.role) %}<{{ x }}>{% endcall %}{{ inner.name }}{% endfor %}
---
{{ messages[0].absent.more }}
---
{% macro one(x) %}{{ x }}{% endmacro %}{{ one(messages[0].role, 2) }}
---
{{ messages.__class__ }}{{ loop.first }}{{ messages[0].__class__.__mro__ }}
---
{{ 'x'.upper is callable }}{{ messages[0].role.__len__ is defined }}{{ messages[0].role.format is callable }}
{{ messages.append is defined }}{{ messages.index is callable }}{{ messages.0 is defined }}
"""
ODD = _ODD.split("---\n")


class _Generation(ext.Extension):
    """Render the body of the tag."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        """Return the statements within."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@cache
def pair(name: str) -> tuple[Template, jinja2.Template]:
    """Return a template of ours, and the same as transformers compiles it.

    A number names one of ``ODD``; a name with a brace is a template itself.
    """
    if name == "sim":
        source = json.loads((model_files.folder() / "tokenizer_config.json").read_text())["chat_template"]
    else:
        source = ODD[int(name)] if name.isdigit() else name
        if "{" not in source:
            source = (TEMPLATES / f"{name}.jinja").read_text()
    plain = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    plain.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    plain.globals |= {"raise_exception": _raise, "strftime_now": dt.datetime.now().strftime}  # noqa: DTZ005 as in the engine
    return Template(source, SPECIALS), plain.from_string(source)


texts = st.text(max_size=8) | st.sampled_from(
    ["", " x\n", "</think>", BILLING_HEADER, f"{BILLING_HEADER}\nx", "é"]
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
calls = st.fixed_dictionaries(
    {
        "id": st.just("123456789"),
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": texts, "arguments": st.sampled_from(["", "{}", '{"a":[1]}'])}
        ),
    }
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts | parts},
    optional={
        "tool_calls": st.lists(calls, max_size=2),
        "name": texts,
        "reasoning": texts,
        "tool_call_id": texts,
    },
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": texts}), min_size=1, max_size=3
) | st.lists(messages, min_size=1, max_size=5)


@pytest.mark.parametrize(
    "name", ["sim", *sorted(path.stem for path in TEMPLATES.iterdir()), *map(str, range(len(ODD)))]
)
@settings(max_examples=80, deadline=None)
@given(turns=turns, prompt=st.booleans())
def test_a_prompt_is_what_plain_jinja2_renders(name: str, turns: list[dict[str, Any]], prompt: bool) -> None:
    """Budgets and faster lookups change neither a prompt nor whether there is one."""
    ours, plain = pair(name)
    variables = {**SPECIALS, "tools": None, "documents": None, "add_generation_prompt": prompt}
    try:
        expected = plain.render(messages=template_messages(turns, ours.style), **variables)
    except Exception:  # noqa: BLE001 a template may raise anything
        expected = None
    try:
        rendered = ours.render(Chat(turns, add_generation_prompt=prompt))
    except UnrenderableError:
        rendered = None
    assert rendered == expected


@given(role=st.sampled_from(["system", "user", "assistant", "tool", "developer"]), text=texts)
@example(role="system", text=BILLING_HEADER + "\n")
@pytest.mark.parametrize("style", ["string", "openai"])
def test_a_text_is_as_good_as_a_part_with_that_text(style: ContentFormat, role: str, text: str) -> None:
    """A message with a text reaches the template like one with a list of that one part."""
    one, other = ([{"role": role, "content": c}] for c in (text, [{"type": "text", "text": text}]))
    assert template_messages(one, style) == template_messages(other, style)


@given(before=texts, after=texts)
def test_a_text_that_holds_the_mark_of_media_is_kept_whole(before: str, after: str) -> None:
    """The prompt ends at the mark only where a message has media."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = f"-{before}{MEDIA_MARK}{after}"
    assert Template(source, {}).render(Chat([{"role": "user", "content": text}])) == text


def test_a_rendered_chat_is_released_at_once() -> None:
    """Macros do not keep the messages until the next collection of garbage."""
    text = "a text".title()
    chat = Chat([{"role": "user", "content": text}])
    before = sys.getrefcount(text)
    for name in ("sim", "0", "4"):
        try:
            pair(name)[0].render(chat)
        except UnrenderableError:
            assert name != "sim"
    assert sys.getrefcount(text) == before
