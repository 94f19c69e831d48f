"""The model that a request body names, and whether a header can carry it. Pure.

The body is read once, by msgspec, which skips what it is not asked for: that costs less than a search for the
key which keeps count of the nesting, and judges as engines do: text that is no JSON has no model, and of two
keys the last one counts.
"""

import json
from typing import Any, Final

import msgspec

MAX_NAME_BYTES: Final = 1024
"""Longest name, in UTF-8, that is put into a header: gateways bound all headers together, Envoy at 60 KiB."""

_BEGINNINGS: Final = frozenset(b"{\xef\xfe\xff\x00")
"""First bytes of a JSON object in an encoding that engines read: a brace, or what UTF-16 and UTF-32 put
before one."""
_SPACE: Final = b" \t\r\n"
_LOOKED_AT: Final = 64


class _Body(msgspec.Struct):
    """Any JSON object."""

    model: Any = None


_decoder: Final = msgspec.json.Decoder(_Body)


def model_of(body: bytes) -> object:
    """The top-level ``model`` of a JSON object, whatever it is; ``None``: there is none, or no object."""
    try:
        return _decoder.decode(body).model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _laxly(body)


def header_value(name: object) -> str | None:
    """``name`` as a header's latin-1 text; ``None`` when a header cannot say it unchanged.

    A control character would end the header or be refused, a space at either end would be lost.
    """
    if not isinstance(name, str) or not name or name != name.strip():
        return None
    try:
        encoded = name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return None
    if len(encoded) > MAX_NAME_BYTES or any(byte < 0x20 or byte == 0x7F for byte in encoded):
        return None
    return encoded.decode("latin-1")


def _laxly(body: bytes) -> object:
    """Engines parse with Python's ``json``, which takes NaN, UTF-16 and more; uploads are not tried."""
    begins = body[:_LOOKED_AT].lstrip(_SPACE)[:1] or body[:1]
    if not _BEGINNINGS.issuperset(begins) and len(body) > _LOOKED_AT:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found.get("model") if isinstance(found, dict) else None
