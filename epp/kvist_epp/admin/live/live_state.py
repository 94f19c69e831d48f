"""The document ``/live/state``: what this replica of the picker knows of its pool at this moment. Pure.

Numbers by endpoint, priority or request, never prompts. Sums over the window can be added up over replicas
(``replica_merge``); shares and quantiles are computed from them there. ``figures`` reads the picker's parts,
``recent_samples`` has their history.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from kvist_epp.admin.debug_pages import queue_document
from kvist_epp.admin.live.endpoint_condition import EndpointCondition, condition
from kvist_epp.admin.live.limits_of_knowledge import Unknown, unknowns
from kvist_epp.admin.live.prefill_times import PrefillTimes
from kvist_epp.admin.live.recent_samples import (
    POINTS,
    SAMPLE_SECONDS,
    Cumulative,
    EndpointFigures,
    PickerFigures,
    RecentSamples,
    difference,
)
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.endpoint_state import EndpointState
from kvist_epp.engines.vllm.kv_events import GPU
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import TIME_TO_FIRST_TOKEN_BUCKETS, Histogram

VERSION: Final = 1
NOW_SECONDS: Final = 10.0
"""Age of the sample from which requests per second are counted."""
PICKS: Final = 12
"""Latest decisions in the document."""
MODELS: Final = 3
"""Names of served models in the document."""
RUNNERS_UP: Final = 4
"""Endpoints of each decision, the picked one included."""
DIGITS: Final = 4

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSources:
    """Sources of the document, besides the registry."""

    latest_picks: Callable[[int], Iterable[Mapping[str, Any]]]
    """Yields the documents of the last decisions, newest first."""
    not_ready: Callable[[], str]
    """Why the picker accepts no requests; empty if it does."""
    warnings: Callable[[], Sequence[str]]
    """Problems that need attention although the picker may be ready."""
    clock: Callable[[], float]
    """Monotonic seconds, as the registry's."""
    wall_clock: Callable[[], float]
    """Unix seconds."""
    version: str = ""


