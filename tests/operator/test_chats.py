"""Chat flags of engines reach the picker, or a note says why not."""

from dataclasses import replace

import pytest
from tests.operator.pools import plan, pool

from kvist_epp.settings.settings import Settings
from kvist_operator.manifests import Site, render
from kvist_operator.manifests.tokenizer import Tokenizer, chats

QWEN = "Qwen/Qwen3-8B"
TEXT = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--chat-template", TEXT], "chat_template", TEXT),
        ([f"--chat-template={TEXT}"], "chat_template", TEXT),
        (["--chat_template", "a\nb"], "chat_template", "a\nb"),
        (["--chat-template-content-format=string"], "chat_template_content_format", "string"),
        (["--tokenizer-mode", "hf"], "tokenizer_mode", "hf"),
        (["--reasoning-effort-map", '{"max":"high"}'], "reasoning_effort_map", '{"max":"high"}'),
        (["--anthropic-disabled-thinking-effort=low"], "anthropic_disabled_thinking_effort", "low"),
        (["--exclude-tools-when-tool-choice-none"], "exclude_tools_when_tool_choice_none", True),
        (["--exclude-tools"], "exclude_tools_when_tool_choice_none", True),
        (["--anthropic-disabled", "low"], "anthropic_disabled_thinking_effort", "low"),
        (["--reasoning-effort-map", "null"], "reasoning_effort_map", ""),
        (["--chat-template", "None"], "chat_template", ""),
        (["--no-exclude-tools-when-tool-choice-none"], "exclude_tools_when_tool_choice_none", False),
        (
            ["--default-chat-template-kwargs", '{"enable_thinking": false}'],
            "default_chat_template_kwargs",
            '{"enable_thinking": false}',
        ),
    ],
)
def test_the_picker_is_started_with_them(words: list[str], name: str, value: str | bool) -> None:
    """The picker starts with the engines' chat flags, so both render a chat to the same prompt."""
    wanted = pool(f"hf://{QWEN}", engine={"extraArgs": ["--seed", "1", *words]})
    found = render(wanted, plan(QWEN, "H100-80GB"), Site())
    [args] = [
        each["spec"]["template"]["spec"]["containers"][0]["args"]
        for each in found.objects
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "twig-epp"
    ]
    assert getattr(Settings.from_args(args), name) == value
    assert [note for note in found.notes if note.condition == "Precise"] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--chat-template", "/etc/chat.jinja"], "/etc/chat.jinja, which the picker cannot read"),
        (["--default-chat-template-kwargs.enable_thinking", "false"], "JSON included"),
        (["--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--reasoning-effort-map.max", "high"], "JSON included"),
    ],
)
def test_what_the_picker_cannot_have_is_reported(words: list[str], says: str) -> None:
    """The condition Precise is false and names the flag and the remedy; the picker starts without the
    flag."""
    found = chats(pool(f"hf://{QWEN}", engine={"extraArgs": words}), Tokenizer(model=f"hf://{QWEN}"))
    [note] = found.notes
    assert (note.condition, note.reason, found.settings) == ("Precise", "ChatFlagUnreadable", {})
    assert says in note.message
    assert words[0].partition(".")[0] in note.message


def test_a_file_that_both_mount_is_passed_on() -> None:
    """A file in the model's folder is passed on if the picker mounts that folder, which has the same path in
    both."""
    wanted = pool(f"hf://{QWEN}", engine={"extraArgs": ["--chat-template=/model/chat.jinja"]})
    hub = Tokenizer(model=f"hf://{QWEN}")
    assert chats(wanted, hub).settings == {}
    shared = replace(hub, mount=object())  # type: ignore[arg-type]
    assert chats(wanted, shared).settings == {"chat_template": "/model/chat.jinja"}
    assert chats(wanted, Tokenizer()).notes == ()
