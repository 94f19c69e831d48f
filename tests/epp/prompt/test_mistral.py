"""Mistral's own tokenizer and its chats; ``tests/engine`` compares both with vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models import folders

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.mistral import VERSIONS, MistralChats
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.tiktoken_vocab import merge_pairs, tekken_tokenizer
from kvist_epp.prompt.tools import template_tools
from kvist_epp.prompt.vocab import Vocabulary


def said(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content, **fields}


def call(identifier: str) -> dict[str, Any]:
    """A call of the function ``f``."""
    return {"id": identifier, "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def render(version: int, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt without its first token."""
    prompt = MistralChats(version).render(Chat(list(messages), **fields))
    assert prompt.startswith("<s>")
    return prompt.removeprefix("<s>")


def test_instructions_are_messages_from_version_7_on() -> None:
    """Before, they are part of the last question; questions that follow one another are one."""
    chat = (
        said("system", "S"),
        said("user", "U"),
        said("user", "V"),
        said("assistant", "A "),
        said("user", "W"),
    )
    assert render(3, *chat) == "[INST]U\n\nV[/INST]A</s>[INST]S\n\nW[/INST]"
    assert render(7, *chat) == "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U\n\nV[/INST]A</s>[INST]W[/INST]"


def test_a_chat_of_version_3_begins_with_a_question() -> None:
    """Without one, an empty question is put in front."""
    assert render(3, said("assistant", "A"), said("user", "U")) == "[INST][/INST]A</s>[INST]U[/INST]"
    assert render(7, said("assistant", "A"), said("user", "U")) == "A</s>[INST]U[/INST]"


