"""Flags of engines that change chats before a template sees them change ours, too."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models import folders

from kvist_epp.app.model_loader import chats_of
from kvist_epp.errors import SettingsError
from kvist_epp.prompt.chat_rules import ChatRules
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.request import parse
from kvist_epp.settings.settings import Settings

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SHOWN = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ tools | length if tools else 0 }}"
USER = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TOOLS = {
    CHAT: FUNCTION,
    RESPONSES: {"type": "function", "name": "f"},
    MESSAGES: {"name": "f", "input_schema": {}},
}
NONE = {CHAT: "none", RESPONSES: "none", MESSAGES: {"type": "none"}}
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}


@pytest.fixture
def home(tmp_path: Path) -> str:
    """The folder of a model."""
    return str(folders.write("chatml", tmp_path))


def prompt(home: str, rules: ChatRules, path: str, template: str = SHOWN, **fields: Any) -> str:
    """Return what a template shows of a request."""
    body = {"model": "m", "input" if path == RESPONSES else "messages": [USER], **fields}
    [made] = Model.load(home, Chats(template, rules=rules)).prompts(parse(path, json.dumps(body).encode()))
    return made.decode()


@pytest.mark.parametrize("path", TOOLS)
def test_tools_that_must_not_be_called_are_hidden_with_the_flag_only(home: str, path: str) -> None:
    """A request that forbids calls has no tools then; one that leaves the choice open keeps them."""
    tools, none = [TOOLS[path]], NONE[path]
    hiding = ChatRules(hide_unwanted_tools=True)
    assert prompt(home, hiding, path, tools=tools, tool_choice=none)[-1] == "0"
    assert prompt(home, hiding, path, tools=tools)[-1] == "1"
    assert prompt(home, ChatRules(), path, tools=tools, tool_choice=none)[-1] == "1"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, lambda effort: {"reasoning_effort": effort}),
        (RESPONSES, lambda effort: {"reasoning": {"effort": effort}}),
        (MESSAGES, lambda effort: {"output_config": {"effort": effort}}),
    ],
)
def test_an_effort_is_rewritten_before_thinking_follows_from_it(home: str, path: str, field: Any) -> None:
    """A template gets the effort of the map, and thinking is on or off by that one; others pass unchanged,
    and what the request says of thinking itself stands."""
    rules = ChatRules(efforts={"medium": "none", "max": "high"})
    assert prompt(home, rules, path, **field("max")) == "high|True|0"
    assert prompt(home, rules, path, **field("medium")) == "none|False|0"
    assert prompt(home, rules, path, **field("low")) == "low|True|0"
    told: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(home, rules, path, **told, **field("medium")) == "none|True|0"


@pytest.mark.parametrize(
    ("template", "effort"),
    [
        (SHOWN, "none"),
        ("{{ enable_thinking }}", "none"),
        ("{{ reasoning_effort if reasoning_effort == 'low' else 'max' }}", "low"),
        ("{# no effort #}", "low"),
        ("{{ raise_exception('no') if reasoning_effort == 'none' }}{{ reasoning_effort }}", "low"),
    ],
)
def test_thinking_that_is_off_is_an_effort_that_the_template_knows(
    home: str, template: str, effort: str
) -> None:
    """Engines ask for no effort, and for a low one if the template refuses that or cannot tell it from
    others."""
    assert Model.load(home, Chats(template)).rules.thinking_off == effort


def test_the_effort_for_thinking_that_is_off_can_be_set(home: str) -> None:
    """The effort is the flag's, rewritten like any other, and counts more than one of the request."""
    assert prompt(home, ChatRules(thinking_off="high"), MESSAGES, **OFF) == "high|True|0"
    rules = ChatRules(efforts={"high": "max", "none": "minimal"}, thinking_off="high")
    low: dict[str, Any] = {"output_config": {"effort": "low"}}
    assert prompt(home, rules, MESSAGES, **OFF, **low) == "max|True|0"
    assert prompt(home, ChatRules(efforts={"none": "minimal"}), MESSAGES, **OFF) == "minimal|True|0"


def test_an_effort_that_becomes_automatic_is_none(home: str) -> None:
    """The effort of the request's variables counts then, and thinking stays on."""
    rules = ChatRules(efforts={"medium": "auto"})
    told: dict[str, Any] = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert prompt(home, rules, CHAT, reasoning_effort="medium", **told) == "low|True|0"


def test_a_chat_that_no_rule_changes_is_the_same_object() -> None:
    """Nearly all requests are: nothing is made for them."""
    chat = parse(
        CHAT, json.dumps({"model": "m", "messages": [USER], "reasoning_effort": "low"}).encode()
    ).chat
    assert chat is not None
    assert ChatRules(hide_unwanted_tools=True, efforts={"max": "high"}).apply(chat) is chat


def test_flags_become_rules() -> None:
    """The rules are those of the engines' flags of the same names."""
    told = Settings(
        exclude_tools_when_tool_choice_none=True,
        reasoning_effort_map='{"medium": "low"}',
        anthropic_disabled_thinking_effort="low",
    )
    assert chats_of(told).rules == ChatRules(
        hide_unwanted_tools=True, efforts={"medium": "low"}, thinking_off="low"
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("reasoning_effort_map", "[]", "must be a JSON object"),
        ("reasoning_effort_map", '{"low": 1}', "must be a JSON object"),
        ("reasoning_effort_map", '{"small": "low"}', "small: must be one of none, minimal"),
        ("anthropic_disabled_thinking_effort", "minimal", "must be one of auto, none, low"),
    ],
)
def test_efforts_that_engines_do_not_have_are_refused(field: str, value: str, says: str) -> None:
    """The message names the flag and what it takes."""
    given: dict[str, Any] = {field: value}
    with pytest.raises(SettingsError, match=f"--{field.replace('_', '-')}: .*{says}|{says}"):
        Settings(**given)