class LiveState:
    """Samples the picker's figures, and makes the document from them."""

    def __init__(self, settings: Settings, registry: EndpointRegistry, sources: LiveSources) -> None:
        self._settings = settings
        self._registry = registry
        self._sources = sources
        self._samples = RecentSamples()
        self._prefills = PrefillTimes()
        registry.director.tracker.add_listener(self._prefills)
        self._started_at = sources.clock()
        self.started = sources.wall_clock()
        """Unix time at which this replica began to count; tells one process from the next at the same
        address."""

    # Samples

    def sample(self) -> Generator[None, None, None]:
        """Store one sample; yields between endpoints, so that a large pool does not hold up picks."""
        now, samples = self._sources.clock(), self._samples
        states = list(self._registry.states.items())
        samples.add_pool(self._pool(now), self._histograms())
        for key, state in states:
            samples.add_endpoint(key, self._endpoint(state, now))
            yield
        samples.keep_only(self._registry.states)

    def _pool(self, now: float) -> PickerFigures:
        director = self._registry.director
        metrics, flow = director.metrics, director.flow
        picked = metrics.requests["picked"]
        return PickerFigures(
            at=now,
            picked=picked,
            refused=sum(metrics.requests.values()) - picked,
            prompt_tokens=sum(metrics.prompt_tokens.values()),
            predicted_tokens=sum(metrics.predicted_cached.values()),
            verified_tokens=sum(metrics.verified_prompt.values()),
            true_tokens=sum(metrics.true_cached.values()),
            saved_tokens=metrics.saved_tokens,
            saved_seconds=metrics.saved_seconds,
            queued=0 if flow is None else flow.queue.requests,
        )

    def _histograms(self) -> list[tuple[str, Cumulative]]:
        metrics = self._registry.director.metrics
        return [
            ("predicted", _cumulative(metrics.predicted_first_token)),
            ("observed", _cumulative(metrics.first_token)),
            ("prefilled", _cumulative(self._prefills.histogram)),
        ]

    def _endpoint(self, state: EndpointState, now: float) -> EndpointFigures:
        metrics, host, load = self._registry.director.metrics, state.endpoint.hostport, state.load
        return EndpointFigures(
            at=now,
            requests=state.accuracy.sent,
            prompt_tokens=metrics.prompt_tokens.get(host, 0),
            predicted_tokens=metrics.predicted_cached.get(host, 0),
            verified_tokens=metrics.verified_prompt.get(host, 0),
            true_tokens=metrics.true_cached.get(host, 0),
            looked_up_tokens=state.scrape.sample.queries,
            found_tokens=state.scrape.sample.hits,
            load=load.running,
            backlog_seconds=load.drain(now) / load.rate,
        )

    # The document

    def document(self) -> Generator[None, None, Json]:
        """Return the document; yields between endpoints."""
        now, director = self._sources.clock(), self._registry.director
        rows, conditions = [], []
        for state in list(self._registry.states.values()):
            found = condition(state, self._registry.why_approximate(state.endpoint.key), director.max_backlog)
            rows.append(self._row(state, found, now))
            conditions.append(found)
            yield
        picks = []
        for pick in self._sources.latest_picks(PICKS):
            picks.append(_shortened(pick))
            yield
        return {
            "version": VERSION,
            "replica": director.replica,
            "picker_version": self._sources.version,
            "started": self.started,
            "at": self._sources.wall_clock(),
            "pool": self._pool_names(),
            "health": self._health(),
            "window_seconds": round(self._window(now), 1),
            "traffic": self._traffic(now),
            "ttft": self._ttft(),
            "endpoints": rows,
            "queue": queue_document(director.flow, now),
            "picks": picks,
            "unknown": self._unknown(conditions),
            "history": self._history(),
            "replicas": [],
        }

    def _pool_names(self) -> Json:
        settings, model = self._settings, self._registry.director.model
        served = {name for state in self._registry.states.values() for name in state.scrape.served.models}
        name = settings.pool_name or settings.endpoint_selector or settings.endpoints_file.rpartition("/")[2]
        return {
            "name": name,
            "namespace": settings.pool_namespace,
            "model": ", ".join(sorted(served)[:MODELS]) or (model.name if model else settings.model),
        }

    def _health(self) -> Json:
        reason = self._sources.not_ready()
        return {"ready": not reason, "reason": reason, "warnings": list(self._sources.warnings())}

    def _window(self, now: float) -> float:
        """Return the age of the oldest sample; before the first one, the time since the start."""
        first = self._samples.pool.first()
        return now - (self._started_at if first is None else first[0])

    def _traffic(self, now: float) -> Json:
        new, ring = self._pool(now), self._samples.pool
        old = PickerFigures(*(ring.first() or (self._started_at,)))
        recent = PickerFigures(*(ring.before(now - NOW_SECONDS) or (self._started_at,)))
        price, gpus = self._settings.gpu_hour_price, self._settings.gpus_per_endpoint
        return {
            "requests_per_second": _per_second(new.picked - recent.picked, new.at - recent.at),
            **{name: getattr(new, name) - getattr(old, name) for name in _WINDOW_SUMS},
            "gpus_per_endpoint": gpus,
            "gpu_hour_price": price or None,
            "since_start": {
                "seconds": round(now - self._started_at, 1),
                "picked": new.picked,
                "refused": new.refused,
                "saved_tokens": new.saved_tokens,
                "saved_gpu_seconds": round(new.saved_seconds * gpus, 3),
                "saved_money": round(new.saved_seconds * gpus / 3600 * price, 4) if price else None,
            },
        }

    def _ttft(self) -> Json:
        found: Json = {"bounds": list(TIME_TO_FIRST_TOKEN_BUCKETS)}
        for name, cumulative in self._histograms():
            kept = self._samples.histograms.get(name)
            found[name] = difference(cumulative, kept[0] if kept else None)
        return found

    def _row(self, state: EndpointState, found: EndpointCondition, now: float) -> Json:
        endpoint, load, sample = state.endpoint, state.load, state.scrape.sample
        measured = not (state.scrape.metrics_problem or state.scrape.problem)
        new, ring = self._endpoint(state, now), self._samples.endpoint(endpoint.key)
        recent = EndpointFigures(*(ring.before(now - NOW_SECONDS) or self._joined(new)))
        old = EndpointFigures(*(ring.first() or recent))
        return {
            "name": endpoint.key,
            "endpoint": endpoint.hostport,
            "role": endpoint.role,
            **found.document(),
            "requests": load.running,
            "untracked_requests": load.untracked_requests,
            "running": sample.running if measured else None,
            "waiting": sample.waiting if measured else None,
            "slots": load.slots,
            "full": load.full(self._registry.director.max_backlog),
            "backlog_tokens": round(load.backlog_tokens),
            "backlog_seconds": round(new.backlog_seconds, DIGITS),
            "kv_usage": round(sample.cache_usage, DIGITS) if measured else None,
            "kv_tokens": sample.reported_tokens if measured else None,
            "tiers": self._tiers(state),
            "prefill_tokens_per_second": round(load.rate, 1),
            "prefill_rate_learned": load.rate_estimator.rate is not None
            or state.scrape.rates.prefill is not None,
            "requests_per_second": _per_second(new.requests - recent.requests, new.at - recent.at),
            **{name: getattr(new, name) - getattr(old, name) for name in _ENDPOINT_SUMS},
            "history": {
                "load": [round(value) for value in ring.column(_LOAD)],
                "backlog_seconds": [round(value, 3) for value in ring.column(_BACKLOG)],
            },
        }

    def _tiers(self, state: EndpointState) -> Json:
        """Return the tokens that slower tiers of an endpoint hold by the index, by medium; of a storage that
        it shares, those of all that share it."""
        director, member = self._registry.director, state.member
        index, found = director.index, dict[str, int]()
        shared = None if member.storage is None else director.lookup.storages.get(member.storage)
        for publisher in member.publishers if shared is None else (*member.publishers, shared):
            for medium, blocks in index.blocks(publisher).items():
                if medium != GPU:
                    found[medium] = found.get(medium, 0) + blocks * state.member.block_size
        return found

    def _joined(self, new: EndpointFigures) -> EndpointFigures:
        """Return an endpoint's figures before its first sample: it joined after the pool's last one, and this
        replica had sent nothing there."""
        last = self._samples.pool.before(new.at)
        at = self._started_at if last is None else last[0]
        return EndpointFigures(at=at, looked_up_tokens=new.looked_up_tokens, found_tokens=new.found_tokens)

    def _unknown(self, conditions: Sequence[EndpointCondition]) -> list[Json]:
        registry = self._registry
        reports = registry.director.tracker.end_reports
        facts = Unknown(
            window_seconds=self._window(self._sources.clock()),
            conditions=conditions,
            ends_known=reports.known,
            observed=self._settings.observe_responses or any(registry.director.metrics.responses.values()),
            price=self._settings.gpu_hour_price,
            by_prefix=self._settings.prefix_matching,
            untracked=sum(state.load.untracked_requests for state in registry.states.values()),
            why_no_chats="" if (model := registry.director.model) is None else model.why_no_chats,
        )
        return unknowns(facts)

    def _history(self) -> Json:
        """Return the pool's series, oldest first; each point is what happened since the sample before it."""
        rows = [PickerFigures(*row) for row in self._samples.pool.rows()]
        steps = list(pairwise(rows))
        return {
            "step_seconds": SAMPLE_SECONDS,
            "points": POINTS,
            "requests_per_second": [
                _per_second(new.picked - old.picked, new.at - old.at) for old, new in steps
            ],
            "predicted": [_pair(new, old, "predicted_tokens", "prompt_tokens") for old, new in steps],
            "true": [_pair(new, old, "true_tokens", "verified_tokens") for old, new in steps],
            "saved_tokens": [new.saved_tokens - old.saved_tokens for old, new in steps],
            "queued": [row.queued for row in rows],
            "ttft": [
                difference(new, old) for old, new in pairwise(self._samples.histograms.get("predicted", ()))
            ],
        }


_WINDOW_SUMS: Final = (
    *("picked", "refused", "prompt_tokens", "predicted_tokens", "verified_tokens", "true_tokens"),
    *("saved_tokens", "saved_seconds"),
)
_ENDPOINT_SUMS: Final = (
    *("prompt_tokens", "predicted_tokens", "verified_tokens", "true_tokens"),
    *("looked_up_tokens", "found_tokens"),
)


_LOAD: Final = EndpointFigures._fields.index("load")
_BACKLOG: Final = EndpointFigures._fields.index("backlog_seconds")


def _cumulative(histogram: Histogram) -> Cumulative:
    return tuple([count for _bound, count in histogram.cumulative()])


def _per_second(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _pair(new: PickerFigures, old: PickerFigures, part: str, whole: str) -> tuple[float, float]:
    """Return part and whole, which can be added up over replicas as a share could not."""
    return getattr(new, part) - getattr(old, part), getattr(new, whole) - getattr(old, whole)


def _shortened(pick: Mapping[str, Any]) -> Json:
    """Return a decision with its first endpoints only."""
    return {**pick, "endpoints": list(pick.get("endpoints", ()))[:RUNNERS_UP]}
