"""Requests to embedding, rerank and classification models: routed by load, with the text to compute."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prompt.pooling_requests import PATHS
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.request_types import Kind


def work(path: str, **fields: Any) -> int:
    """Return the bytes of text that a request is taken to compute."""
    return parse(path, json.dumps({"model": "m", **fields}).encode()).work


@pytest.mark.parametrize("path", [*PATHS, "/team-a/v1/embeddings"])
def test_all_paths_name_their_model_and_match_no_prompt(path: str) -> None:
    """The model is read, so that endpoints which do not serve it are left out; there is no prompt."""
    found = parse(path, b'{"model": "m", "input": "abc"}')

    assert (found.kind, found.model, found.prompts, found.chat) == (Kind.POOLING, "m", (), None)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/embeddings", {"input": "abcd"}, 4),
        ("/v1/embeddings", {"input": ["ab", "cdé"]}, 6),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 12),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 12),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "abc"}]}, 3),
        ("/pooling", {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}, 3),
        ("/v2/embed", {"texts": ["ab", "c"], "input_type": "classification"}, 3),
        ("/classify", {"input": ["abc"]}, 3),
        ("/v1/rerank", {"query": "ab", "documents": ["c", "de", "f"]}, 3 * 2 + 4),
        ("/v1/score", {"text_1": "ab", "text_2": ["c", "de"]}, 2 * 2 + 3),
        ("/v1/score", {"text_1": ["ab", "c"], "text_2": ["d", "ef"]}, 6),
        ("/score", {"queries": "ab", "documents": "c"}, 3),
        ("/score", {"data_1": "ab", "data_2": ["c"]}, 3),
        ("/rerank", {"query": "ab"}, 2),
    ],
)
def test_the_text_to_compute_is_counted(path: str, fields: dict[str, Any], expected: int) -> None:
    """A query is computed again with each document; token ids count like four bytes."""
    assert work(path, **fields) == expected


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b'{"input": ', b"1", b'{"model": 7, "input": {"a": 1}}']
)
def test_no_body_is_rejected(body: bytes) -> None:
    """The engine itself answers what it does not accept; the size of the body counts as work."""
    found = parse("/v1/embeddings", body)

    assert (found.kind, found.model, found.size, found.work) == (Kind.POOLING, None, len(body), 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(["input", "query", "documents", "text_1"]), json_values),
)
def test_any_json_is_routed(path: str, fields: dict[str, Any]) -> None:
    """Whatever the fields hold, the request is routed, and a longer list of documents is more work."""
    assert parse(path, json.dumps(fields).encode()).work >= 0
    assert work("/rerank", query="abc", documents=["d"] * 3) < work(
        "/rerank", query="abc", documents=["d"] * 4
    )
