"""Chat flags that engines were started with override the model's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models import folders

from kvist_epp.app.model_loader import chats_of
from kvist_epp.errors import ModelFilesError, SettingsError
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.request import parse
from kvist_epp.settings.settings import Settings

SHOWN = "{{ enable_thinking }}|{{ depth }}|{{ messages[0].content if messages else '' }}"


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A model whose files have a template."""
    return str(folders.write("llama3", tmp_path))


def prompt(home: str, chats: Chats, **fields: Any) -> str:
    """The prompt of a chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    [made] = Model.load(home, chats).prompts(parse("/v1/chat/completions", json.dumps(body).encode()))
    return made.decode()


def test_a_template_of_the_engines_is_used_for_all_chats(home: str, tmp_path: Path) -> None:
    """Given as text or as a file, with tools or without, in place of the one in the model's files."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    file = tmp_path / "of the engines"
    file.write_text("chat: {{ messages[0].content }}")
    for template in (file.read_text(), str(file)):
        assert prompt(home, Chats(template)) == "chat: hi"
        assert prompt(home, Chats(template), tools=tools) == "chat: hi"
    assert "hi" in prompt(home, Chats()) != "chat: hi"


def test_defaults_yield_to_what_a_request_says(home: str) -> None:
    """A request's own variables win, also those that follow from its effort; null and "auto" say nothing."""
    chats = Chats(SHOWN, defaults={"enable_thinking": False, "depth": 3, "unknown": 1})
    assert prompt(home, chats) == "False|3|hi"
    assert prompt(home, chats, chat_template_kwargs={"depth": 4}) == "False|4|hi"
    assert prompt(home, chats, chat_template_kwargs={"depth": None}) == "False|3|hi"
    assert prompt(home, chats, chat_template_kwargs={"depth": "auto"}) == "False|3|hi"
    assert prompt(home, chats, reasoning_effort="high") == "True|3|hi"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("hf", "T"), ("HF", "T"), ("mistral", None), ("deepseek_v32", "</think>"), ("another", None)],
)
def test_the_mode_of_the_engines_decides_what_writes_chats(
    home: str, mode: str, expected: str | None
) -> None:
    """The template, code that is known here, or nothing: a mode of vLLM's plugins may write anything."""
    (Path(home) / "tokenizer.model.v3").write_text("")
    (Path(home) / "consolidated.safetensors").write_text("")
    assert Model.load(home).why_no_chats
    chats = Chats("T{# a template #}", tokenizer_mode=mode)
    if expected is None:
        said = f"its engines write chats in code of their own ({mode})"
        assert Model.load(home, chats).why_no_chats == said
    else:
        assert prompt(home, chats).endswith(expected)


def test_the_form_of_contents_can_be_set(home: str) -> None:
    """The format of contents can be set; without it, the loops of the template decide."""
    first = "{{ messages[0].content is string }}"
    assert prompt(home, Chats(first)) == "True"
    assert prompt(home, Chats(first, style="openai")) == "False"
    loops = "{% for m in messages %}{% for c in m.content %}.{% endfor %}{% endfor %}"
    assert prompt(home, Chats(loops)) == "."
    assert prompt(home, Chats(loops, style="string")) == ".."


@pytest.mark.parametrize(
    ("template", "words"),
    [("/nowhere/chat.jinja", "--chat-template: cannot read"), ("{% for %}", "does not compile")],
)
def test_a_template_that_cannot_be_used_is_named(home: str, template: str, words: str) -> None:
    """The message says what is wrong with it."""
    with pytest.raises(ModelFilesError, match=words):
        Model.load(home, Chats(template))


def test_flags_become_what_a_model_is_loaded_with() -> None:
    """Flags arrive as the engines have them; a value that is no JSON object is refused with the flag's
    name."""
    told = Settings(
        chat_template=SHOWN,
        chat_template_content_format="openai",
        default_chat_template_kwargs='{"a": [1]}',
        tokenizer_mode="hf",
    )
    assert chats_of(told) == Chats(SHOWN, "openai", {"a": [1]}, "hf")
    assert chats_of(Settings()) == Chats()
    for text in ("{", "[1]", "3"):
        with pytest.raises(SettingsError, match="--default-chat-template-kwargs"):
            Settings(default_chat_template_kwargs=text)
    with pytest.raises(SettingsError, match="--chat-template-content-format"):
        Settings(chat_template_content_format="parts")
    with pytest.raises(SettingsError, match="--tokenizer-mode"):
        Settings(tokenizer_mode="")
