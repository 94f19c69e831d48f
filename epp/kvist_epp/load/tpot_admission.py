"""Admission of prefill to an endpoint, so that its sequences decode within the TPOT target. Pure.

::

    undisturbed   = seconds a token takes while no prompt is computed: sequences x time / tokens of the last
                    seconds' scrapes, less the share of the time that prefill took by the endpoint's events
    prefill_share = 1 - undisturbed / target: the part of the endpoint's time that prefill may take
    allowance     = seconds of prefill that it may take up now: grows by ``prefill_share`` a second (a token
                    bucket)

A prompt of a step's length stops every sequence of the batch for that step. Without a bound all endpoints of
an overloaded pool take up every prompt at once, and then no request is served in time; with it, those are
that the pool can serve (``docs/decisions/0016``).
"""

from collections.abc import Callable, Hashable
from itertools import islice, takewhile
from math import exp, inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.replica_rotation import ReplicaRotation
from kvist_epp.load.token_time import TokenTime

if TYPE_CHECKING:
    from kvist_epp.load.endpoint_load import EndpointLoad

MARGIN: Final = 0.9
"""Part of the target that is aimed at: measurements are seconds old. 0.95 left one request in ten too
slow."""
STEP_SECONDS: Final = 0.5
"""A full step on most engines (8,192 tokens at 15,928 tokens/s). A longer backlog gets no more prompts: with
this much an endpoint never runs dry. It is also the most allowance that is saved up (2 s stopped the short
answers of agents for most of their time), and a third of the deepest debt: a longer prompt is forgiven the
rest, since an endpoint with five seconds of debt took nothing up for ten."""
LIGHT_TOKENS: Final = 256
"""This few prompt tokens fit into a decode step at no cost (15,928 tokens/s x 18 ms): no allowance holds them
back."""
FRESH_SECONDS: Final = 2.0
"""A request that has waited longer does not weigh against the sequences that decode …"""
FRESH_WEIGHT: Final = 3
"""… and one that has not, as much as three of them: caches are cold then, and prompts come first."""
FREE_SHARE: Final = 0.02
"""Share of the KV cache that stays free for sequences that decode; a longer prompt needs its length. Without
it groups at capacity lost 14 points of goodput."""
LEAST_TOKENS: Final = 20
"""Tokens generated between scrapes: fewer show nothing. Without it documents at capacity lost 3 points of
goodput."""
MEMORY_SECONDS: Final = 4.0
"""Time constant of the exponential mean over scrapes."""
LEAST_SHARE: Final = 0.1
"""An endpoint whose sequences are too slow without any prompt still takes some up."""


class AdmissionFigures(NamedTuple):
    """The figures that ``TpotAdmission.admits`` reads, for a request that does not wait for the endpoint."""

    prefill_share: float
    allowance: float
    """Seconds of prefill at ``allowance_at``; grows by ``prefill_share`` a second, up to ``STEP_SECONDS``."""
    allowance_at: float
    free: float
    """Tokens free in the KV cache; infinite where that is unknown."""
    most: float
    """Tokens that have to be free for a prompt of this size or a longer one."""
    fresh_since: float
    """When the first of the newest waiting requests came, of as many as outweigh the sequences: decoding
    prevails if that is more than ``FRESH_SECONDS`` ago. Infinite: it never does; -infinite: fewer wait."""
    queued_seconds: float
    """Seconds of prefill of the requests that wait in the picker for the endpoint."""
    first_done_at: float
    """When time alone adds a sequence, and these figures have to be read again after a ``drain``."""
    target: float
    """Seconds per token that are aimed at."""
    token_seconds: float
    """Of an undisturbed token (``TokenTime``) …"""
    token_sequences: float
    """… with so many sequences …"""
    slowdown: float
    """… by which they prolong it; 0: not learned."""


