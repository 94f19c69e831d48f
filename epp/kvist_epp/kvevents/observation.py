"""What events reveal about the requests that caused them."""

from typing import Literal

import msgspec


class Observation(msgspec.Struct, frozen=True):
    """Progress of a request that one stored event reveals (vLLM from 0.32 on names its session id)."""

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

    @property
    def prefilled(self) -> int:
        """Prompt tokens that were computed."""
        return self.tokens if self.born == "prompt" else 0


class RecentSessions:
    """Which requests have been heard of, by (source, session id).

    Two generations: what was heard of lately, and before. A request that is silent for two generations is
    forgotten, so memory follows the requests of a few minutes and not of all time. Kept are hashes, a quarter
    of the ids' size.
    """

    __slots__ = ("_before", "_lately", "_limit", "_seconds", "_since")

    def __init__(self, limit: int = 65_536, seconds: float = 120.0) -> None:
        """At most ``limit`` requests; a generation lasts ``seconds``, or half of the limit."""
        self._limit = limit
        self._seconds = seconds
        self._since = 0.0
        self._lately: dict[int, bool] = {}
        self._before: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._lately) + len(self._before)

    def expect(self, source: str, session: str) -> None:
        """A request with this id is on its way: its next event is a first one, though the id was used."""
        key = hash((source, session))
        self._lately.pop(key, None)
        self._before.pop(key, None)

    def known(self, source: str, session: str) -> bool:
        """Whether an event of the request has been heard of."""
        key = hash((source, session))
        return key in self._lately or key in self._before

    def decoding(self, source: str, session: str | None) -> bool:
        """Whether the request has stored a single block, and so may have begun to generate."""
        if session is None:
            return False
        key = hash((source, session))
        return self._lately.get(key, False) or self._before.get(key, False)

    def heard(self, source: str, session: str | None, *, single: bool) -> bool:
        """Notes an event; returns whether it is the request's first."""
        if session is None:
            return False
        key = hash((source, session))
        known = self._lately.get(key)
        if known is None:
            known = self._before.pop(key, None)
        self._lately[key] = single or bool(known)
        if 2 * len(self._lately) >= self._limit:
            self._turn()
        return known is None

    def age(self, now: float) -> None:
        """Time has passed: begin another generation if this one has had its time."""
        if now - self._since >= self._seconds:
            self._since = now
            self._turn()

    def _turn(self) -> None:
        self._before, self._lately = self._lately, {}
