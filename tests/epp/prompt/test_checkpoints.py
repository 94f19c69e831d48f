"""Promises of ``checkpoints`` and ``resumed_render``: the next turn of a chat is rendered as the whole."""

import gc
import json
import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.prompt.test_agent_plans import CALLS_SHOWN, REASONING_SHOWN
from tests.epp.prompt.test_render_plan import PUBLISHED, pair_source, plans
from tests.epp.prompt.test_template_parity import SPECIALS

from kvist_epp.prompt import checkpoints, template_environment
from kvist_epp.prompt import template as template_module
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.checkpoints import MIN_MESSAGES, Checkpoints
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
    question = draw.choice(["continue", f"do {draw.random()}"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}] if asks else []
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


def kept(template: Template) -> Checkpoints:
    """Return the checkpoints of a template that can have some."""
    assert template._checkpoints is not None
    return template._checkpoints


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
    assert template._checkpoints is None or kept(template).differences == 0


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
    assert kept(template).resumed == 40 - MIN_MESSAGES // 2


def test_a_new_question_is_rendered_from_the_start_if_answers_lie_before_it() -> None:
    """Templates hide the reasoning before the last question, so that a new one changes what came before."""
    template = without_plans(REASONING_SHOWN[0])
    assert wrong(template, turns_of_one(60, field="reasoning", ask_each=4)) == []
    assert kept(template).resumed > 0


def test_results_in_messages_of_the_user_are_no_questions() -> None:
    """Some clients send the results of calls as the user; what the template counts as a question decides."""
    template = without_plans(REASONING_SHOWN[0])
    messages: list[dict[str, Any]] = []
    chats = []
    for number in range(120):
        asked = "do" if number % 20 == 0 else "<t>result</t>"
        messages = [*messages, {"role": "user", "content": f"{asked}"}]
        chats.append(Chat(messages))
        messages = [*messages, {"role": "assistant", "content": f"x{number}", "reasoning": f"why {number}"}]
    assert wrong(template, chats) == []
    assert kept(template).resumed > 60
    assert kept(template).differences == 0


@pytest.mark.parametrize("reasons", [True, False])
def test_an_answer_without_calls_may_end_what_is_shown(reasons: bool) -> None:
    """A template that hides the reasoning before the last answer without calls is rendered as a whole when an
    agent says something beside its calls."""
    source = "{% for m in messages %}{% set later = messages[loop.index:] | selectattr('role', 'equalto', "
    source += (
        "'assistant') | rejectattr('tool_calls') | list %}{{ m.content }}{% if not later %}{{ m.reasoning }}"
    )
    template = without_plans(source + "{% endif %}{% endfor %}")
    chats = []
    for number, chat in enumerate(turns_of_one(60, field="reasoning" if reasons else "")):
        note = {"role": "assistant", "content": f"note {number}"}
        at = len(chat.messages) - 2 - number % 7
        chats.append(Chat([*chat.messages[:at], *[note] * (number % 9 == 0), *chat.messages[at:]], TOOLS[0]))
    assert wrong(template, chats) == []
    assert kept(template).resumed > 20


def test_values_that_a_checkpoint_keeps_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that a template sets, and those that its loop makes, count for what they take."""
    source = "{% set mine = given %}{% set ns = namespace(all=[]) %}" + _EACH
    template = without_plans(source + "{% set ns.all = ns.all + [m.content] %}{{ loop.index }}{% endfor %}")
    for chat in turns_of_one(20):
        template.render(Chat(chat.messages, variables={"given": ["x" * 200] * 30}))
    [checkpoint] = kept(template)._kept.values()
    assert checkpoint.weight > 30 * 200 + 30 * 50
    many = Chat(turns_of_one(20)[-1].messages, variables={"given": ["x"] * 100})
    template.render(many)
    assert kept(template).find(many, many.variables) is None


def test_examples_before_a_question_have_a_plan() -> None:
    """Chats of a known shape are rendered by its plan however long they are, checkpoints or not."""
    template = Template(pair_source("chatml"), SPECIALS)
    examples = [{"role": "assistant" if at % 2 else "user", "content": f"{at}"} for at in range(32)]
    for number in range(4):
        chat = Chat([*examples, {"role": "user", "content": f"question {number}"}])
        assert template.render(chat) == template.complete(chat)
    assert len(plans(template)) == 1


@pytest.mark.parametrize("count", [8, 30])
def test_a_rendered_chat_is_released_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a kept prompt refers to the messages of a chat, or to its text."""
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 0)
    text = "a text".title()
    chats = [Chat([{"role": "assistant", "content": text}] * size) for size in (count, count + 2)]
    before = sys.getrefcount(text)
    template = without_plans(COUNTED)
    gc.disable()
    try:
        for chat in chats:
            template.render(chat)
        assert sys.getrefcount(text) == before
    finally:
        gc.enable()


def test_tools_that_print_differently_are_other_tools() -> None:
    """The order of a tool's fields, and whether a value is 1 or true, is part of what a checkpoint serves."""
    source = _EACH + "{{ m.content }}{{ tools | tojson }}{% endfor %}"
    template = without_plans(source)
    messages = [{"role": "assistant" if at % 2 else "user", "content": f"{at}"} for at in range(40)]
    alike = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}]
    for count in (30, 32, 34, 36):
        for parameters in alike:
            tools = template_tools([{"function": {"name": "f", "parameters": parameters}}])
            chat = Chat(messages[:count], tools)
            assert template.render(chat) == template.complete(chat)
    assert kept(template).resumed == 3 * len(alike)


