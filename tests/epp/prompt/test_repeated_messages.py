"""Promises for templates that compare messages: a later one may be equal to one that was written long ago."""

from typing import Any

import pytest
from jinja2 import Environment
from tests.epp.prompt.test_checkpoints import TOOLS, kept, without_plans, wrong

from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template_loops import compares_messages

_ASKED = "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
LAST_ASKED = f"{_ASKED}{{% for m in messages %}}{{% if m == asked[-1] %}}{{{{ tools }}}}{{% endif %}}"
"""As Mistral's template, which declares the tools before the last question."""
LAST = "{% for m in messages %}{% if messages | last != m %}{{ m.role }}{% endif %}"
AMONG_LAST = "{% for m in messages %}{% if m in messages[-3:] %}last {% endif %}"
PLACE = "{% for m in messages %}{% if messages[::-1].index(m) > 4 %}old {% endif %}"
COMPARING = [f"{begin}{{{{ m.content }}}}{{% endfor %}}" for begin in (LAST_ASKED, LAST, AMONG_LAST, PLACE)]


def conversation(questions: list[str]) -> list[Chat]:
    """Return the turns of a chat in which these questions are asked."""
    messages: list[dict[str, Any]] = []
    chats = []
    for number, question in enumerate(questions):
        messages = [*messages, {"role": "user", "content": question}]
        chats.append(Chat(messages, TOOLS[0]))
        messages = [*messages, {"role": "assistant", "content": f"Part {number}."}]
    return chats


@pytest.mark.parametrize("source", COMPARING)
def test_a_question_that_is_asked_again_changes_what_was_written_of_it(source: str) -> None:
    """After 20 conversations without repetitions, which are resumed where the template allows it, each turn
    of one whose user says "continue" has the prompt that the template gives for all messages."""
    template = without_plans(source)
    for chat in range(20):
        assert wrong(template, conversation([f"What about {n} of {chat}?" for n in range(40)])) == []
    repeating = ["continue" if number % 4 else f"Now {number}" for number in range(40)]
    assert wrong(template, conversation(repeating)) == []


def test_conversations_without_repetitions_are_resumed_as_before() -> None:
    """Mistral's template compares all messages with the last question, which is another one each time."""
    template = without_plans(COMPARING[0])
    wrong(template, conversation([f"What about {number}?" for number in range(40)]))
    assert kept(template).resumed > 20


def test_no_chat_is_compared_for_long() -> None:
    """Thousands of messages behind the last answer, as in a document sent line by line, are rendered as a
    whole."""
    template = without_plans(COMPARING[0])
    few = conversation([f"What about {number}?" for number in range(40)])
    wrong(template, few)
    before = kept(template).resumed
    lines = [{"role": "user", "content": f"line {number}"} for number in range(1_000)]

    assert wrong(template, [Chat([*few[-1].messages, *lines], TOOLS[0])]) == []
    assert kept(template).resumed == before


@pytest.mark.parametrize(
    ("condition", "compares"),
    [
        ("m == messages[-1]", True),
        ("messages | last == m", True),
        ("rest[0] != m", True),
        ("m in rest", True),
        ("messages.index(m) > 3", True),
        ("m.role == 'user'", False),
        ("m['role'] == messages[0]['role']", False),
        ("messages | length == 1", False),
        ("messages | length == count", False),
        ("loop.index0 == last", False),
        ("'user' in m", False),
    ],
)
def test_comparisons_of_messages_are_told_from_those_of_their_fields(condition: str, compares: bool) -> None:
    """Roles are compared by nearly all templates, whole messages by few."""
    source = "{% set rest = messages[1:] %}{% for m in messages %}{% if C %}x{% endif %}{% endfor %}"
    assert compares_messages(Environment().parse(source.replace("C", condition))) is compares
