"""Promises of ``request.parse``: what is decoded, what is refused, what has no prompt."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import BadRequest
from kvist_epp.prompt.request import Chat, Kind, Request, parse

CHAT = "/v1/chat/completions"
GENERATION = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Request:
    """A parsed chat of one message, with these fields besides."""
    return parse(CHAT, json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> Request:
    """A parsed completion with these fields."""
    return parse("/v1/completions", json.dumps({"model": "m", **fields}).encode())


def test_a_chat_gives_what_routing_and_rendering_need() -> None:
    """The whole request, as one object."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = {
        "model": "adapter",
        "messages": MESSAGES,
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "n": 2,
        "stream": True,
        "cache_salt": "tenant",
        "session_id": "s-1",
        "tools": [tool],
        "temperature": 0.1,
        "unknown": {"deep": [1]},
    }
    data = json.dumps(body).encode()
    assert parse(CHAT, data) == Request(
        kind=Kind.CHAT,
        model="adapter",
        salt="tenant",
        max_tokens=7,
        stream=True,
        n=2,
        session="s-1",
        size=len(data),
        exact=True,
        chat=Chat(
            MESSAGES,
            [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}],
        ),
    )


@pytest.mark.parametrize("path", [*GENERATION, "/tenant-a/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m"',
        b"\xff\xfe\xff",
        b'{"model":"\xc3\x28"}',
        b"model=m",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
    ids=["empty", "truncated", "half", "not utf-8", "broken utf-8", "a form", "deep lists", "deep objects"],
)
def test_a_known_path_refuses_what_is_not_json(path: str, body: bytes) -> None:
    """Truncated, badly encoded, empty and bottomless bodies get 400, and nothing crashes."""
    with pytest.raises(BadRequest, match="not JSON"):
        parse(path, body)


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize(
    "body", [{}, {"model": None}, {"model": ""}, {"model": 5}, {"model": ["m"]}, [], None, 3, "m"]
)
def test_a_known_path_refuses_a_body_without_a_model(path: str, body: Any) -> None:
    """Absent, null, empty, no string, or no object to have one: 400 naming the field."""
    with pytest.raises(BadRequest, match="'model'"):
        parse(path, json.dumps(body).encode())


@pytest.mark.parametrize("path", GENERATION)
def test_a_model_alone_is_routed_by_load(path: str) -> None:
    """A request with nothing but a model has no prompt; refusing it is left to the engine."""
    request = parse(path, b'{"model":"m","cache_salt":"s"}')
    assert (request.model, request.salt, request.chat, request.prompts, request.why) == (
        "m",
        "s",
        None,
        (),
        "shape",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "hi"},
        {"messages": {"role": "user"}},
        {"messages": ["hi"]},
        {"messages": None},
        {"tools": [1]},
        {"tools": "f"},
        {"tools": [{"type": "web"}]},
        {"tools": []},
        {"add_generation_prompt": "false"},
        {"chat_template_kwargs": []},
        {"cache_salt": 5},
        {"truncate_prompt_tokens": 10},
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tools": []}},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
    ],
    ids=json.dumps,
)
def test_a_chat_of_unexpected_shape_is_not_rendered(fields: dict[str, Any]) -> None:
    """The engine may still take it, so it is not refused; its prompt is not claimed."""
    request = chat(**fields)
    refused = request.chat is None or request.chat.refusal == request.why
    assert (request.kind, request.model, request.exact, bool(request.why), refused) == (
        *(Kind.CHAT, "m", False),
        *(True, True),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("n", None),
        ("n", "x"),
        ("stream", "yes"),
        ("session_id", 4),
    ],
)
def test_odd_values_of_fields_that_do_not_decide_the_prompt_are_taken_as_absent(
    field: str, value: Any
) -> None:
    """The prompt is still matched."""
    request = chat(**{field: value})
    assert (request.max_tokens, request.n, request.stream, request.session, request.exact) == (
        None,
        1,
        False,
        None,
        True,
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"model":"m","messages":[],"seed":' + "9" * 5000 + "}",
        '{"model":"x","model":"m","messages":[]}',
        '{"model":"m","messages":[],"user":"\\u0000","x":1e999}',
        '{"model":"m","messages":[],"x":NaN}',
    ],
    ids=["huge number", "duplicate keys", "nul", "not a number"],
)
def test_strange_json_that_the_engine_reads_is_taken(text: str) -> None:
    """Huge numbers, duplicate keys (the last wins), NUL and NaN do no harm."""
    assert parse(CHAT, text.encode()).model == "m"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("GET", "/v1/embeddings"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/"),
        ("POST", ""),
    ],
)
def test_other_paths_and_methods_are_routed_by_load_without_a_look_at_the_body(
    method: str, path: str
) -> None:
    """No JSON is asked for where none is due."""
    assert parse(path, b"\xff", method=method) == Request(kind=Kind.OTHER, size=1, why="path")