@pytest.mark.parametrize(
    ("version", "calls", "results"),
    [
        (
            3,
            (
                '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "aaaaaaaaa"}, '
                '{"name": "f", "arguments": {"a": 1}, "id": "bbbbbbbbb"}]'
            ),
            (
                '[TOOL_RESULTS]{"content": {"r": "b"}, "call_id": "bbbbbbbbb"}[/TOOL_RESULTS]'
                '[TOOL_RESULTS]{"content": "of a", "call_id": "aaaaaaaaa"}[/TOOL_RESULTS]'
            ),
        ),
        (
            11,
            '[TOOL_CALLS]f[CALL_ID]aaaaaaaaa[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]bbbbbbbbb[ARGS]{"a": 1}',
            (
                "[TOOL_RESULTS]aaaaaaaaa[TOOL_CONTENT]of a[/TOOL_RESULTS]"
                '[TOOL_RESULTS]bbbbbbbbb[TOOL_CONTENT]{"r":"b"}[/TOOL_RESULTS]'
            ),
        ),
        (
            13,
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}',
            '[TOOL_RESULTS]of a[/TOOL_RESULTS][TOOL_RESULTS]{"r":"b"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_calls_and_results_are_written_by_their_version(version: int, calls: str, results: str) -> None:
    """Identifiers are cut to their last characters; from version 11 on results follow their calls' order."""
    prompt = render(
        version,
        said("user", "U"),
        said("assistant", None, tool_calls=[call("call-aaaaaaaaa"), call("bbbbbbbbb")]),
        said("tool", '{"r":"b"}', tool_call_id="bbbbbbbbb"),
        said("tool", "of a", tool_call_id="call-aaaaaaaaa"),
    )
    assert prompt == f"[INST]U[/INST]{calls}</s>{results}"


@pytest.mark.parametrize(("version", "first"), [(3, False), (11, False), (13, True), (15, True)])
def test_tools_are_declared_before_a_question(version: int, first: bool) -> None:
    """Before the last one, from version 13 on before the first one, with what mistral-common fills in."""
    tools = template_tools([{"type": "function", "function": {"name": "f", "strict": True}}])
    shown = '{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}'
    chat = (said("user", "U"), said("assistant", "A"), said("user", "V"))
    declared = f"[AVAILABLE_TOOLS][{shown}][/AVAILABLE_TOOLS]"
    before, between = (declared, "") if first else ("", declared)
    assert render(version, *chat, tools=tools) == f"{before}[INST]U[/INST]A</s>{between}[INST]V[/INST]"


def test_thoughts_are_marked_from_version_13_on() -> None:
    """Reasoning is a thought in front of the answer, and a part of a content may be one."""
    parts = [{"type": "thinking", "thinking": "T", "closed": False}, {"type": "text", "text": "A "}]
    assert render(13, said("user", "U"), said("assistant", "A ", reasoning="R"), said("user", "V")) == (
        "[INST]U[/INST][THINK]R[/THINK]A </s>[INST]V[/INST]"
    )
    assert "[THINK]TA </s>" in render(13, said("user", "U"), said("assistant", parts), said("user", "V"))
    with pytest.raises(UnrenderableError):
        render(11, said("user", "U"), said("assistant", "A", reasoning="R"), said("user", "V"))


@pytest.mark.parametrize(("asked", "written"), [({}, "none"), ({"reasoning_effort": "high"}, "high")])
def test_an_effort_is_a_setting_of_version_15(asked: dict[str, Any], written: str) -> None:
    """The effort is written before the first question: the model's default if the request names none."""
    chats = MistralChats(15, ("none", "high"), "none")
    prompt = chats.render(Chat([said("user", "U")], variables=asked))
    assert prompt == f'<s>[MODEL_SETTINGS]{{"reasoning_effort": "{written}"}}[/MODEL_SETTINGS][INST]U[/INST]'


def test_an_answer_can_be_continued() -> None:
    """The last answer then has no end."""
    prompt = render(13, said("user", "U"), said("assistant", "A"), continue_final_message=True)
    assert prompt == "[INST]U[/INST]A"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "chat",
    [
        (said("critic", "x"),),
        (said("user", [{"type": "image_url", "image_url": {"url": "x"}}]),),
        (said("user", [{"text": "x"}]),),
        (said("user", "U"), said("assistant", [{"type": "thinking", "thinking": "T", "closed": "false"}])),
        (said("user", "U"), said("assistant", None)),
        (said("user", "U"), said("tool", "x")),
        (said("user", "U"), said("assistant", None, tool_calls=[{"id": "a"}])),
        ({"role": "user"},),
    ],
)
def test_what_has_no_known_form_is_not_rendered(version: int, chat: tuple[dict[str, Any], ...]) -> None:
    """Such a chat has no prompt, and raises nothing else."""
    with pytest.raises(UnrenderableError):
        render(version, *chat)


def test_a_tokenizer_of_mistral_is_enough(tmp_path: Path) -> None:
    """Chats and completions of a model that has no other file of a vocabulary have prompts."""
    model = Model.load(str(folders.write_mistral("v13", tmp_path)))
    messages = [said("user", "Größe 🌿")]
    chat = json.dumps({"model": "m", "messages": messages}).encode()
    text = json.dumps({"model": "m", "prompt": "Größe 🌿 [INST]"}).encode()
    assert (model.why_not, model.why_no_chats) == ("", "")
    assert model.prompts(parse("/v1/chat/completions", chat)) == ["<s>[INST]Größe 🌿[/INST]".encode()]
    assert model.prompts(parse("/v1/completions", text)) == ["<s>Größe 🌿 [INST]".encode()]
    assert model.vocabulary.join(model.encode("Größe 🌿")) == "Größe 🌿".encode()


@pytest.mark.parametrize(("path", "order"), [("chat/completions", "BA"), ("responses", "AB")])
def test_identifiers_are_cut_by_the_chat_api_only(tmp_path: Path, path: str, order: str) -> None:
    """Two that end alike name one call there, and two in the Responses API, which decides the order."""
    model = Model.load(str(folders.write_mistral("v13", tmp_path)))
    calls, results = ["a-123456789", "b-123456789"], {"b-123456789": "B", "a-123456789": "A"}
    messages = [said("user", "U"), said("assistant", None, tool_calls=[call(one) for one in calls])]
    messages += [said("tool", text, tool_call_id=one) for one, text in results.items()]
    items: list[dict[str, Any]] = [said("user", "U")]
    called = {"type": "function_call", "name": "f", "arguments": "{}"}
    items += [{**called, "call_id": one} for one in calls]
    items += [{"type": "function_call_output", "call_id": one, "output": results[one]} for one in results]
    body = {"model": "m", "input": items} if path == "responses" else {"model": "m", "messages": messages}
    [prompt] = model.prompts(parse(f"/v1/{path}", json.dumps(body).encode()))
    first, second = (f"[TOOL_RESULTS]{text}[/TOOL_RESULTS]" for text in order)
    assert prompt.decode().endswith(first + second)


def test_a_prompt_that_engines_cut_is_not_rendered() -> None:
    """The Responses API takes a length among the variables of templates."""
    with pytest.raises(UnrenderableError):
        render(13, said("user", "U"), variables={"truncation": True, "max_length": 2})


def test_a_version_that_is_not_known_has_no_chats(tmp_path: Path) -> None:
    """The vocabulary of such a model is used, so that completions are matched."""
    model = Model.load(str(folders.write_mistral("v99", tmp_path)))
    assert (model.why_not, model.why_no_chats) == (
        "",
        "its engines write chats in code of their own (mistral)",
    )


@pytest.mark.parametrize("text", ["{}", '{"config": {"version": "v3"}, "vocab": []}', '{"config": []}'])
def test_a_file_of_another_format_is_named(tmp_path: Path, text: str) -> None:
    """The error says which file, and what to do."""
    (folders.write_mistral("v13", tmp_path) / "tekken.json").write_text(text)
    with pytest.raises(ModelFilesError, match=r"tekken\.json"):
        Model.load(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("config", "pattern", "("),
        ("config", "default_num_special_tokens", 2_000_000),
        ("config", "default_vocab_size", 50),
        ("config", "default_vocab_size", 10**12),
        ("word", "rank", -5),
        ("word", "rank", 2**31),
        ("word", "rank", 7),
        ("word", "token_bytes", "YQ=="),
        ("word", "token_bytes", "!!!"),
        ("word", "token_bytes", "YWFh" * 1_000),
    ],
)
def test_a_vocabulary_that_is_no_vocabulary_is_refused(
    tmp_path: Path, part: str, name: str, value: Any
) -> None:
    """Missing ranks, words that come twice or are very long, and sizes that do not fit cost no memory."""
    file = folders.write_mistral("v13", tmp_path) / "tekken.json"
    found = json.loads(file.read_text())
    (found["config"] if part == "config" else found["vocab"][300])[name] = value
    file.write_text(json.dumps(found))
    with pytest.raises(ModelFilesError, match=r"tekken\.json"):
        Model.load(str(tmp_path))


def test_pairs_are_merged_in_the_order_of_what_they_make() -> None:
    """The example in the docstring of ``merge_pairs`` holds: pairs are in the order of tiktoken's merges."""
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert list(merge_pairs(ranks)) == [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc"), (b"ab", b"c")]


def test_special_tokens_come_first(tmp_path: Path) -> None:
    """Their ids are those of the file, those it does not name are filled in, and the words follow."""
    found = json.loads((folders.write_mistral("v7", tmp_path) / "tekken.json").read_text())
    pieces = Vocabulary(tekken_tokenizer(found)).pieces
    assert (pieces[1], pieces[3], pieces[17], pieces[20]) == (
        b"<s>",
        b"[INST]",
        b"[SYSTEM_PROMPT]",
        b"<SPECIAL_20>",
    )
    assert (pieces[100], pieces[100 + ord("a")], len(pieces)) == (b"\x00", b"a", 20_100)
