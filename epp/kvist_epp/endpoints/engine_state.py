"""The state of one engine by its scrapes. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final, NamedTuple

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.engines.vllm.engine_metrics import EngineRates, EngineSample, ServedModels
from kvist_epp.engines.vllm.tier_metrics import TierSpeedEstimator
from kvist_epp.engines.vllm.transfer_metrics import TransferRateEstimator
from kvist_epp.prefix_stats.window import Window

_GROWTH_DIVISOR: Final = 4
"""The estimated batch size grows by up to a quarter: from 256 to vLLM's 1,024 on a large GPU in seven
scrapes."""
_COUNTERS: Final = ("prefills", "preemptions", "queries", "hits")


class BatchLimit:
    """Estimate of the number of sequences that an engine runs at once, for engines without a label.

    vLLM does not export its ``--max-num-seqs``. An estimate that is too low would hold requests back from an
    engine with capacity, so the estimate is probed: while an engine that runs this many sequences has none
    waiting, it may run more.
    """

    __slots__ = ("_step", "limit")

    def __init__(self) -> None:
        self.limit = 0
        """Number of sequences the engine has run, or may run, with none waiting; 0 before the first
        scrape."""
        self._step = 1

    def observe(self, running: int, waiting: int) -> None:
        """Learn from one scrape at which the KV cache was not full.

        Waiting requests are then waiting for a slot in the batch. (Or for prefill to be scheduled; that
        lowers the limit for a few scrapes at most.)
        """
        if waiting:
            self.limit, self._step = running, 1
        elif running >= self.limit:
            self.limit = running + self._step
            self._step = max(1, min(2 * self._step, running // _GROWTH_DIVISOR))


class CounterDeltas(NamedTuple):
    """Increase of an engine's counters between the oldest sample of the window and the newest."""

    seconds: float = 0.0
    """Time between the two samples."""
    requests: float = 0.0
    """Requests that ended."""
    preemptions: float = 0.0
    queries: float = 0.0
    """Prompt tokens looked up in the prefix cache."""
    hits: float = 0.0
    """Prompt tokens found there."""


class _FirstSample:
    """The first sample of a window's slot (half a minute)."""

    __slots__ = ("at", "sample")

    def __init__(self) -> None:
        self.sample: EngineSample | None = None
        self.at = 0.0


class RecentCounters:
    """Counters of one engine over the last ten minutes; they start again when the engine restarts."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._window = Window(_FirstSample)
        self._last: tuple[float, EngineSample] | None = None

    def observe(self, sample: EngineSample, now: float) -> None:
        """Add a sample taken at ``now`` seconds of a monotonic clock."""
        if self._last is not None and sample.prompt_tokens < self._last[1].prompt_tokens:
            self._reset()
        slot = self._window.current(now)
        if slot.sample is None:
            slot.sample, slot.at = sample, now
        self._last = now, sample

    def deltas(self) -> CounterDeltas:
        """Return the increases up to the newest sample."""
        if self._last is None:
            return CounterDeltas()
        now, last = self._last
        first = self._window.live(now)[0]
        assert first.sample is not None, "slots are made with their first sample"
        steps = (getattr(last, name) - getattr(first.sample, name) for name in _COUNTERS)
        return CounterDeltas(now - first.at, *(max(0.0, step) for step in steps))


class ScrapeState(Enum):
    """Whether an engine answers scrapes; the label of ``kvist_epp_endpoints``."""

    NEW = "new"
    """No scrape has succeeded yet, and too few have failed."""
    READY = "ready"
    UNREACHABLE = "unreachable"


@dataclass(slots=True, eq=False)
class EngineState:
    """State of one engine as its scrapes show it; modified by the ``Scraper`` only."""

    endpoint: Endpoint
    state: ScrapeState = ScrapeState.NEW
    problem: str = "not scraped yet"
    """Why the last scrape failed; empty when it did not."""
    failures: int = 0
    """Failed scrapes in a row."""
    sample: EngineSample = field(default_factory=EngineSample)
    page_digest: int | None = None
    """``page_digest`` of the page that ``sample`` was read from."""
    lines: bytes = b""
    """Lines of that page that were needed."""
    metrics_problem: str = ""
    """Why the engine has no metrics of vLLM though it answers; empty when it has them."""
    refused: bool = False
    """Nothing accepted the last connection."""
    asking: bool = False
    """A scrape is under way."""
    tried_at: float = -inf
    """Monotonic time at which the last scrape ended, answered or not."""
    pages_missed: int = 0
    """Scrapes in a row that it answered without metrics."""
    served: ServedModels = field(default_factory=ServedModels)
    models_problem: str = ""
    """Why ``/v1/models`` could not be read. The engine may be ready all the same: an API key may guard that
    path."""
    rates: EngineRates = field(default_factory=EngineRates)
    recent: RecentCounters = field(default_factory=RecentCounters)
    tier_speed: TierSpeedEstimator = field(default_factory=TierSpeedEstimator)
    transfer_rate: TransferRateEstimator = field(default_factory=TransferRateEstimator)
    asked_at: float = 0.0
    """Monotonic time at which the last answered scrape was sent."""
    models_due: float = -inf
    """Monotonic time from which ``/v1/models`` is asked again."""
    models_failures: int = 0
    """Answers in a row from which no models could be read."""
    batch: BatchLimit = field(default_factory=BatchLimit)

    @property
    def ready(self) -> bool:
        """Whether the engine may be picked: it answers, and its discovery does not refuse it."""
        return self.state is ScrapeState.READY and not self.endpoint.refusal

    @property
    def status(self) -> str:
        """The discovery's refusal, else the state: a word or two for pages and metrics."""
        return self.endpoint.refusal or self.state.value

    @property
    def kv_full_at(self) -> int | None:
        """Number of running sequences while requests wait because the KV cache is full; None otherwise."""
        return max(1, self.sample.running) if self.sample.kv_full else None

    def slots(self, guess: int | None = None) -> int | None:
        """Return the number of sequences that the engine runs at once, all ranks together: by its label, else
        ``guess``, which scrapes may prove too low. None when unknown.

        A full KV cache does not lower it: a request that left its prefix for that reason would need blocks
        for its whole prompt elsewhere, and so fill the next cache (``kvist bench route``: 21 % goodput
        against 71 % on groups of long prefixes at capacity)."""
        labelled, ranks = self.endpoint.max_num_seqs, self.endpoint.ranks
        if labelled is not None:
            return labelled * ranks
        return None if guess is None else max(guess * ranks, self.batch.limit)


def partly_served(engines: Iterable[tuple[Endpoint, ServedModels]]) -> Mapping[str, tuple[str, ...]]:
    """Return the ``ip:port`` of the endpoints that list a model, by its name, for models not listed by all.

    LoRA adapters are often loaded on some engines only; the others answer 404 for their names. A name that no
    engine lists is absent: its requests are routed like any other, and the engine answers. Engines that do
    not say what they serve (``/v1/models`` behind a key) are not counted.
    """
    known = [(endpoint, served.models | served.adapters) for endpoint, served in engines if served.models]
    by_name: dict[str, list[str]] = {}
    for endpoint, names in known:
        for name in names:
            by_name.setdefault(name, []).append(endpoint.hostport)
    return {name: tuple(hosts) for name, hosts in by_name.items() if len(hosts) < len(known)}
