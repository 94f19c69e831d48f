"""Promises of ``template``: the environment of a chat template, and its bounds."""

import datetime as dt
from typing import Any

import jinja2
import pytest
from tests.models.folders import SHAPES, TEMPLATES

from kvist_epp.prompt import template as templates
from kvist_epp.prompt.chat import MEDIA_MARK, UnrenderableError
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import template_tools

USER = {"role": "user", "content": "hi"}
EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def render(source: str, *messages: dict[str, Any], size: int = 0, **fields: Any) -> str:
    """The prompt of these messages."""
    return Template(source, {"bos_token": "<s>"}).render(Chat(list(messages or (USER,)), **fields), size)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ {'a': 'å<b>', 'n': none} | tojson }}", '{"a": "å<b>", "n": null}'),
        ("{{ [1, 'å'] | tojson(ensure_ascii=true, indent=1) }}", '[\n 1,\n "\\u00e5"\n]'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
        ("{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}{% endfor %}", "1"),
        ("{% for x in nothing %}{% else %}none{% endfor %}", "none"),
        ("{{ messages[0].items() | list | length }}{{ messages[0].absent is defined }}", "2False"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, expected: str) -> None:
    """Blocks trimmed, JSON unescaped, loop controls, the generation tag, dicts reached by dots."""
    assert render(source) == expected


def test_the_date_is_the_local_one() -> None:
    """The date is the local one, as in the engine; at midnight either day is right."""
    days = [dt.datetime.now().strftime("%d %b %Y")]  # noqa: DTZ005 local by promise
    rendered = render("{{ strftime_now('%d %b %Y') }}")
    days.append(dt.datetime.now().strftime("%d %b %Y"))  # noqa: DTZ005
    assert rendered in days


def test_variables_reach_a_template_that_names_them_only() -> None:
    """A client cannot replace what the environment offers."""
    variables = {"mood": "fine", "range": 5, "bos_token": "<b>"}
    assert render("{{ mood }}{{ bos_token }}{{ range(2) | list }}", variables=variables) == "fine<b>[0, 1]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.absent.more }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(1000000) | list }}",
    ],
)
def test_a_template_that_fails_is_routed_by_load(source: str) -> None:
    """Refusals, mistakes, breakouts and recursion end in one exception, without text of the request."""
    with pytest.raises(UnrenderableError, match=r"^template$"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% endfor %}",
        "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
        "{% for i in range(9000) %}{% for m in messages | reverse %}{{ i }}{% endfor %}{% endfor %}" * 9,
    ],
)
def test_a_template_that_loops_too_long_is_stopped(source: str) -> None:
    """Loops are charged what they run over, also those that write nothing."""
    with pytest.raises(UnrenderableError, match=r"^work$"):
        render(source)


def test_the_budget_is_that_of_one_render() -> None:
    """Each render has the whole budget, whatever the one before it used."""
    template = Template("{% for i in range(40000) %}{% endfor %}done", {})
    assert [template.render(Chat([USER])) for _ in range(3)] == ["done"] * 3


def test_many_messages_of_a_large_body_are_not_joined() -> None:
    """Templates join texts in loops: copying is bounded before it starts."""
    with pytest.raises(UnrenderableError, match=r"^work$"):
        render(EACH, *[USER] * 1000, size=templates.COPY_LIMIT // 999)


def test_media_are_marked_where_the_engine_writes_their_placeholders() -> None:
    """Templates that take one text get the engine's placeholders in it, before the text of the message."""
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "x"}],
    }
    assert render(EACH, USER, image) == f"user: hi\nuser: {MEDIA_MARK}\nx\n"


@pytest.mark.parametrize(
    ("content", "source", "expected"),
    [
        ("On the ", EACH, "user: hi\nassistant: On the "),
        ("On the ", "{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "hi|On the"),
        ("", EACH, "user: hi\nassistant: "),
    ],
)
def test_the_last_message_is_left_open_to_be_continued(content: str, source: str, expected: str) -> None:
    """Nothing follows its text; a trimmed text ends trimmed."""
    last = {"role": "assistant", "content": content}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, USER, last, **options) == expected


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (EACH, {"add_generation_prompt": True}),
        ("{{ messages[0].role }}", {}),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {}),
    ],
)
def test_a_message_that_cannot_be_continued_is_routed_by_load(source: str, options: dict[str, Any]) -> None:
    """The engine refuses these as well."""
    fields = {"add_generation_prompt": False, "continue_final_message": True, **options}
    with pytest.raises(UnrenderableError):
        render(source, USER, **fields)


def test_no_message_is_no_prompt() -> None:
    """The engine refuses an empty conversation."""
    with pytest.raises(UnrenderableError, match="empty"):
        Template(EACH, {}).render(Chat([]))


def test_a_tools_json_is_written_once() -> None:
    """A tool's JSON is cached, and equal the second time, for each set of options."""
    tools = template_tools([{"type": "function", "function": {"name": "f", "parameters": {"å": 1}}}])
    template = Template("{{ tools[0] | tojson }}{{ tools[0] | tojson(indent=2) }}", {})
    first, second = (template.render(Chat([USER], tools)) for _ in range(2))
    assert (first == second, first.count('"f"'), "å" in first) == (True, 2, True)


def test_a_source_that_is_no_template_is_refused() -> None:
    """At load, not at the first request."""
    with pytest.raises(jinja2.TemplateError):
        Template("{% for %}", {})


@pytest.mark.parametrize(
    ("shape", "style"), [(name, "openai" if name == "gemma" else "string") for name in SHAPES]
)
def test_styles_of_the_five_shapes(shape: str, style: str) -> None:
    """Templates that loop over contents take parts; all others take text."""
    assert Template((TEMPLATES / f"{shape}.jinja").read_text(), {}).style == style


def test_a_template_that_unpacks_its_messages_takes_texts() -> None:
    """The engine gives up its analysis there."""
    assert (
        Template("{% for a, b in messages %}{% for c in content %}{% endfor %}{% endfor %}", {}).style
        == "string"
    )


DEEP = (
    "{% for i in range(300) recursive %}{% if loop.depth < 4 %}{{ loop(range(300)) }}{% endif %}{% endfor %}"
)
FOREVER = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(22) }}"


@pytest.mark.parametrize(
    "source",
    [
        FOREVER,
        DEEP,
        DEEP.replace("loop(range", "loop(iterable=range"),
        "{{ messages[0]['content'] * 20000000 }}",
        "{{ 20000000 * 'x' }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(40000) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_templates_that_would_work_for_ever_are_stopped(source: str) -> None:
    """Recursion, repetition and growth are bounded like loops: such a prompt is not rendered."""
    with pytest.raises(UnrenderableError):
        render(source)


def test_macros_and_small_repetitions_are_free_to_use() -> None:
    """Macros and ``*`` as real templates use them still work."""
    source = "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('-' * 3) }}{{ 2 ** 3 }}{{ 2 * 3 }}"
    assert render(source) == "<--->86"
