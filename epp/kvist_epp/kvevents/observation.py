"""Progress of requests, as the events that they cause reveal it. Pure."""

from typing import Literal

import msgspec


class Observation(msgspec.Struct, frozen=True):
    """Progress of a request, from one stored event; vLLM from 0.32 on adds the request's session id."""

    publisher: str
    """"namespace/name/rank"."""
    endpoint: str
    """"namespace/name"."""
    session: str | None
    tokens: int
    """Tokens newly stored."""
    cached: int | None
    """Tokens cached before the request; set only in its first event, and if the parent is known."""
    phase: Literal["prefill", "decode"]
    depth: int | None
    """Tokens from the root to the end of the last block."""
    last_block: int | None = None
    """Hash of the last block."""
    loaded: int = 0
    """Of ``tokens``: those that a slower tier held, from which the engine has loaded them."""

    @property
    def prefilled(self) -> int:
        """Prompt tokens that were computed."""
        return self.tokens - self.loaded if self.phase == "prefill" else 0


class RecentSessions:
    """Requests that events have reported, by (publisher, session id).

    There are two generations. A request without events for two generations is removed, so that memory is
    that of the requests of a few minutes. Hashes are kept, a quarter of the size of the
    ids.
    """

    __slots__ = ("_current", "_limit", "_previous", "_seconds", "_since")

    def __init__(self, limit: int = 65_536, seconds: float = 120.0) -> None:
        """Keep at most ``limit`` requests; a generation lasts ``seconds``, or half of the limit."""
        self._limit = limit
        self._seconds = seconds
        self._since = 0.0
        self._current: dict[int, bool] = {}
        """Hash → whether the request has stored a single block."""
        self._previous: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._current) + len(self._previous)

    def add(self, publisher: str, session: str | None, *, single: bool) -> bool:
        """Note an event, of a ``single`` block or of several; return True if it is the request's first."""
        if session is None:
            return False
        key = hash((publisher, session))
        known = self._current.get(key)
        if known is None:
            known = self._previous.pop(key, None)
        self._current[key] = single or bool(known)
        if 2 * len(self._current) >= self._limit:
            self._start_generation()
        return known is None

    def remove(self, publisher: str, session: str) -> None:
        """Forget a request, so that the next event with its session id is a first one."""
        key = hash((publisher, session))
        self._current.pop(key, None)
        self._previous.pop(key, None)

    def known(self, publisher: str, session: str) -> bool:
        """Return True if an event of the request was seen."""
        key = hash((publisher, session))
        return key in self._current or key in self._previous

    def decoding(self, publisher: str, session: str | None) -> bool:
        """Return True if the request has stored a single block, and so may have begun to decode."""
        if session is None:
            return False
        key = hash((publisher, session))
        return self._current.get(key, False) or self._previous.get(key, False)

    def age(self, now: float) -> None:
        """Start a new generation if the current one is old enough."""
        if now - self._since >= self._seconds:
            self._since = now
            self._start_generation()

    def _start_generation(self) -> None:
        self._previous, self._current = self._current, {}