@pytest.mark.parametrize(
    ("given", "effort", "expected"),
    [
        (None, None, {}),
        ({"a": 1, "b": None, "c": "auto"}, None, {"a": 1}),
        (None, "high", {"reasoning_effort": "high", "enable_thinking": True}),
        (None, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": True}, "none", {"reasoning_effort": "none", "enable_thinking": True}),
        ({"reasoning_effort": "low"}, "high", {"reasoning_effort": "high", "enable_thinking": True}),
    ],
)
def test_template_variables_are_merged_as_the_engine_does(
    given: dict[str, Any] | None, effort: str | None, expected: dict[str, Any]
) -> None:
    """Null and "auto" mean unset; an effort implies thinking unless the client says otherwise."""
    parsed = chat(chat_template_kwargs=given, reasoning_effort=effort).chat
    assert parsed is not None
    assert parsed.variables == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2], ([1, 2],)),
        ("", ("",)),
        ([1, 2.5], ()),
        ([[1], ["x"]], ()),
        ([[1], []], ()),
        ({"a": 1}, ()),
        ([[1, 2], [3]], ([1, 2], [3])),
        ([], ()),
        ([[]], ()),
        ([1, "x"], ()),
        ([True], ()),
        (None, ()),
    ],
)
def test_completion_prompts_come_as_texts_or_token_ids(prompt: Any, expected: tuple[Any, ...]) -> None:
    """One or several of either; mixtures have no prompt."""
    request = completion(prompt=prompt)
    assert (request.prompts, request.exact, request.add_special_tokens) == (
        expected,
        bool(expected),
        bool(expected),
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "x"}, "embeds"),
        ({"truncate_prompt_tokens": -1}, "truncation"),
    ],
)
def test_completions_that_change_their_prompt_are_routed_by_load(fields: dict[str, Any], why: str) -> None:
    """Fill-in-the-middle, embeddings and truncation give prompts we do not know."""
    assert completion(prompt="x", **fields).why == why


def test_token_in_requests_need_no_model() -> None:
    """``/inference/v1/generate`` carries the very ids, unless media stand among them."""
    plain = parse("/inference/v1/generate", b'{"token_ids":[1,2],"sampling_params":{"max_tokens":3}}')
    media = parse("/inference/v1/generate", b'{"token_ids":[1,2],"features":{"mm_hashes":{}}}')
    assert (plain.prompts, plain.model, plain.max_tokens, plain.exact) == (([1, 2],), None, 3, True)
    assert (media.prompts, media.why) == ((), "media")


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"x"', b"{"])
def test_token_in_requests_that_are_no_objects_are_refused(body: bytes) -> None:
    """A body in which no engine finds token ids is refused like one that is not JSON."""
    with pytest.raises(BadRequest):
        parse("/inference/v1/generate", body)


@pytest.mark.parametrize("ids", [[], "x", [1.5], [True], [[1]], None])
def test_token_in_requests_without_ids_are_routed_by_load(ids: Any) -> None:
    """A body whose ids are absent or of another type is left to the engine, with a model or without."""
    for model in ({}, {"model": "m"}):
        request = parse("/inference/v1/generate", json.dumps({"token_ids": ids, **model}).encode())
        assert (request.prompts, request.why, request.exact) == ((), "shape", False)
        assert request.model == model.get("model")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


FIELDS = (
    *("messages", "prompt", "input", "tools", "system", "stream", "max_tokens", "cache_salt", "instructions"),
    *(
        "reasoning",
        "chat_template_kwargs",
        "thinking",
        "add_special_tokens",
        "documents",
        "kv_transfer_params",
    ),
)


@given(path=st.sampled_from(GENERATION), fields=st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_value_in_any_field_is_a_request(path: str, fields: dict[str, Any]) -> None:
    """Whatever the fields hold, a body with a model is routed."""
    assert parse(path, json.dumps({"model": "m", **fields}).encode()).model == "m"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_of_json_are_read_as_engines_read_them(encoding: str) -> None:
    """Some clients send a byte order mark; the prompt is that of the same body in UTF-8."""
    body = json.dumps({"model": "m", "messages": MESSAGES, "user": "é"}, ensure_ascii=False)
    plain, sent = parse(CHAT, body.encode()), parse(CHAT, body.encode(encoding))

    assert (sent.chat, sent.model, sent.why) == (plain.chat, "m", "")


@pytest.mark.parametrize("body", [b"\xef\xbb\xbf" * 100_000, b"\xff\xfe\x00\xd8", b"\xef\xbb\xbf{"])
def test_marks_without_json_behind_them_are_refused(body: bytes) -> None:
    """However many there are."""
    with pytest.raises(BadRequest):
        parse(CHAT, body)
