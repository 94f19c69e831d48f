"""The interface of routing policies in virtual time: the seam between the world and the routers.

A policy sees what a real router of its kind would: requests (text, tokens, block hashes, session), its own
counts, scrapes of the engines as old as its interval, first tokens and ends as the response streams past, and
the engines' KV events after their delay. It never sees an engine's true state, output lengths or the future.

A run makes one policy per replica of the router. Each request goes through one replica; only that one hears
``routed``, ``first_token`` and ``finished`` of it. Fleet, scrapes and events reach all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from kvist_epp.engines.vllm.engine_metrics import EngineSample


class Sample(NamedTuple):
    """An engine's ``/metrics`` as last scraped; all zero before the first scrape."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences in the engine's queue."""
    cache_usage: float = 0.0
    """Share of KV blocks that are held, 0..1; cached blocks that no request holds count as free."""
    at: float = 0.0
    """When, in seconds of virtual time."""


@dataclass(slots=True, eq=False)
class Pod:
    """One engine as routers know it. The same object from joining to leaving; hashable by identity."""

    number: int
    """Never used again in a run: a pod that is regained is another pod, with an empty cache."""
    name: str
    blocks: int
    """KV blocks of its cache (``vllm:cache_config_info``)."""
    block_size: int
    """Tokens a block."""
    sample: Sample = field(default_factory=Sample)
    """The last scrape; kept by the world, at the policy's ``Spec.scrape_seconds``."""
    role: str = "both"
    """What it is deployed for: ``prefill``, ``decode`` or ``both``."""
    page: EngineSample = field(default_factory=EngineSample)
    """All of the same ``/metrics`` page: counters and sums."""


class Request(Protocol):
    """The part of a request that a router knows when it decides. Read only; hashable by identity."""

    @property
    def number(self) -> int:
        """Number among all requests of the run, in order of arrival; unique."""

    @property
    def session(self) -> str:
        """Names the chat or agent (``X-Session-ID`` or a user's cookie); every request has one, a request
        that belongs to no chat has one of its own."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, for routers that tokenise."""

    @property
    def blocks(self) -> Sequence[int]:
        """Hashes of the prompt's full blocks, each of which covers all before it: equal hash, equal
        prefix."""

    @property
    def text(self) -> bytes:
        """The prompt; ``BYTES_PER_TOKEN`` bytes a token."""

    @property
    def max_tokens(self) -> int:
        """Output tokens that the client allows at most; the answer is shorter as a rule."""


class Overlaps(Protocol):
    """A precise indexer: what the engines' KV events, after their delay, say about prompts."""

    def match(self, blocks: Sequence[int], pods: Sequence[Pod]) -> list[int]:
        """Return the number of first blocks that each pod holds, in the order of ``pods``."""

    def lower(self, blocks: Sequence[int], pods: Sequence[Pod], held: Sequence[int]) -> list[dict[str, int]]:
        """Return how many of the blocks after the ``held`` first ones each pod has in slower places, by
        medium; a gap ends them."""


class Feed(Protocol):
    """Takes in the events of engines; one for all replicas, since all get the same."""

    def told(self, pod: Pod, notes: list[Any], now: float) -> None:
        """``pool.Note``s of one step, after their delay."""

    def joined(self, pod: Pod) -> None:
        """A pod with an empty cache."""

    def left(self, pod: Pod) -> None:
        """The pod and its cache are gone."""