class TpotAdmission:
    """The allowance of one endpoint."""

    __slots__ = (
        "_allowance",
        "_at",
        "_computed",
        "_free",
        "_last",
        "_most",
        "_on_change",
        "_sums",
        "_target",
        "prefill_share",
        "queued",
        "queued_tokens",
        "rotation",
        "token_time",
    )

    def __init__(self, target: float, on_change: Callable[[], object] = bool) -> None:
        """``target``: seconds per output token after the first that users accept (TPOT). ``on_change`` is
        called when ``figures`` change by something else than time."""
        self._target = MARGIN * target
        self._on_change = on_change
        self.prefill_share = 1.0
        """Part of its time that prefill may take; 1: not learned."""
        self.queued: dict[Hashable, tuple[float, int]] = {}
        """Requests that wait in this picker for the endpoint: (since when, uncached tokens), oldest first."""
        self.queued_tokens = 0
        """Uncached tokens of all of them."""
        self.rotation = ReplicaRotation()
        """Turn of the newest of them."""
        self.token_time = TokenTime()
        """What ``prefill_share`` was learned from."""
        self._allowance = STEP_SECONDS
        self._at = 0.0
        self._computed = 0.0
        """Prompt tokens since the last scrape, by events."""
        self._last: tuple[float, float, int] | None = None
        """Time, tokens generated and sequences at the last scrape."""
        self._sums = (0.0, 0.0, 0.0, 0.0)
        """Faded sums over scrapes: sequences x time, tokens, seconds of prefill, seconds."""
        self._free: float | None = None
        """Tokens free in its KV cache; None: unknown."""
        self._most = 0.0
        """Tokens of a prompt that have to be free: half of the cache, or a long one would never be sent."""

    def detach(self) -> None:
        """Call ``on_change`` no longer: the endpoint has left, and it refers to the load and so to this."""
        self._on_change = bool

    def add_queued(self, request: Hashable, tokens: int, now: float) -> None:
        """Note a request that waits for capacity on this endpoint."""
        self.queued[request] = now, tokens
        self.queued_tokens += tokens
        self._on_change()

    def remove_queued(self, request: Hashable) -> None:
        """Note that it waits no longer."""
        _, tokens = self.queued.pop(request, (0.0, 0))
        self.queued_tokens -= tokens
        self._on_change()

    def debit(self, tokens: float, rate: float, now: float, replica: str = "") -> None:
        """Subtract the uncached tokens of a request that ``replica`` sent (empty: this one) from the
        allowance."""
        self._advance(now)
        self.rotation.on_sent(replica, now)
        self._allowance = max(self._allowance - tokens / rate, -3 * STEP_SECONDS)
        if self._free is not None:
            self._free -= tokens
        self._on_change()

    def refund(self, tokens: float) -> None:
        """Return the KV cache blocks of a request with ``tokens`` uncached tokens, which has ended."""
        if self._free is not None:
            self._free += tokens
            self._on_change()

    def on_computed(self, tokens: float) -> None:
        """Add prompt tokens that events reported as computed."""
        self._computed += tokens

    def on_scrape(
        self, sample: EngineSample, backlog: float, rate: float, now: float, *, helping: int = 0
    ) -> None:
        """Learn from a scrape; ``backlog``: prompt tokens under way that the engine has no blocks for yet.

        ``helping``: requests there that end with their prompt, since other endpoints answer them; where there
        are no others, prompts may take all of the time.
        """
        self._advance(now)  # by the share that held until now
        if (capacity := sample.reported_tokens) is not None:
            self._most = capacity / 2
            free = (1.0 - sample.cache_usage - FREE_SHARE) * capacity - backlog
            self._free = 0.0 if sample.kv_full else free
        computed, self._computed = self._computed, 0.0
        running = max(0, sample.running - helping)
        if self._last is not None and now > self._last[0] and running:
            self._learn(
                self._last, sample.generation_tokens, running, min(now - self._last[0], computed / rate), now
            )
        elif helping and not running:
            self.prefill_share, self._sums = 1.0, (0.0, 0.0, 0.0, 0.0)
            self.token_time.forget()
        self._last = now, sample.generation_tokens, running
        self._on_change()

    def _learn(
        self,
        last: tuple[float, float, int],
        generated_now: float,
        running_now: int,
        prefill: float,
        now: float,
    ) -> None:
        at, generated, running = last
        seconds = now - at
        fade = exp(-seconds / MEMORY_SECONDS)
        new = (
            (running + running_now) / 2 * seconds,
            max(0.0, generated_now - generated),
            prefill,
            seconds,
        )
        sequences, tokens, prompts, time = (
            fade * old + add for old, add in zip(self._sums, new, strict=True)
        )
        self._sums = sequences, tokens, prompts, time
        if tokens >= LEAST_TOKENS:
            undisturbed = sequences / tokens * (1.0 - min(MARGIN, prompts / time))
            self.prefill_share = max(LEAST_SHARE, 1.0 - undisturbed / self._target)
            self.token_time.learn(undisturbed, sequences / time, prompts / time)

    def share_with(self, sequences: float, per_sequence: float) -> float:
        """Return ``prefill_share`` as it will be with so many sequences, each of which prolongs a token by
        ``per_sequence`` seconds; 1 while nothing is learned."""
        if self.prefill_share >= 1.0:
            return 1.0
        token = self.token_time.with_sequences(sequences, per_sequence)
        return min(1.0, max(LEAST_SHARE, 1.0 - token / self._target))

    def has_room(self, tokens: int) -> bool:
        """Return whether the KV cache has blocks for so many tokens more; True where that is unknown."""
        return self._free is None or self._free >= min(tokens, self._most)

    def reserve(self, tokens: float) -> None:
        """Subtract tokens that another endpoint computes and that will be transferred here; ``refund`` gives
        them back."""
        if self._free is not None:
            self._free -= tokens
            self._on_change()

    def admits_queued(self, load: "EndpointLoad", tokens: int, now: float) -> bool:
        """Return whether a request that waits for the endpoint may be sent: there is capacity, and it is its
        turn."""
        admitted = self.admits(load, tokens, now, queued=True)
        if tokens <= LIGHT_TOKENS:
            return admitted
        return self.rotation.may_send(self._newest(now), now, capacity=admitted)

    def seconds_until_turn(self, now: float) -> float:
        """Return the seconds until the newest queued request may be sent if capacity stays."""
        return self.rotation.seconds_until_turn(self._newest(now), now)

    def _newest(self, now: float) -> float:
        return next(reversed(self.queued.values()))[0] if self.queued else now

    def admits(self, load: "EndpointLoad", tokens: int, now: float, *, queued: bool = False) -> bool:
        """Return whether the endpoint may take up ``tokens`` uncached tokens, as of the last ``drain``,
        regardless of turns.

        ``queued``: the request waits for this endpoint. Picks among few endpoints ask this of each, so it is
        one function; those among many have the ``figures`` of all in columns.
        """
        if load.backlog_tokens > STEP_SECONDS * load.rate:
            return False
        if (free := self._free) is not None and free < tokens and free < self._most:
            return False
        if tokens <= LIGHT_TOKENS or self.prefill_share >= 1.0:
            return True
        self._advance(now)
        enough = min(STEP_SECONDS, tokens / load.rate)
        return self._allowance >= enough or not self._decoding_prevails(load, now, queued)

    def figures(self, load: "EndpointLoad") -> AdmissionFigures:
        """Return what ``admits`` reads beside the backlog and the rate; changes with ``load``, too."""
        decoding = max(0, load.running - len(load.prefill_queue))
        outweigh = -(-decoding // FRESH_WEIGHT) - 1
        if outweigh <= 0:
            since = inf
        elif outweigh > len(self.queued):
            since = -inf
        else:
            since = min(queued_at for queued_at, _ in islice(reversed(self.queued.values()), outweigh))
        free = inf if self._free is None else self._free
        queued, token = self.queued_tokens / load.rate, self.token_time
        return AdmissionFigures(
            self.prefill_share,
            self._allowance,
            self._at,
            free,
            self._most,
            since,
            queued,
            load.first_done_at,
            self._target,
            token.seconds,
            token.sequences,
            token.slowdown,
        )

    def seconds_until_admitted(self, tokens: int, rate: float, now: float) -> float:
        """Return the seconds until the allowance suffices for ``tokens`` uncached tokens and for all that
        wait for the endpoint, as of now."""
        self._advance(now)
        lacking = min(STEP_SECONDS, tokens / rate) - self._allowance
        return (max(0.0, lacking) + self.queued_tokens / rate) / self.prefill_share

    def _decoding_prevails(self, load: "EndpointLoad", now: float, queued: bool) -> bool:
        """Whether more sequences decode there than requests wait, the one in question among these.

        Counts no further than needed: thousands may wait.
        """
        decoding = load.running - len(load.prefill_queue)
        enough = max(0, decoding) // FRESH_WEIGHT + 1
        newest = islice(reversed(self.queued.values()), enough)
        fresh = sum(1 for _ in takewhile(lambda one: now - one[0] <= FRESH_SECONDS, newest))
        return decoding > FRESH_WEIGHT * (fresh + (not queued))

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._allowance = min(STEP_SECONDS, self._allowance + self.prefill_share * elapsed)
