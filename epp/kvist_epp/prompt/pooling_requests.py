"""Parse requests to embedding, rerank and classification models: how much text their engine computes.

Such requests are routed by load, so no prompt is rendered and no body is ever rejected here: what the engine
does not accept, it answers itself. The shapes are those of vLLM 0.33 (``vllm.entrypoints.pooling``).
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvist_epp.prompt.request_types import Kind, Request, text_or_none

PATHS: Final = (
    "/v1/embeddings",
    "/v2/embed",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/classify",
    "/pooling",
)
TOKEN_BYTES: Final = 4
"""Bytes of text that one token id counts as."""
MAX_DEPTH: Final = 8
"""Nesting beyond that of any request."""


class PoolingBody(msgspec.Struct):
    """The fields with text, of all these paths."""

    model: Any = None
    input: Any = None
    messages: Any = None
    texts: Any = None
    inputs: Any = None
    query: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


def parse_pooling(body: bytes) -> Request:
    """Return the request with the bytes of text to compute; those of the body if it cannot be read."""
    size = len(body)
    try:
        sent = _decoder.decode(body)
        work = _work(sent)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Request(kind=Kind.POOLING, size=size, why="shape")
    return Request(kind=Kind.POOLING, model=text_or_none(sent.model), size=size, work=work, why="pooling")


def _work(sent: PoolingBody) -> int:
    """Return the bytes of all prompts: a query or first text is computed anew with each document."""
    alone = sum(_bytes(each) for each in (sent.input, sent.messages, sent.texts, sent.inputs))
    first = next(_given(sent.query, sent.queries, sent.text_1, sent.data_1), None)
    second = next(_given(sent.documents, sent.items, sent.text_2, sent.data_2), None)
    if first is None or second is None:
        return alone + _bytes(first) + _bytes(second)
    pairs = max(_count(first), _count(second))
    return alone + _paired(first, pairs) + _paired(second, pairs)


def _given(*values: Any) -> Iterator[Any]:
    return (value for value in values if value is not None)


def _count(value: Any) -> int:
    return max(1, len(value)) if isinstance(value, list) else 1


def _paired(value: Any, pairs: int) -> int:
    """Return the bytes of one side: a single text is part of every pair."""
    return _bytes(value) * (pairs if _count(value) == 1 else 1)


def _bytes(value: Any, depth: int = 0) -> int:
    """Return the bytes of all texts below a value, token ids included; pictures and sound count nothing."""
    if isinstance(value, str):
        return len(value.encode())
    if type(value) is int:
        return TOKEN_BYTES
    if depth >= MAX_DEPTH:
        return 0
    if isinstance(value, list):
        return sum(_bytes(each, depth + 1) for each in value)
    if isinstance(value, dict):
        parts = (value[name] for name in ("text", "content") if name in value)
        return sum(_bytes(each, depth + 1) for each in parts)
    return 0


_decoder: Final = msgspec.json.Decoder(PoolingBody)