def test_variables_that_the_template_does_not_use_do_not_matter() -> None:
    """Each request may have a number of its own among its variables, and any list or object."""
    template = without_plans(COUNTED)
    for number, chat in enumerate(turns_of_one(20)):
        variables = {"request": f"{number}", "more": [{"x": number}]}
        template.render(Chat(chat.messages, TOOLS[0], variables=variables))
    assert kept(template).resumed == 20 - MIN_MESSAGES // 2


def test_a_prompt_that_would_fill_the_bound_is_not_kept() -> None:
    """One huge chat does not take the place of all others."""
    template = without_plans(LOOP_VARIABLES)
    for chat in turns_of_one(20):
        template.render(chat)
    size = checkpoints.MAX_BYTES // 8 // 24
    huge = [{"role": "assistant" if at % 2 else "user", "content": "x" * size} for at in range(25)]
    assert template.render(Chat(huge), 10**8)
    assert len(kept(template)._kept) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% set j = joiner(', ') %}" + _EACH + "{{ j() }}{{ m.content }}{% endfor %}",
        "{% set c = cycler(1, 2, 3) %}" + _EACH + "{{ c.next() }}{{ m.content }}{% endfor %}",
        "{% set c = messages | map(attribute='content') %}" + _EACH + "{{ c | first }}{% endfor %}",
        "{% macro new(l, m) %}{{ l.changed(m.role) }}{% endmacro %}"
        + _EACH
        + "{{ new(loop, m) }}{{ m.content }}{% endfor %}",
        "{% for m in messages | sort(attribute='role') %}{{ m.content }}{% endfor %}",
        "{% set many = range(5000) | list %}" + _EACH + "{{ m.content }}{% endfor %}",
    ],
)
def test_what_cannot_be_compared_is_run_as_a_whole(source: str) -> None:
    """Objects that change as they are used, and what is too much to compare, have no checkpoint."""
    template = without_plans(source)
    assert wrong(template, turns_of_one(30)) == []
    assert template._checkpoints is None or kept(template).resumed == 0


def test_a_template_that_looks_ahead_is_given_up() -> None:
    """After three prompts that were found to be wrong, no prompt of that kind is resumed any more."""
    ahead = without_plans(_EACH + "{{ m.content }}{{ messages | length }};{% endfor %}")
    assert wrong(ahead, turns_of_one(60)) == []
    assert kept(ahead).differences == checkpoints._MAX_DIFFERENCES
    assert kept(ahead).resumed == checkpoints._MAX_DIFFERENCES


def test_a_kind_that_was_given_up_is_taken_up_again() -> None:
    """Chats of one client whose prompts cannot be resumed do not keep others from it for ever, nor are other
    conversations forgotten; no prompt is wrong meanwhile."""
    template = without_plans(
        _EACH + "{{ m.content }}{% if 'odd' in messages[-1].content %}!{% endif %}{% endfor %}"
    )
    honest = turns_of_one(20)
    assert wrong(template, honest[:-1]) == []
    for number, chat in enumerate(turns_of_one(100)[20:]):
        *messages, last = chat.messages
        odd = Chat([*messages, {**last, "content": "odd" if number % 2 else "even"}], TOOLS[0])
        rendered(template, odd, complete=False)
    assert kept(template).differences >= checkpoints._MAX_DIFFERENCES

    before = kept(template).resumed
    for _ in range(4 * checkpoints._CHECKED_EACH):
        assert wrong(template, honest[-1:]) == []
    assert kept(template).resumed - before > checkpoints._CHECKED_EACH


def test_chats_whose_checkpoints_are_stale_are_seldom_tried() -> None:
    """A template that sets something else for each chat before its loop is soon run from the start."""
    source = (
        "{% set all = messages | map(attribute='content') | join %}" + _EACH + "{{ m.content }}{% endfor %}"
    )
    template = without_plans(source)
    assert wrong(template, turns_of_one(200)) == []
    assert kept(template).resumed == 0
    [stale] = [record._stale for record in kept(template)._records.values() if record._stale]
    assert checkpoints._PATIENCE <= stale < 60


def test_stale_checkpoints_between_others_do_no_harm() -> None:
    """Chats whose checkpoints cannot be used now and then do not add up until few are tried."""
    source = (
        "{% set ns = namespace(last=0, odd=false) %}" + _EACH + "{% if m.role == 'user' %}{% set ns.last = "
    )
    source += "loop.index0 %}{% set ns.odd = 'odd' in m.content %}{% endif %}{% endfor %}"
    template = without_plans(source + _EACH + "{{ m.content }}{{ ns.odd }}{% endfor %}")
    messages = [{"role": "assistant" if at % 2 else "user", "content": f"{at}"} for at in range(400)]
    for at in range(2, 400, 10):
        messages[at]["content"] = "odd"
    chats = [Chat(messages[:count]) for count in range(31, 400, 2)]
    assert wrong(template, chats) == []
    assert kept(template).resumed > len(chats) / 2


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
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 100_000)
    template = without_plans(COUNTED)
    found = kept(template)
    for number in range(30):
        texts = [f"{number} {at}" for at in range(30 + number)]
        messages = [
            {"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)
        ]
        template.render(Chat(messages))
        assert 0 < found._bytes == sum(one.weight for one in found._kept.values()) <= 100_000


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
    assert kept(template).resumed > 0


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
        assert kept(template).resumed == 0
