"""Token counts of a response, read from its bytes as they pass: JSON or SSE, cut anywhere. Pure.

A ``"usage": {…}`` can only be the key of an object: inside the text that a model generated quotes are
escaped. So neither lines nor documents need to be kept together, and a carry of a few bytes is enough. Names
of the counts: OpenAI's chat, completions and Responses, and Anthropic's messages, whose first event has the
prompt's and whose later ones the answer's.
"""

import re
from typing import Any, Final

import msgspec

from kvist_epp.extproc.json_spans import value_end

LIMIT_BYTES: Final = 4096
"""Longest usage object that is read; twice as much is kept between chunks at most."""
LARGEST: Final = 1 << 40
"""A count above this is a lie."""

_KEY: Final = b'"usage"'
_OPENS: Final = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+(?=\{)")
_MAY_OPEN: Final = re.compile(rb"[ \t\n\r]*+(?::[ \t\n\r]*+)?\Z")


class Usage(msgspec.Struct):
    """What the engine counted, in tokens; ``None`` where it did not say."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    """Of the prompt's tokens: those taken from the prefix cache."""

    @property
    def known(self) -> bool:
        """Whether anything was counted."""
        return self.prompt is not None or self.completion is not None


class _Found(msgspec.Struct):
    prompt_tokens: Any = None
    input_tokens: Any = None
    completion_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None


class UsageReader:
    """Feed it every byte of one response; ``usage`` is what was said last."""

    __slots__ = ("_carry", "usage")

    def __init__(self) -> None:
        self._carry = b""
        self.usage = Usage()

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        text = self._carry + data
        at = text.find(_KEY)
        if at >= 0 and (b"}" in data or len(self._carry) < len(_KEY)):
            at = self._read(text, at)
        if at < 0 or len(text) - at > 2 * LIMIT_BYTES:
            at = max(len(text) - len(_KEY) + 1, 0)
        self._carry = text[at:]

    def _read(self, text: bytes, at: int) -> int:
        """Takes every whole usage object from the one at ``at`` on; where an unfinished one begins, else
        -1."""
        while at >= 0:
            after = at + len(_KEY)
            if opens := _OPENS.match(text, after):
                after = opens.end()
                value = text[after : after + LIMIT_BYTES]
                end = value_end(value, 0)
                if end < 0 and len(value) < LIMIT_BYTES:
                    return at
                if end > 0:
                    self._take(value[:end])
            elif _MAY_OPEN.match(text, after):
                return at
            at = text.find(_KEY, after)
        return -1

    def _take(self, encoded: bytes) -> None:
        try:
            found = _decoder.decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        usage, cached = self.usage, found.cache_read_input_tokens
        for details in (found.prompt_tokens_details, found.input_tokens_details):
            if isinstance(details, dict):
                cached = details.get("cached_tokens")
        usage.prompt = _first(found.prompt_tokens, found.input_tokens, usage.prompt)
        usage.completion = _first(found.completion_tokens, found.output_tokens, usage.completion)
        usage.cached = _first(cached, usage.cached)


def _first(*counts: Any) -> int | None:
    """The first that is a count."""
    return next((count for count in counts if type(count) is int and 0 <= count <= LARGEST), None)


_decoder: Final = msgspec.json.Decoder(_Found)
