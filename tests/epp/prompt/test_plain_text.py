"""Plain texts of requests whose prompts are not known."""

import contextlib
import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import BadRequest
from kvist_epp.prompt.plain_text import plain_texts
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.request_types import Chat

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Où?"}
TURNS = [USER, {"role": "assistant", "content": "Là.\n"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def texts(path: str, *, escapes: bool = True, **fields: Any) -> list[bytes]:
    """The texts of a request; ``escapes``: its body has escapes for all other characters."""
    body = json.dumps({"model": "m", **fields}, ensure_ascii=escapes).encode()
    return plain_texts(parse(path, body), body)


def test_a_chat_is_its_tools_and_its_messages() -> None:
    """Tools come first, as in prompts, then roles and texts, without the punctuation of JSON."""
    tool = {"type": "function", "function": {"name": "f"}}
    [text] = texts(CHAT, messages=TURNS, tools=[tool])
    declared, _, said = text.partition(b"]")
    assert b'"name":"f"' in declared
    assert said.decode() == "\nuser\nOù?\nassistant\nLà.\n"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_the_next_turn_continues_the_text(path: str) -> None:
    """A chat's text is a prefix of that of its next turn, whatever API and escapes the client uses."""
    name = "input" if path == "/v1/responses" else "messages"
    fields: dict[str, Any] = {name: [*TURNS, {"role": "user", "content": "Why?"}]}
    [first], [second] = texts(path, **{name: TURNS}), texts(path, escapes=False, **fields)  # type: ignore[arg-type]
    assert second.startswith(first)


def test_parts_are_their_texts_and_media_are_digests() -> None:
    """A picture does not make the text longer, and another one makes another text."""
    content = [{"type": "text", "text": "What"}, PICTURE, {"type": "text", "text": "is it?"}]
    [text] = texts(CHAT, messages=[{"role": "user", "content": content}])
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,B"}}
    [changed] = texts(CHAT, messages=[{"role": "user", "content": [content[0], other]}])

    assert len(text) < 100
    assert text.startswith(b"\0\nuser\nWhat")
    assert text.endswith(b"is it?")
    assert changed[:11] == text[:11]
    assert changed[11:] not in text


def test_calls_and_results_are_part_of_the_text() -> None:
    """Everything that a message has beside its text may be in the prompt."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    [text] = texts(CHAT, messages=[answer, {"role": "tool", "tool_call_id": "1", "content": "17"}])
    assert all(part in text for part in (b"hm", b'"name":"f"', b"\ntool\n17"))


def test_marks_of_cached_parts_are_no_part_of_the_text() -> None:
    """Claude Code moves ``cache_control`` to the last part with each turn, and sends pictures in results."""
    mark = {"cache_control": {"type": "ephemeral"}}
    picture = {"type": "image", "source": {"type": "base64", "data": "A" * 100_000}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}, picture]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    first = [used, {"role": "user", "content": [{**result, **mark}]}]
    second = [used, {"role": "user", "content": [result]}, {"role": "assistant", "content": "b"}]
    [early], [late] = (texts("/v1/messages", system="Brief.", messages=each) for each in (first, second))

    assert late.startswith(early)
    assert texts(CHAT, messages=[USER | mark]) == texts(CHAT, messages=[USER])
    assert b"Brief." in early
    assert len(early) < 300


def test_a_text_is_not_much_longer_than_its_body() -> None:
    """A chat whose text would be is matched by its body."""
    request = msgspec.structs.replace(
        parse(CHAT, b'{"model": "m", "messages": []}'), chat=Chat([USER] * 1_000)
    )
    assert plain_texts(request, b"short") == [b"short"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Où?", ["Où?".encode()]),
        (["a", "b"], [b"a", b"b"]),
        ([1, 2, 70_000], [array("I", (1, 2, 70_000)).tobytes()]),
        ([[1], [2]], [array("I", (1,)).tobytes(), array("I", (2,)).tobytes()]),
    ],
)
def test_a_completion_is_its_prompt(prompt: Any, expected: list[bytes]) -> None:
    """Texts as they are, token ids as four bytes each."""
    assert texts("/v1/completions", prompt=prompt) == expected


@pytest.mark.parametrize(
    ("path", "fields", "start"),
    [
        (CHAT, {"messages": 5}, b'"messages": 5'),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, b'"messages": ['),
        ("/v1/completions", {"prompt": [-1]}, b'"prompt": [-1]'),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, b'"prompt": "x"'),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, b'"input": "x"'),
    ],
)
def test_what_is_not_understood_is_the_body(path: str, fields: dict[str, Any], start: bytes) -> None:
    """The body counts from its messages on, so that what clients vary comes later."""
    [text] = texts(path, **fields)
    assert text.startswith(start)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from((CHAT, "/v1/completions", "/v1/responses", "/v1/messages")), anything, anything)
def test_any_body_has_a_text(path: str, content: Any, other: Any) -> None:
    """Whatever a client sends gives a text, or is refused when it is parsed."""
    messages = [{"role": "user", "content": content, "name": other}, {"content": [content]}]
    fields = {"messages": messages, "prompt": content, "input": messages, "tools": [other]}
    with contextlib.suppress(BadRequest):
        assert texts(path, **fields)