@dataclass(slots=True)
class Context:
    """Configuration and means of a policy."""

    random: Random
    """Its own dice, seeded by the run."""
    overlaps: Overlaps
    """Raises ``LookupError`` when its ``Spec.events`` is False."""
    prefill_rate: float
    """Prefill tokens/s of one engine of the usual kind, as operators configure it (llm-d's
    ``peakPrefillThroughput``); wrong on purpose in some runs."""
    max_num_seqs: int
    """Sequences an engine runs at once."""
    block_size: int
    after: Callable[[float, Callable[[Any], None], Any], None] = field(default_factory=lambda: _timeless)
    """``after(seconds, what, about)``: ``what(about)`` happens so much later."""
    clock: Callable[[], float] = lambda: 0.0
    """Virtual time now, for what happens between calls that tell it."""
    send: Callable[[Any, Pod], None] = lambda _request, _pod: None
    """A held request goes to this pod; ``routed`` follows at once."""
    refuse: Callable[[Any], None] = lambda _request: None
    """A held request gets no answer."""
    split: Callable[[Any, Pod, Pod], None] = lambda _request, _first, _second: None
    """The first pod computes the prompt of a request, the second one answers; ``choose`` returns None."""
    replica: int = 0
    peers: "list[Policy]" = field(default_factory=list)
    """All replicas, this one included, in their order; complete before the first request."""
    feed: Feed | None = None
    """What takes up the events; the same object as ``overlaps`` unless ``Spec.feed`` is another."""
    gossip_seconds: float = 0.0
    """How late replicas hear of each other, where they talk at all."""
    tpot_seconds: float = 0.0
    """Time per output token that operators want kept; 0: they do not say."""
    ended_seconds: float = 0.0
    """How late a router that lets responses pass by itself learns that one ended (Envoy's access log)."""


def _timeless(_seconds: float, _what: Callable[[Any], None], _about: Any) -> None:
    raise LookupError("nothing happens later outside of a run")


class Policy(Protocol):
    """One replica of a router. Times are seconds of virtual time. ``Quiet`` has empty notifications."""

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        """Position in ``pods`` (never empty) of the pod that gets the request; None: it is held until
        ``Context.send`` or ``Context.refuse``."""

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Right after ``choose``: it is on its way there."""

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """The response of a request began."""

    def prefilled(self, request: Request, pod: Pod, now: float, *, lost: bool) -> Pod | None:
        """The first pod of a split request has computed its prompt, or was ``lost`` before. Return the pod
        that is to answer, if it is not the planned one."""

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """The response ended, or broke off because the pod was lost; once for each ``routed``."""

    def joined(self, pod: Pod, now: float) -> None:
        """The pod can be picked from now on; also called for each pod at the beginning."""

    def left(self, pod: Pod, now: float) -> None:
        """The pod is gone, with its cache; ``finished`` of its requests follows."""

    def scraped(self, pod: Pod, now: float) -> None:
        """``pod.sample`` is new."""


class Quiet:
    """Hears and does nothing; policies override what they need."""

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Note that this replica sent a request to a pod."""

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Note a request's first token."""

    def prefilled(self, request: Request, pod: Pod, now: float, *, lost: bool) -> Pod | None:
        """Note that the prompt of a split request is computed; the planned pod answers."""

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """Note that a request has ended."""

    def joined(self, pod: Pod, now: float) -> None:
        """Note a pod that joins."""

    def left(self, pod: Pod, now: float) -> None:
        """Note a pod that leaves."""

    def scraped(self, pod: Pod, now: float) -> None:
        """Take in a scrape of a pod."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A policy of the table. ``policies/__init__.py`` has them as ``POLICIES: tuple[Spec, ...]``."""

    name: str
    """As typed: ``round-robin``."""
    summary: str
    """One line, with where its formula is published."""
    make: Callable[[Context], Policy]
    events: bool = False
    """It reads ``Context.overlaps``."""
    feed: Callable[[], Feed] | None = None
    """Makes what takes up the events; None: a precise indexer of block hashes, which is ``Overlaps``."""
    scrape_seconds: float | None = None
    """How often it scrapes engines; None: it does not."""
    prefill_share: float | None = None
    """Share of the engines that are deployed for prefill alone, the others for decode; None: all for both."""

    def role(self, position: int, engines: int) -> str:
        """Return the role of the engine at this position."""
        if self.prefill_share is None:
            return "both"
        helpers = max(1, min(engines - 1, round(self.prefill_share * engines)))
        return "prefill" if position < helpers else "decode"


RATIOS: Final[Mapping[str, float]] = {"1:7": 1 / 8, "1:3": 1 / 4, "1:1": 1 / 2, "3:1": 3 / 4, "7:1": 7 / 8}
"""Shares of the engines that only compute prompts, by the ratio of prefill to decode; always at least one
engine of either role."""


BYTES_PER_TOKEN = 4
"""Bytes of text a token stands for, always: English as most vocabularies have it."""
