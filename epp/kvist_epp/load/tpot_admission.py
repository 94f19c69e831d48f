"""How much prefill a pod may take up while its sequences still decode in time. Pure.

::

    undisturbed = seconds a token takes while no prompt is computed: sequences x time / tokens of the last
                  seconds' scrapes, less the share of the time that prompts took by the pod's own events
    share       = 1 - undisturbed / target: of the pod's time, what prompts may take
    allowance   = seconds of prefill that it may take up now: grows by ``share`` a second

A prompt of a step's length stops every sequence of the batch for that step. Without a bound all pods of an
overloaded pool take up every prompt at once, and then nobody is served in time; with it, those are that the
pool can serve (``docs/decisions/0016``).
"""

from collections.abc import Hashable
from itertools import islice, takewhile
from math import exp
from typing import TYPE_CHECKING, Final

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.replica_rotation import Turn

if TYPE_CHECKING:
    from kvist_epp.load.endpoint_load import Load

MARGIN: Final = 0.9
"""Of the target: what is measured is seconds old. 0.95 left one request in ten too slow."""
OWED_SECONDS: Final = 0.5
"""Prefill in an engine's queue from which it gets no more: a step's length on most, so it never runs dry."""
BURST_SECONDS: Final = 0.5
"""The most that is saved up. 2 s stopped the short answers of agents for most of their time."""
DEBT_SECONDS: Final = 1.5
"""A longer prompt is forgiven the rest: a pod that owed five seconds took nothing up for ten."""
LIGHT_TOKENS: Final = 256
"""So few ride on a step that decodes, for nothing (15,928 tokens/s x 18 ms): no allowance holds them."""
FRESH_SECONDS: Final = 2.0
"""Who has waited longer does not weigh against those who decode …"""
FRESH_WEIGHT: Final = 3
"""… and who has not, as much as three of them: caches are cold then, and prompts come first."""
MEMORY_SECONDS: Final = 4.0
"""Of the mean over scrapes (an exponential's time constant)."""
ROOM: Final = 0.02
"""Share of the KV cache that stays free for those who decode, at least; a longer prompt needs its length."""
RETURNED: Final = 0.5
"""Of a request's new tokens, those that nobody else uses when it ends."""
LEAST_SHARE: Final = 0.1
"""A pod whose sequences are too slow without any prompt still takes some up."""
LEAST_TOKENS: Final = 20
"""Generated between scrapes: fewer tell nothing."""


