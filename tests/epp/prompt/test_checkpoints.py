"""Promises of ``checkpoints`` and ``resumed_render``: the next turn of a chat is rendered as the whole."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.prompt.test_agent_plans import CALLS_SHOWN, REASONING_SHOWN
from tests.epp.prompt.test_render_plan import PUBLISHED, pair_source
from tests.epp.prompt.test_template_parity import SPECIALS

from kvist_epp.prompt import checkpoints, template_environment
from kvist_epp.prompt import template as template_module
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.checkpoints import MIN_MESSAGES
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import template_tools

_EACH = "{% for m in messages %}"
LOOP_VARIABLES = """{% for m in messages %}
{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.cycle('a', 'b') }}{{ m.content }}
{{ (loop.previtem or m).role }}{{ (loop.nextitem or m).role }}
{% endfor %}"""
"""Variables of the loop that change nothing before the last message when one is added."""
COUNTED = """{% set ns = namespace(calls=0, seen='', last=none) %}{% for m in messages %}
{% set ns.calls = ns.calls + (m.tool_calls or []) | length %}{% set ns.seen = ns.seen ~ m.role[0] %}
{{ ns.calls }}{{ ns.seen }}{% set one = ns.last %}{{ one }}{% set ns.last = [ns.calls, [m.role]] %}
{% endfor %}{{ ns.seen }}{{ ns.last }}"""
"""A loop that hands numbers, texts and lists from one message to the next."""
ANSWERED = """{% for m in messages %}{% if m.role == 'tool' %}{% for other in messages %}
{% for c in other.tool_calls or [] %}{% if c.id == m.tool_call_id %}{{ c.function.name }}: {% endif %}
{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"""
"""A loop that looks for the call of each result among all messages, as several published templates do."""
WITHOUT_FIRST = """{% if messages[0].role == 'system' %}
{% set rest = messages[1:] %}{{ messages[0].content }}{% else %}{% set rest = messages %}{% endif %}
{% if tools %}{{ tools | tojson }}{% for m in rest %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% else %}{% for m in rest %}[{{ m.role }}]{{ m.content }}{% endfor %}{% endif %}"""
"""A loop over all messages but the first, in a branch."""
OWN = [LOOP_VARIABLES, COUNTED, ANSWERED, WITHOUT_FIRST]
TOOLS = [
    template_tools([{"type": "function", "function": {"name": name, "parameters": {}}}]) for name in "ab"
]


def result(draw: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": f"result {draw.random()}"}


def turn(draw: random.Random, *, reasons: bool) -> list[dict[str, Any]]:
    """Return messages that follow an answer without calls, or the results of calls."""
    asks = draw.random() < 0.3
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"do {draw.random()}"}] if asks else []
    for _ in range(draw.choice([1, 1, 2])):
        calls = [
            {
                "id": f"call{draw.randrange(10**5):05}",
                "type": "function",
                "function": {"name": draw.choice("ab"), "arguments": json.dumps({"n": draw.random()})},
            }
            for _ in range(draw.choice([1, 1, 2]))
        ]
        content = draw.choice([None, "", "I look", "</think> so"])
        answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
        if reasons:
            answer["reasoning_content"] = f"because {draw.random()}"
        messages += [answer, *(result(draw, call) for call in calls)]
    if asks and draw.random() < 0.5:
        messages.append({"role": "assistant", "content": draw.choice(["done", "<think>x</think>y"])})
    return messages


def rendered(template: Template, chat: Chat, *, complete: bool) -> str:
    """Return the prompt of a chat, or why there is none."""
    try:
        return template._rendered(chat) if complete else template.render(chat)
    except UnrenderableError as reason:
        return str(reason)


def resumed(template: Template) -> int:
    """Return how many prompts were resumed."""
    assert template._checkpoints is not None
    return sum(record.resumed for record in template._checkpoints._records.values())


def differences(template: Template) -> int:
    """Return how many resumed prompts were found to be wrong."""
    assert template._checkpoints is not None
    return sum(record.differences for record in template._checkpoints._records.values())


def without_plans(source: str) -> Template:
    """Return a template that has no plans, so that long chats are resumed from the second turn on."""
    template = Template(pair_source(source) if source in PUBLISHED else source, SPECIALS)
    template._plans = None
    return template


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chats of four messages have a checkpoint."""
    monkeypatch.setattr(template_module, "MIN_MESSAGES", 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", [*PUBLISHED, *OWN, *CALLS_SHOWN, *REASONING_SHOWN])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), reasons=st.booleans())
def test_turns_of_agents_are_rendered_as_a_whole(source: str, seed: int, reasons: bool) -> None:
    """Turns of several conversations, which are also shortened, branched and repeated, have the prompts that
    the template gives for all messages."""
    draw = random.Random(seed)
    template = without_plans(source)
    start: list[dict[str, Any]] = [{"role": "user", "content": "do"}]
    conversations = [start, [{"role": "system", "content": "you"}, *start], [*start]]
    for _ in range(25):
        at = draw.randrange(len(conversations))
        messages = [*conversations[at], *turn(draw, reasons=reasons)]
        if draw.random() < 0.1:
            messages = messages[: draw.randrange(1, len(messages))]
        if draw.random() < 0.9:
            conversations[at] = messages
        chat = Chat(messages, draw.choice([*TOOLS, None]) if draw.random() < 0.1 else TOOLS[0])
        assert rendered(template, chat, complete=False) == rendered(template, chat, complete=True)
    assert template._checkpoints is None or differences(template) == 0


def turns_of_one(count: int, *, field: str = "", ask_each: int = 0) -> list[Chat]:
    """Return the turns of one agent, with a further field in its answers, and new questions in between."""
    draw = random.Random(1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "do"}]
    chats = []
    for number in range(count):
        call = {"id": f"call{number:05}", "type": "function", "function": {"name": "a", "arguments": "{}"}}
        more = {field: "why"} if field else {}
        answer = {"role": "assistant", "content": "x", "tool_calls": [call], **more}
        messages = [*messages, answer, result(draw, call)]
        if ask_each and number % ask_each == 0:
            messages = [*messages, {"role": "user", "content": f"do {number}"}]
        chats.append(Chat(messages, TOOLS[0]))
    return chats


def wrong(template: Template, chats: list[Chat]) -> list[Chat]:
    """Render each chat and return those that were rendered otherwise than as a whole."""
    return [
        chat
        for chat in chats
        if rendered(template, chat, complete=False) != rendered(template, chat, complete=True)
    ]


@pytest.mark.parametrize("source", ["sim", "chatml", "llama3", "deepseek", *OWN])
def test_turns_of_one_agent_are_resumed(source: str) -> None:
    """From the second long turn on, a conversation is rendered from its last answer."""
    template = without_plans(source)
    assert wrong(template, turns_of_one(40)) == []
    assert resumed(template) == 40 - MIN_MESSAGES // 2


def test_a_new_question_is_rendered_from_the_start_if_answers_lie_before_it() -> None:
    """Templates hide the reasoning before the last question, so that a new one changes what came before."""
    template = without_plans(REASONING_SHOWN[0])
    assert wrong(template, turns_of_one(60, field="reasoning", ask_each=4)) == []
    assert resumed(template) > 0


def test_a_template_that_looks_ahead_is_given_up() -> None:
    """After three prompts that were found to be wrong, no prompt of that kind is resumed any more."""
    ahead = without_plans(_EACH + "{{ m.content }}{{ messages | length }};{% endfor %}")
    assert len(wrong(ahead, turns_of_one(60))) <= 1
    assert differences(ahead) == checkpoints._MAX_DIFFERENCES
    assert resumed(ahead) == 4


def test_chats_whose_checkpoints_are_stale_are_seldom_tried() -> None:
    """A template that sets something else for each chat before its loop is soon run from the start."""
    source = (
        "{% set all = messages | map(attribute='content') | join %}" + _EACH + "{{ m.content }}{% endfor %}"
    )
    template = without_plans(source)
    assert wrong(template, turns_of_one(200)) == []
    assert resumed(template) == 0
    assert template._checkpoints is not None
    [stale] = [record.stale for record in template._checkpoints._records.values() if record.stale]
    assert stale >= checkpoints._PATIENCE


def test_chats_can_grow_beyond_the_budget_of_a_render(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose work grows with the square of the messages goes on when the whole would be refused."""
    monkeypatch.setattr(template_environment, "LOOP_LIMIT", 5_000)
    template = without_plans(ANSWERED)
    others = wrong(template, turns_of_one(120))
    assert others
    assert all(rendered(template, chat, complete=True) == "work" for chat in others)
    assert "a: result" in rendered(template, others[-1], complete=False)


def test_a_chat_beyond_the_budget_is_rendered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chat that comes to a fresh picker is matched by the beginning of its prompt, and each turn comes
    further."""
    whole, chats = without_plans(ANSWERED), turns_of_one(120)
    expected = [rendered(whole, chat, complete=True) for chat in chats[-6:]]

    monkeypatch.setattr(template_environment, "LOOP_LIMIT", 12_000)
    fresh = without_plans(ANSWERED)
    assert rendered(fresh, chats[-6], complete=True) == "work"
    found = [rendered(fresh, chat, complete=False) for chat in chats[-6:]]
    lengths = list(map(len, found))
    assert all(map(str.startswith, expected, found))
    assert lengths == sorted(lengths)
    assert lengths[0] < len(expected[0]) / 2
    assert found[-1] == expected[-1]


def test_no_part_of_a_chat_ends_before_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question may change what is before it, so that a chat with one behind the first part is refused."""
    monkeypatch.setattr(template_environment, "LOOP_LIMIT", 12_000)
    last = turns_of_one(120, ask_each=100)[-1]
    assert rendered(without_plans(ANSWERED), last, complete=False) == "work"


def test_prompts_are_kept_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the conversations are, the texts of the checkpoints take a bounded number of bytes."""
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 20_000)
    template = without_plans(COUNTED)
    kept = template._checkpoints
    assert kept is not None
    for number in range(30):
        texts = [f"{number} {at}" for at in range(30 + number)]
        messages = [
            {"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)
        ]
        template.render(Chat(messages))
        assert 0 < kept._bytes == sum(one.weight for one in kept._kept.values()) <= 20_000


@pytest.mark.parametrize("odd", [10**30, "\ud800", json.loads("[" * 500 + "]" * 500), 1.5, None])
def test_odd_values_in_messages_do_no_harm(odd: Any) -> None:
    """Messages that cannot be packed are rendered from the start."""
    template = without_plans(_EACH + "{{ m.role }}{{ m.content }}{% endfor %}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x", "odd": odd}]
    messages += [{"role": "assistant", "content": f"{at}"} for at in range(30)]
    for count in (28, 29, 31):
        chat = Chat(messages[:count])
        assert template.render(chat) == template._rendered(chat)


def test_other_settings_are_other_conversations() -> None:
    """A checkpoint serves chats with the same variables and tools only."""
    source = "{{ mood }}{% for m in messages %}{{ m.content }}{{ tools | length }}{{ mood }}{% endfor %}"
    template = without_plans(source)
    messages = [{"role": "assistant" if at % 2 else "user", "content": f"{at}"} for at in range(40)]
    for count in (30, 32, 34):
        for mood in ("a", 1, True, 1.0, {"x": [1]}):
            for tools in TOOLS:
                chat = Chat(messages[:count], tools, variables={"mood": mood})
                assert template.render(chat) == template._rendered(chat)
    assert resumed(template) > 0


@pytest.mark.parametrize(
    "source",
    [
        _EACH + "{{ loop.changed(m.role) }}{% endfor %}",
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
        _EACH + "{{ m.content }}{% else %}none{% endfor %}",
        "{% macro all() %}" + _EACH + "{{ m.content }}{% endfor %}{% endmacro %}{{ all() }}",
        "{% set x %}" + _EACH + "{{ m.content }}{% endfor %}{% endset %}{{ x }}",
        "{% for at in range(messages | length) %}{{ messages[at].content }}{% endfor %}",
        "{{ messages }}",
    ],
)
def test_other_loops_are_run_as_a_whole(source: str) -> None:
    """Loops whose output or state is not at hand have no checkpoints."""
    template = without_plans(source)
    assert template._checkpoints is None
    assert wrong(template, turns_of_one(20)) == []


def test_a_loop_that_runs_in_another_order_is_run_as_a_whole() -> None:
    """A loop over the messages in reverse, or over some of them, is not resumed."""
    for items in ("messages[::-1]", "messages | rejectattr('tool_calls') | list", "messages[:9]"):
        template = without_plans("{% for m in " + items + " %}{{ m.content }}{% endfor %}")
        assert wrong(template, turns_of_one(30)) == []
        assert resumed(template) == 0
