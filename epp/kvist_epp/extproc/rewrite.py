"""Replacement of the model's name in place: in a request as a header demands, and back in the response.

Source: the llm-d router's ``x-llm-d-model-name-rewrite`` (old name ``x-gateway-model-name-rewrite``). Only
the bytes of the name change: order, spaces, escapes and duplicates of everything else arrive as the client
sent them.

Positions in JSON are found without decoding it. The text is assumed to be JSON: a quote inside a string is
escaped, so that every token is what it looks like.
"""

import json
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvist_epp.names import MODEL_REWRITE_ALIAS, MODEL_REWRITE_HEADER
from kvist_epp.prompt.request_types import utf8

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
"""A string or a bracket, which show nesting and keys; everything else is skipped at the speed of C."""
_COLON: Final = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
_SCALAR: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^ \t\n\r,\]}"]++', re.DOTALL)
_OPENING: Final = b"{["
_MODEL: Final = b'"model"'
_SEPARATORS: Final = (b":", b": ", b" :", b" : ")
"""Bytes between key and name in engines' answers; vLLM writes the first two."""


class RenamedBody(msgspec.Struct, frozen=True):
    """A request body whose model name was replaced."""

    body: bytes
    engine: str
    """The name that the engine gets."""
    client: str | None
    """The name that the client used; ``None`` when the client's ``model`` is not a string."""


class _Object(msgspec.Struct):
    """Any JSON object, validated and skipped."""


def requested_model(headers: Mapping[str, str]) -> str:
    """Return the model name that the rewrite headers demand, or an empty string.

    ``headers`` has lower-case names and latin-1 values.
    """
    name = headers.get(MODEL_REWRITE_HEADER) or headers.get(MODEL_REWRITE_ALIAS)
    return name.encode("latin-1", "replace").decode(errors="replace").strip() if name else ""


def rename_model(body: bytes, name: str) -> RenamedBody | None:
    """Return ``body`` with the value of every top-level ``model`` replaced by ``name``.

    Return ``None`` if the body is not a JSON object or has no ``model``. Where the key occurs twice the last
    one counts, as for every engine. UTF-16 and UTF-32, which engines read too, become UTF-8.
    """
    text = json_object(body)
    spans = [] if text is None else _model_spans(text)
    if text is None or not spans:
        return None
    client = _string(text[slice(*spans[-1])])
    written, at = json.dumps(name).encode(), 0
    parts: list[bytes] = []
    for start, end in spans:
        parts += text[at:start], written
        at = end
    parts.append(text[at:])
    return RenamedBody(b"".join(parts), name, client)


def value_end(text: bytes, start: int) -> int:
    """Return the end of the JSON value that begins at ``start``, or -1 if the text ends before the value."""
    if text[start] not in _OPENING:
        scalar = _SCALAR.match(text, start)
        return scalar.end() if scalar else -1
    depth = 0
    for token in _TOKEN.finditer(text, start):
        kind = text[token.start()]
        if kind in _OPENING:
            depth += 1
        elif kind in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def json_object(body: bytes) -> bytes | None:
    """Return ``body`` as UTF-8 if engines read it as a JSON object."""
    text = utf8(body)
    if text is None:
        return None
    try:
        msgspec.json.decode(text, type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return text if _is_lax_object(text) else None
    except UnicodeError:
        return None
    return text


def _is_lax_object(text: bytes) -> bool:
    """Return whether Python's ``json``, which engines use and which accepts NaN, reads an object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _model_spans(text: bytes) -> list[tuple[int, int]]:
    """Return start and end of each value of the top-level key ``model``, in order."""
    spans, depth = [], 0
    for token in _TOKEN.finditer(text):
        kind = text[token.start()]
        if kind in b"{[":
            depth += 1
        elif kind in b"}]":
            depth -= 1
        elif depth == 1:
            key = token[0]
            is_model = key == _MODEL or (b"\\" in key and _string(key) == "model")
            if is_model and (colon := _COLON.match(text, token.end())):
                spans.append((colon.end(), value_end(text, colon.end())))
    return spans


def _string(encoded: bytes) -> str | None:
    try:
        found = json.loads(encoded)
    except (ValueError, RecursionError):  # the validation before skips over strings more lightly
        return None
    return found if isinstance(found, str) else None


class ModelNameRestorer:
    """Puts the client's model name back into a response, JSON or SSE, however it is split into chunks.

    Every ``"model": "<the engine's name>"`` is replaced, at any depth: in Responses and Anthropic streams it
    is inside other objects. Text that a model generated is not touched, because a quote inside a JSON string
    is escaped. The bytes held back between chunks are shorter than that key and name.
    """

    __slots__ = ("_carry", "_literals", "_longest", "_name", "_pattern")

    def __init__(self, engine: str, client: str) -> None:
        names = {json.dumps(engine).encode(), json.dumps(engine, ensure_ascii=False).encode(errors="replace")}
        self._literals = tuple(_MODEL + between + name for between in _SEPARATORS for name in names)
        self._longest = max(map(len, self._literals))
        either = b"|".join(map(re.escape, names))
        self._pattern = re.compile(rb'("model" ?: ?)(?:' + either + rb")")
        self._name = json.dumps(client).encode()
        self._carry = b""

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """Return the part of the response that may be sent so far; everything with ``last``."""
        text = self._carry + data
        parts: list[bytes] = []
        at = 0
        for found in self._pattern.finditer(text):
            parts += text[at : found.start()], found[1], self._name
            at = found.end()
        keep = len(text) if last else self._undecided(text, at)
        self._carry = text[keep:]
        parts.append(text[at:keep])
        return b"".join(parts)

    def _undecided(self, text: bytes, start: int) -> int:
        """Return the position from which the end of ``text`` may still become a match."""
        at = text.find(b'"', max(start, len(text) - self._longest + 1))
        while at >= 0:
            rest = text[at:]
            if any(literal.startswith(rest) for literal in self._literals):
                return at
            at = text.find(b'"', at + 1)
        return len(text)