class Pacing:
    """One pod's allowance. ``target``: seconds a token after the first that users accept (TPOT)."""

    __slots__ = (
        "_allowance",
        "_at",
        "_computed",
        "_last",
        "_most",
        "_room",
        "_sums",
        "_target",
        "held",
        "held_tokens",
        "share",
        "turn",
    )

    def __init__(self, target: float) -> None:
        self._target = MARGIN * target
        self.share = 1.0
        """Of its time that prompts may take; 1: not learned."""
        self.held: dict[Hashable, tuple[float, int]] = {}
        """Who waits in this picker for room on this pod: since when, and for how many new tokens; in the
        order they came."""
        self.held_tokens = 0
        """New tokens of all of them."""
        self.turn = Turn()
        """Of the newest of them."""
        self._allowance = BURST_SECONDS
        self._at = 0.0
        self._computed = 0.0
        """Prompt tokens since the last scrape, by events."""
        self._last: tuple[float, float, int] | None = None
        """Time, tokens generated and sequences at the last scrape."""
        self._sums = (0.0, 0.0, 0.0, 0.0)
        """Faded sums over scrapes: sequences x time, tokens, seconds of prefill, seconds."""
        self._room: float | None = None
        """Tokens free in its KV cache; None: unknown."""
        self._most = 0.0
        """Tokens of a prompt that have to be free: half of the cache, or a long one would never go."""

    def hold(self, who: Hashable, tokens: int, now: float) -> None:
        """A request waits for room on this pod."""
        self.held[who] = now, tokens
        self.held_tokens += tokens

    def release(self, who: Hashable) -> None:
        """It does not any more."""
        _, tokens = self.held.pop(who, (0.0, 0))
        self.held_tokens -= tokens

    def takes(self, tokens: float, rate: float, now: float, origin: str = "") -> None:
        """The pod got a request with so many new tokens, by this replica; empty: by ours."""
        self._advance(now)
        self.turn.sent(origin, now)
        self._allowance = max(self._allowance - tokens / rate, -DEBT_SECONDS)
        if self._room is not None:
            self._room -= tokens

    def returns(self, tokens: float) -> None:
        """One with so many new tokens has ended."""
        if self._room is not None:
            self._room += RETURNED * tokens

    def computes(self, tokens: float) -> None:
        """Events told of so many prompt tokens."""
        self._computed += tokens

    def scraped(self, sample: EngineSample, owed: float, rate: float, now: float) -> None:
        """An engine's own account; ``owed``: prompt tokens on their way that it has no blocks for yet."""
        self._set_room(sample, owed)
        computed, self._computed = self._computed, 0.0
        if self._last is not None and now > self._last[0] and sample.running:
            self._learn(sample, min(now - self._last[0], computed / rate), now)
        self._last = now, sample.generation_tokens, sample.running

    def _set_room(self, sample: EngineSample, owed: float) -> None:
        if (capacity := sample.reported_tokens) is None:
            return
        self._most = capacity / 2
        self._room = 0.0 if sample.crowded else (1.0 - sample.cache_usage - ROOM) * capacity - owed

    def _learn(self, sample: EngineSample, prefill: float, now: float) -> None:
        assert self._last is not None, "the first scrape tells nothing"
        at, generated, running = self._last
        seconds = now - at
        fade = exp(-seconds / MEMORY_SECONDS)
        new = (
            (running + sample.running) / 2 * seconds,
            max(0.0, sample.generation_tokens - generated),
            prefill,
            seconds,
        )
        sequences, tokens, prompts, time = (
            fade * old + add for old, add in zip(self._sums, new, strict=True)
        )
        self._sums = sequences, tokens, prompts, time
        if tokens >= LEAST_TOKENS:
            undisturbed = sequences / tokens * (1.0 - min(MARGIN, prompts / time))
            self.share = max(LEAST_SHARE, 1.0 - undisturbed / self._target)

    def open(self, load: "Load", tokens: int, now: float) -> bool:
        """Whether the pod may take up so many new tokens of one who waits for it: in its turn."""
        room = self.has_room(load, tokens, now, held=True)
        if tokens <= LIGHT_TOKENS:
            return room
        return self.turn.comes(self._newest(now), now, room=room)

    def opens_in(self, now: float) -> float:
        """Seconds until the newest who waits may go, if the pod keeps its room; infinite if it has none."""
        return self.turn.comes_in(self._newest(now), now)

    def _newest(self, now: float) -> float:
        """Since when the newest waits."""
        return next(reversed(self.held.values()))[0] if self.held else now

    def has_room(self, load: "Load", tokens: int, now: float, *, held: bool = False) -> bool:
        """Whether it may take up so many new tokens, as of the last ``drain``, whoever's turn it is;
        ``held``: of one who waits for it. Asked of every pod for each request, so all in one function."""
        if load.owed > OWED_SECONDS * load.rate:
            return False
        if (room := self._room) is not None and room < tokens and room < self._most:
            return False
        if tokens <= LIGHT_TOKENS or self.share >= 1.0:
            return True
        self._advance(now)
        return self._allowance >= min(BURST_SECONDS, tokens / load.rate) or not self._protects(
            load, now, held
        )

    def _protects(self, load: "Load", now: float, held: bool) -> bool:
        """Whether more decode there than wait to, the one that is asked for among them. Counts no further
        than it takes to tell: thousands may wait."""
        decoding = load.running - len(load.queue)
        enough = max(0, decoding) // FRESH_WEIGHT + 1
        newest = islice(reversed(self.held.values()), enough)
        fresh = sum(1 for _ in takewhile(lambda one: now - one[0] <= FRESH_SECONDS, newest))
        return decoding > FRESH_WEIGHT * (fresh + (not held))

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._allowance = min(BURST_SECONDS, self._allowance + self.share * elapsed)
