"""Where things are in JSON bytes, found without decoding them. Pure.

The text is taken to be JSON: a quote inside a string is escaped, so that a token is what it looks like.
"""

import re
from typing import Final

TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
"""A string or a bracket: what nesting and keys are read from; all else is skipped at the speed of C."""
COLON: Final = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
_SCALAR: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^ \t\n\r,\]}"]++', re.DOTALL)
_OPENING: Final = b"{["


def value_end(text: bytes, start: int) -> int:
    """The end of the value that begins at ``start``; -1 when the text ends before it does."""
    if text[start] not in _OPENING:
        scalar = _SCALAR.match(text, start)
        return scalar.end() if scalar else -1
    depth = 0
    for token in TOKEN.finditer(text, start):
        kind = text[token.start()]
        if kind in _OPENING:
            depth += 1
        elif kind in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1
