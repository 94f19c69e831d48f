"""Chats of Kimi K2 and later models, whose tokenizer has code; ``tests/engine`` compares them with vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models import folders

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.kimi_tools import MAX_DEPTH, declare_tools
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.tools import Tool, template_tools, with_sorted_fields

ROOM = 100_000
LOOK_UP = {
    "name": "look_up",
    "description": "Find a word.",
    "parameters": {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "The word"},
            "times": {"type": "integer", "default": 1},
        },
        "required": ["word"],
    },
}
DECLARED = """# Tools

## functions
namespace functions {
// Find a word.
type look_up = (_: {
  // The word
  word: string,
  // Default: 1
  times?: number
}) => any;
}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a model."""
    return folders.write_kimi(tmp_path)


def prompt(home: Path, chats: Chats | None = None, **fields: Any) -> str:
    """The prompt of a chat."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Größe"}], **fields}
    model = Model.load(str(home), chats or Chats())
    assert (model.why_not, model.why_no_chats) == ("", "")
    [made] = model.prompts(parse("/v1/chat/completions", json.dumps(body).encode()))
    return made.decode()


def nested(depth: int) -> dict[str, Any]:
    """A tool whose schema has so many levels."""
    schema: dict[str, Any] = {"type": "string", "description": "x"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"function": {"name": "f", "description": None, "parameters": schema}}


def test_tools_are_declared_in_typescript(home: Path) -> None:
    """The example in the docstring of ``kimi_tools`` holds, and the template gets the text."""
    tools = [{"type": "function", "function": LOOK_UP}]
    assert declare_tools(template_tools(tools), ROOM) == DECLARED
    assert prompt(home, tools=tools) == (
        f"<|im_system|>tool_declare<|im_middle|>{DECLARED}<|im_end|><|im_user|>user<|im_middle|>Größe<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


def test_a_schema_that_refers_to_itself_has_a_name() -> None:
    """The schemas that it defines have names, too."""
    parameters = {
        "type": "object",
        "$defs": {"Leaf": {"type": "object", "description": "A leaf.", "properties": {}}},
        "properties": {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/Leaf"}},
    }
    declared = declare_tools([{"function": {"name": "grow", "parameters": parameters}}], ROOM)
    assert declared is not None
    assert declared.splitlines()[4:-1] == [
        "interface parameters {",
        "  next?: parameters,",
        "  leaf?: Leaf",
        "}",
        "// A leaf.",
        "interface Leaf {}",
        "type grow = (_: parameters) => any;",
    ]


def test_tools_that_cannot_be_declared_are_json(home: Path) -> None:
    """The template then writes them, with the fields of all objects in alphabetical order."""
    parameters = {"properties": {"b": {"title": "no type"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    inner = '{"description": null, "name": "f", "parameters": {"properties": {"b": {"title": "no type"}}}}'
    shown = f'[{{"function": {inner}, "type": "function"}}]'
    assert f"<|im_middle|>{shown}<|im_end|>" in prompt(home, tools=tools)


def test_sorted_tools_and_their_text_are_made_once() -> None:
    """A list of tools that comes again has them already."""
    tools = template_tools([{"type": "function", "function": LOOK_UP}])
    found = with_sorted_fields(tools)
    first = found[0]
    assert isinstance(first, Tool)
    assert list(first["function"]) == ["description", "name", "parameters"]
    assert with_sorted_fields(tools) is found


@pytest.mark.parametrize(
    ("chats", "asked", "ends"),
    [
        (Chats(), {}, "<think>"),
        (Chats(), {"thinking": False}, "<think></think>"),
        (Chats(defaults={"thinking": False}), {}, "<think></think>"),
        (Chats(defaults={"thinking": False}), {"thinking": True}, "<think>"),
    ],
)
def test_a_model_thinks_unless_it_is_told_not_to(
    home: Path, chats: Chats, asked: dict[str, Any], ends: str
) -> None:
    """The code of the tokenizer has a default, over which settings of the engines and requests prevail."""
    assert prompt(home, chats, chat_template_kwargs=asked).endswith(f"<|im_middle|>{ends}")


def test_schemas_are_bounded() -> None:
    """Levels are counted, and so are the characters of indented comments."""
    assert declare_tools([nested(MAX_DEPTH - 1)], ROOM) is not None
    with pytest.raises(UnrenderableError):
        declare_tools([nested(MAX_DEPTH + 1)], ROOM)
    with pytest.raises(UnrenderableError):
        declare_tools([nested(50)], 100)


@pytest.mark.parametrize(
    "code", [None, {}, {"AutoTokenizer": None}, {"AutoTokenizer": "other.Tokenizer"}, []]
)
def test_other_tokenizers_leave_tools_as_they_are(home: Path, code: Any) -> None:
    """Tools are prepared by the code of Kimi's tokenizer only."""
    settings = json.loads((home / "tokenizer_config.json").read_text()) | {"auto_map": code}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    shown = prompt(home, tools=[{"type": "function", "function": {"name": "f"}}])
    assert '[{"type": "function", "function": {"name": "f",' in shown


def test_special_tokens_follow_the_words(home: Path) -> None:
    """Special tokens that the configuration does not name are filled in."""
    vocabulary = Model.load(str(home)).vocabulary
    assert vocabulary.pieces[20_000:20_003] == [b"[BOS]", b"[EOS]", b"<|im_end|>"]
    assert (vocabulary.pieces[-1], len(vocabulary.pieces)) == (b"<|reserved_token_20257|>", 20_258)
    assert vocabulary.join(vocabulary.encode("Größe 🌿<|im_end|>")) == "Größe 🌿<|im_end|>".encode()


@pytest.mark.parametrize("text", ["no ranks", "!!! 0", "YQ== zero"])
def test_a_vocabulary_of_another_format_is_named(home: Path, text: str) -> None:
    """The error says which file, and what to do."""
    (home / "tiktoken.model").write_text(text)
    with pytest.raises(ModelFilesError, match=r"tiktoken\.model"):
        Model.load(str(home))
