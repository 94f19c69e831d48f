"""The model's name, replaced where it stands: in a request by a header's wish, and back in the response.

Pure. Source: the llm-d router's ``x-llm-d-model-name-rewrite`` (old name ``x-gateway-model-name-rewrite``).
Only the bytes of the name change: order, spaces, escapes and duplicates of everything else arrive as the
client sent them.
"""

import json
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvist_epp.extproc.json_spans import COLON, TOKEN, value_end
from kvist_epp.names import MODEL_REWRITE_ALIAS, MODEL_REWRITE_HEADER

_MODEL: Final = b'"model"'
_SEPARATORS: Final = (b":", b": ", b" :", b" : ")
"""What stands between key and name in engines' answers: vLLM writes the first two."""


class Renamed(msgspec.Struct, frozen=True):
    """A request whose model has another name now."""

    body: bytes
    engine: str
    """The name the engine gets."""
    client: str | None
    """The name the client used; ``None`` when it sent something that is no text."""


class _Object(msgspec.Struct):
    """Any JSON object, checked and skipped."""


def wanted(headers: Mapping[str, str]) -> str:
    """The name a request's headers ask for; empty without one. ``headers``: lower-case names, latin-1."""
    name = headers.get(MODEL_REWRITE_HEADER) or headers.get(MODEL_REWRITE_ALIAS)
    return name.encode("latin-1", "replace").decode(errors="replace").strip() if name else ""


def renamed(body: bytes, name: str) -> Renamed | None:
    """``body`` with every top-level ``model`` named ``name``.

    ``None`` for what is no JSON object or has no ``model``. Where the key is there twice the last one counts,
    as for every engine; UTF-16 and UTF-32, which engines read too, become UTF-8.
    """
    text = _object(body)
    spans = [] if text is None else _models(text)
    if text is None or not spans:
        return None
    client = _text(text[slice(*spans[-1])])
    written, at = json.dumps(name).encode(), 0
    parts: list[bytes] = []
    for start, end in spans:
        parts += text[at:start], written
        at = end
    parts.append(text[at:])
    return Renamed(b"".join(parts), name, client)


def _object(body: bytes) -> bytes | None:
    """``body`` as UTF-8 when engines read it as a JSON object."""
    try:
        encoding = json.detect_encoding(body)
        text = body if encoding == "utf-8" else body.decode(encoding).encode()
        msgspec.json.decode(text, type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return text if _is_lax_object(text) else None
    except UnicodeError:
        return None
    return text


def _is_lax_object(text: bytes) -> bool:
    """Engines parse with Python's ``json``, which takes NaN and the like."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _models(text: bytes) -> list[tuple[int, int]]:
    """Where the values of the top-level key ``model`` are, in order."""
    spans, depth = [], 0
    for token in TOKEN.finditer(text):
        kind = text[token.start()]
        if kind in b"{[":
            depth += 1
        elif kind in b"}]":
            depth -= 1
        elif depth == 1 and _is_model(token[0]) and (colon := COLON.match(text, token.end())):
            spans.append((colon.end(), value_end(text, colon.end())))
    return spans


def _is_model(key: bytes) -> bool:
    return key == _MODEL or (b"\\" in key and _text(key) == "model")


def _text(encoded: bytes) -> str | None:
    try:
        found = json.loads(encoded)
    except (ValueError, RecursionError):  # the check before skips over strings more lightly
        return None
    return found if isinstance(found, str) else None


class WriteBack:
    """Puts the client's name back into a response, JSON or SSE, however it is cut into chunks.

    Every ``"model": "<the engine's name>"`` is written, at any depth: in Responses and Anthropic streams it
    stands inside other objects. Text that a model generated is not touched, because a quote inside a JSON
    string is escaped. What is kept back between chunks is shorter than that key and name.
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
        """What may be sent of the response so far; all of it when ``last``."""
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
        """From where on the end of ``text`` may become a match."""
        at = text.find(b'"', max(start, len(text) - self._longest + 1))
        while at >= 0:
            rest = text[at:]
            if any(literal.startswith(rest) for literal in self._literals):
                return at
            at = text.find(b'"', at + 1)
        return len(text)
