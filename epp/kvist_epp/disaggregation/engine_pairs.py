"""Pairs of engines: which have met, which are to be connected next, and which endpoints are to be spared.
Pure.

Two engines of NIXL connect at their first transfer, which takes seconds, and more if one cannot reach the
other. So requests use only pairs that have transferred blocks before: new ones are connected in the
background. An endpoint that has restarted is a new engine, which has met no other.

Each data-parallel rank of an endpoint is an engine of its own for NIXL: it has an id and a side channel, and
meets the ranks of other endpoints one by one."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvist_epp.disaggregation.partners import wanted_pairs
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.scheduling.leg_table import WarmPairs
from kvist_epp.scheduling.pick import Candidate

REST_SECONDS: Final = (5.0, 60.0)
"""Shortest and longest time for which an endpoint whose leg 1 failed gets no other one; doubles each time."""
RETRY_SECONDS: Final = 30.0
"""Time after which a pair that could not be connected is tried again."""
MOST_AT_ONCE: Final = 4
"""Pairs that are connected at the same time; in a large pool …"""
ENDPOINTS_PER_PAIR: Final = 8
"""… one for so many endpoints, so that a pool of any size is connected in minutes."""
_RANK: Final = re.compile(r"_dp\d+$")
"""End of the id of a data-parallel rank (``EngineCoreProc`` of vLLM 0.32)."""


class EnginePairs:
    """All pairs of a pool's endpoints."""

    def __init__(self) -> None:
        self.warm = WarmPairs()
        """Pairs that have transferred blocks."""
        self.connecting: set[tuple[str, str]] = set()
        """Keys of the prefill and of the decode endpoint of each pair that is being connected."""
        self.failures = 0
        """Attempts to connect a pair that failed."""
        self._engines: dict[str, dict[str, str]] = {}
        """Ids by endpoint and data-parallel rank: the end of the id, empty where there are no ranks."""
        self._restarts: dict[str, int] = {}
        self._retry_at: dict[tuple[str, str], float] = {}
        self._resting: dict[str, tuple[float, float]] = {}
        """When an endpoint may be asked again, and how long it rested."""
        self._ready: list[Endpoint] = []
        """Endpoints for which ``_wanted`` was found."""
        self._wanted: list[tuple[str, str]] = []
        """The pairs that are to be warm, in the order in which they are connected."""
        self._left: list[tuple[str, str]] | None = None
        """Those of them that are not; None: to be found again."""

    def resting(self, now: float) -> frozenset[str]:
        """Return the keys of the endpoints that failed a short while ago."""
        return frozenset([key for key, (until, _) in self._resting.items() if until > now])

    def on_prefilled(self, key: str, engine: str) -> None:
        """An endpoint has computed a prompt; ``engine``: the id that it gave, empty if it gave none."""
        self._resting.pop(key, None)
        found = _RANK.search(engine)
        rank = found[0] if found else ""
        if engine and self._engines.setdefault(key, {}).setdefault(rank, engine) != engine:
            self.remove_endpoint(key)
            self._engines[key] = {rank: engine}

    def on_failed(self, key: str, now: float) -> None:
        """An endpoint did not compute a prompt."""
        last = self._resting.get(key, (0.0, 0.0))[1]
        seconds = min(max(REST_SECONDS[0], 2 * last), REST_SECONDS[1])
        self._resting[key] = (now + seconds, seconds)

    def on_restarts(self, restarts: Mapping[str, int]) -> None:
        """Forget the pairs of endpoints whose engines have restarted; by key, how often each has so far."""
        for key, count in restarts.items():
            if self._restarts.setdefault(key, count) != count:
                self._restarts[key] = count
                self.remove_endpoint(key)

    def remove_endpoint(self, key: str) -> None:
        """Forget the pairs of an endpoint that has left or restarted."""
        self.warm.remove_endpoint(key)
        self._left = None
        self._engines.pop(key, None)
        self._resting.pop(key, None)
        self._retry_at = {pair: at for pair, at in self._retry_at.items() if key not in pair}

    def to_connect(self, candidates: Iterable[Candidate], now: float) -> list[tuple[Candidate, Candidate]]:
        """Return the pairs to connect now, and count them as being connected; an endpoint is in one at a
        time."""
        ready = {one.endpoint.key: one for one in candidates if one.ready}
        left = self._pairs_left([one.endpoint for one in ready.values()])
        most = max(MOST_AT_ONCE, len(ready) // ENDPOINTS_PER_PAIR)
        busy = {key for pair in self.connecting for key in pair}
        found: list[tuple[Candidate, Candidate]] = []
        for pair in left:
            if len(self.connecting) >= most:
                break
            if busy.isdisjoint(pair) and self._retry_at.get(pair, now) <= now:
                busy.update(pair)
                self.connecting.add(pair)
                found.append((ready[pair[0]], ready[pair[1]]))
        return found

    def _pairs_left(self, ready: list[Endpoint]) -> list[tuple[str, str]]:
        """Return the pairs that are wanted and not warm; computed only after something has changed."""
        if ready != self._ready:
            self._ready, self._wanted, self._left = ready, wanted_pairs(ready), None
        if self._left is None:
            self._left = [pair for pair in self._wanted if pair not in self.warm]
        return self._left

    def on_connected(self, pair: tuple[str, str], now: float, *, good: bool) -> None:
        """A pair that was to be connected has been, or could not be."""
        self.connecting.discard(pair)
        if good:
            self.warm.add(*pair)
            self._left = None
            self._retry_at.pop(pair, None)
        else:
            self.failures += 1
            self._retry_at[pair] = now + RETRY_SECONDS


def rank_pairs(prefill: Candidate, decode: Candidate) -> list[tuple[int | None, int | None]]:
    """Return the pairs of data-parallel ranks, of which each has to be connected; None: there is one rank.

    Either leg may run on any rank, so that all of the product are in use.
    """
    return [(one, other) for one in _ranks(prefill) for other in _ranks(decode)]


def _ranks(candidate: Candidate) -> list[int | None]:
    count, first = candidate.endpoint.ranks, candidate.endpoint.first_rank
    return [*range(first, first + count)] if count > 1 else [None]


def can_pair(prefill: Candidate, decode: Candidate) -> bool:
    """Return whether one endpoint may compute prompts for another one."""
    one, other = prefill.endpoint, decode.endpoint
    return (
        one.key != other.key
        and one.can_prefill
        and other.can_decode
        and one.kv_compatibility == other.kv_compatibility
    )
