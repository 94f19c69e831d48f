"""Requests of gateways that send no path: their API is known by the body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import BadRequest
from kvist_epp.prompt.implied_path import implied_path
from kvist_epp.prompt.request import Kind, Request, parse

SAID = [{"role": "user", "content": "hi"}]
TEXTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/chat/completions", {"messages": TEXTS, "max_tokens": 4, "tools": []}),
    ("/v1/chat/completions", {"messages": SAID, "system": None, "thinking": None}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": [1, 2, 3], "messages": None}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": SAID, "instructions": "be short"}),
    ("/v1/messages", {"messages": TEXTS, "system": "be short", "max_tokens": 4}),
    ("/v1/messages", {"messages": SAID, "stop_sequences": ["x"], "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": SAID, "thinking": {"type": "enabled"}}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, *SAID], "system": "odd"}),
    ("/v1/messages", {"messages": TEXTS, "tools": [{"name": "f", "input_schema": {}}], "max_tokens": 4}),
    ("/v1/messages", {"messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 9}}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": [1, 2]}),
    ("/v1/embeddings", {"input": [[1], [2]]}),
    ("/v1/embeddings", {"messages": SAID, "encoding_format": "float"}),
    ("/v1/generate", {"token_ids": [1, 2, 3]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "a", "dimensions": 64}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_is_read_as_with_its_path(path: str, body: dict[str, Any]) -> None:
    """Without a path and a method, the request is what it is with both."""
    sent = json.dumps({"model": "m", **body}).encode()

    assert parse("", sent, method="") == parse("", sent) == parse(path, sent)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'{"model": "m"}', b"\xff", b"[" * 100_000], ids=len
)
def test_what_tells_nothing_is_routed_by_load(body: bytes) -> None:
    """A body of which nothing is known is of no API."""
    assert parse("", body) == Request(kind=Kind.OTHER, size=len(body), why="path")


@pytest.mark.parametrize("body", [{"messages": SAID}, {"prompt": "hi"}, {"input": "hi"}])
def test_a_guess_refuses_nothing(body: dict[str, Any]) -> None:
    """A body that a known path refuses, for want of a model, is left to the engine."""
    sent = json.dumps(body).encode()
    with pytest.raises(BadRequest):
        parse("/v1/chat/completions" if "messages" in body else "/v1/completions", sent)

    assert parse("", sent).kind is Kind.OTHER


def test_another_method_computes_nothing() -> None:
    """A body is looked at only where the method is POST, or not sent."""
    sent = json.dumps({"model": "m", "prompt": "hi"}).encode()

    assert (
        parse("", sent, method="PUT").kind is parse("/v1/completions", sent, method="PUT").kind is Kind.OTHER
    )
    assert parse("/v1/completions", sent, method="").kind is Kind.COMPLETION


@given(
    st.binary()
    | st.recursive(st.none() | st.text(), lambda inner: st.dictionaries(st.text(), inner)).map(
        lambda document: json.dumps(document).encode()
    )
)
def test_any_body_has_an_answer(body: bytes) -> None:
    """Whatever a client sends, a path or none is implied, and nothing is raised."""
    assert implied_path(body) == "" or implied_path(body).startswith("/")
    assert parse("", body).size == len(body)
