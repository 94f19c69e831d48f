"""What events reveal about the requests that caused them."""

from collections import OrderedDict
from typing import Literal

import msgspec


class Observed(msgspec.Struct, frozen=True):
    """What one stored event says about its request (vLLM 0.32 on tells the request by its session id)."""

    source: str
    """"namespace/name/rank"."""
    endpoint: str
    """"namespace/name"."""
    session: str | None
    tokens: int
    """Tokens newly stored."""
    cached: int | None
    """Tokens that were cached before the request: only in its first event, when the parent is known."""
    born: Literal["prompt", "decode"]
    depth: int | None
    """Tokens from the root to the end of the last block."""


class Sessions:
    """Which requests have been heard of, by (source, session id); beyond ``limit`` the oldest go."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._decoding: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def expect(self, source: str, session: str) -> None:
        """A request with this id is on its way: its next event is a first one, though the id was used."""
        self._decoding.pop((source, session), None)

    def known(self, source: str, session: str) -> bool:
        """Whether an event of the request has been heard of."""
        return (source, session) in self._decoding

    def decoding(self, source: str, session: str | None) -> bool:
        """Whether the request has stored a single block, and so may have begun to generate."""
        return session is not None and self._decoding.get((source, session), False)

    def heard(self, source: str, session: str | None, *, single: bool) -> bool:
        """Notes an event; returns whether it is the request's first."""
        if session is None:
            return False
        key = (source, session)
        known = self._decoding.pop(key, None)
        self._decoding[key] = single or bool(known)
        if len(self._decoding) > self._limit:
            self._decoding.popitem(last=False)
        return known is None
