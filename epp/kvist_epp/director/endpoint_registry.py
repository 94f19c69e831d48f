"""The registry of endpoints: which there are, which are ready, and whose events are trusted.

Keeps every part in step with the set of endpoints. Driven by three things: a new set, an engine's scrape, and
a tick. No I/O of its own.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from kvist_epp.director.director import Director
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import EngineState, partly_served
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.index.index_accuracy import Trust
from kvist_epp.index.lookup import Member
from kvist_epp.kvevents.followed import Followed
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.load.tracker import RequestListener
from kvist_epp.prompt.model import Model
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings

logger = logging.getLogger(__name__)


class EndpointRegistry(RequestListener):
    """One for the process."""

    def __init__(
        self,
        settings: Settings,
        director: Director,
        clock: Callable[[], float],
        *,
        scrape_interval: float | None = None,
    ) -> None:
        """``scrape_interval``: by default the settings'; see ``Scraper``."""
        self.settings = settings
        self.director = director
        self.clock = clock
        self.accuracy = Trust()
        self.scraper = Scraper(
            on_scrape=self.on_scrape,
            on_change=self.on_state_change,
            interval=settings.scrape_interval if scrape_interval is None else scrape_interval,
            timeout=settings.scrape_timeout,
        )
        self.learner: Learner | None = None
        self.subscriber: Subscriber | None = None
        """None where no events are followed."""
        self.fleet: EndpointSet | None = None
        """None until the endpoints were listed once."""
        self._on_leaving: list[Callable[[Sequence[str]], None]] = []
        self._candidates: dict[str, Candidate] = {}
        self._restarts: dict[str, int] = {}
        """Restarts of engines that their accuracy takes account of."""
        director.tracker.add_listener(self)

    def add_leaving_listener(self, callback: Callable[[Sequence[str]], None]) -> None:
        """Call it with the keys of endpoints that leave, while all that is known of them still is."""
        self._on_leaving.append(callback)

    def follow(self, fleet: EndpointSet) -> None:
        """Replace the set of endpoints.

        An endpoint that is another engine now has left and joined. One that only may not be picked for a
        while, or has other labels, keeps all that is known of it.
        """
        left, joined = fleet.since(self.fleet or EndpointSet())
        if left:
            for callback in self._on_leaving:
                callback([endpoint.key for endpoint in left])
        self.fleet = fleet
        self.scraper.follow(fleet)
        for endpoint in left:
            self._remove(endpoint)
        if self.subscriber is not None and (left or joined):
            self.subscriber.follow(followed for endpoint in fleet for followed in _followed(endpoint))
        for endpoint in joined:
            self._add(endpoint)
        for endpoint in fleet:
            if self._candidates[endpoint.key].endpoint is not endpoint:
                self._set_candidate(self.scraper.states[endpoint.key])
        self._name_models()
        self.director.set_endpoints(self._candidates.values(), self.clock())

    def activate(self, model: Model, learner: Learner | None, subscriber: Subscriber | None) -> None:
        """Render prompts by this model, and follow events where there is a subscriber.

        What was routed before is forgotten: it was kept as bodies, which no prompt begins with.
        """
        self.learner, self.subscriber = learner, subscriber
        self.director.activate(model, learner)
        fleet = self.fleet or EndpointSet()
        for endpoint in fleet:
            self.director.history.forget(endpoint.key)
            self.director.lookup.leave(endpoint.key)
            self._add_to_lookup(endpoint)
        if subscriber is not None and fleet:
            subscriber.follow(followed for endpoint in fleet for followed in _followed(endpoint))

    # What is reported

    def on_scrape(self, state: EngineState) -> None:
        """An engine answered: correct its load, and what its cache holds."""
        key, sample = state.endpoint.key, state.sample
        if key not in self._candidates:
            return
        now, director = self.clock(), self.director
        tracker = director.tracker
        tracker.calibrate(
            key,
            rate=state.rates.prefill,
            decode_seconds=state.rates.decode_seconds,
            slots=state.slots(self.settings.max_num_seqs),
            kv_full_at=state.crowd,
        )
        for request in tracker.reconcile(key, sample.running, sample.waiting, now, asked_at=state.asked_at):
            director.progress.on_ended(request, "reconciled", now)
        tracker.on_scrape(key, sample, now)
        member = director.lookup.members[key]
        if sample.block_size:
            member.block_size = sample.block_size
        tokens = sample.cache_tokens or self.settings.approximate_cache_tokens
        director.history.limit(key, round(tokens * director.lookup.bytes_per_token))
        self.accuracy.counters(key, round(sample.queries), round(sample.hits), now)

    def on_state_change(self, state: EngineState) -> None:
        """An engine became ready or unreachable, or serves something else."""
        if state.endpoint.key in self._candidates:
            self._set_candidate(state)
            self.director.set_endpoints(self._candidates.values(), self.clock())
        self._name_models()

    def on_routed(self, attempt: Attempt) -> None:
        """See ``RequestListener``: the engine's counters are compared with what was routed."""
        request = attempt.request
        self.accuracy.routed(attempt.endpoint, request.indexed_tokens, request.tokens)

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """See ``RequestListener``: compare the index with the engine."""
        candidate = self._candidates.get(request.endpoint)
        if candidate is None:
            return
        self.director.metrics.true_cached[candidate.endpoint.hostport] += cached
        if request.index_compared:
            self.accuracy.record(request.endpoint, request.indexed_tokens, cached, now)

    def on_tick(self) -> None:
        """Expire requests, decide whose events are trusted, and bring the counters up to date."""
        self.director.on_tick(self.clock())
        for key, member in self.director.lookup.members.items():
            member.precise = not self.why_approximate(key)
        if self.subscriber is not None:
            self._count(self.subscriber)

    # Figures

    def trusted(self) -> Mapping[str, int]:
        """Return 1 (precise) or 0 (approximate) by ``ip:port``."""
        members = self.director.lookup.members
        return {c.endpoint.hostport: int(members[key].precise) for key, c in self._candidates.items()}

    def blocks(self) -> Mapping[str, Mapping[str, int]]:
        """Return the blocks held by ``ip:port`` and medium, over all ranks."""
        held: dict[str, dict[str, int]] = {}
        for key, candidate in self._candidates.items():
            media = held.setdefault(candidate.endpoint.hostport, {})
            for publisher in self.director.lookup.members[key].publishers:
                for medium, blocks in self.director.index.blocks(publisher).items():
                    media[medium] = media.get(medium, 0) + blocks
        return held

    def backlog(self) -> Mapping[str, int]:
        """Return the backlog in tokens by ``ip:port``."""
        loads = self.director.tracker.loads(self.clock())
        return {
            c.endpoint.hostport: round(loads[key].backlog_tokens) if key in loads else 0
            for key, c in self._candidates.items()
        }

    def cold(self) -> list[str]:
        """Return the endpoints that may be picked, whose events are followed and whose first replay goes
        on."""
        if self.subscriber is None:
            return []
        subscriber = self.subscriber
        return [
            key
            for key, member in self.director.lookup.members.items()
            if member.publishers and not subscriber.warm(key) and not self._candidates[key].endpoint.refusal
        ]

    def why_approximate(self, key: str) -> str:
        """Return why the index is not trusted for this endpoint; empty when it is."""
        member = self.director.lookup.members[key]
        model = self.director.model
        if model is None or not model.faithful:
            wanted = "its tokenizer has not come yet" if self.settings.model else "no --model"
            return f"bytes are not faithful: {model.why_not}" if model else wanted
        if self.subscriber is None or not member.publishers:
            return "no KV events are followed"
        if not self.subscriber.warm(key):
            return "its first replay is not over"
        if self.subscriber.suspect(key):
            return "events are missing"
        if self.accuracy.silent(key, sum(rank.messages for rank in self.subscriber.of(key))):
            return "it publishes no events"
        return self.accuracy.why_not(key, self.clock())

    def _add(self, endpoint: Endpoint) -> None:
        key = endpoint.key
        state = self.scraper.states[key]
        self.director.tracker.calibrate(key, slots=state.slots(self.settings.max_num_seqs))
        self._set_candidate(state)
        self._add_to_lookup(endpoint)

    def _add_to_lookup(self, endpoint: Endpoint) -> None:
        key, director = endpoint.key, self.director
        publishers: tuple[int, ...] = ()
        if self.learner is not None:
            publishers = tuple(director.index.publisher(s.publisher) for s in endpoint.sources)
        director.lookup.join(key, Member(publishers, precise=False))
        tokens = self.settings.approximate_cache_tokens
        director.history.limit(key, round(tokens * director.lookup.bytes_per_token))

    def _set_candidate(self, state: EngineState) -> None:
        endpoint = state.endpoint
        load = self.director.tracker.load(endpoint.key)
        self._candidates[endpoint.key] = Candidate(endpoint, load, state.ready, state.standing)

    def _name_models(self) -> None:
        """Which names are adapters, and which are not served by all."""
        states = self.scraper.states.values()
        self.director.set_models(
            self.scraper.adapters() | self.director.index.adapters(),
            partly_served((state.endpoint, state.served) for state in states),
        )

    def _remove(self, endpoint: Endpoint) -> None:
        key, director, now = endpoint.key, self.director, self.clock()
        self._candidates.pop(key, None)
        for request in director.tracker.remove_endpoint(key):
            director.progress.on_ended(request, "left", now)
        director.history.forget(key)
        director.lookup.leave(key)
        director.cache_value.forget(key)
        self.accuracy.forget(key)
        self._restarts.pop(key, None)
        director.metrics.forget(endpoint.hostport)

    def _count(self, subscriber: Subscriber) -> None:
        """Sum the counters of publishers by endpoint."""
        metrics = self.director.metrics
        for candidate in self._candidates.values():
            name = candidate.endpoint.hostport
            ranks = subscriber.of(candidate.endpoint.key)
            for kind in ("stored", "removed", "cleared"):
                metrics.events[name, kind] = sum(getattr(rank, kind) for rank in ranks)
            gaps, resets = sum(rank.gaps for rank in ranks), sum(rank.resets for rank in ranks)
            if (gaps, resets) != (metrics.gaps[name], metrics.resets[name]):
                logger.warning("KV events of %s: %d gaps and %d resets so far", name, gaps, resets)
            metrics.gaps[name], metrics.resets[name] = gaps, resets
            metrics.undecodable[name] = sum(rank.garbage + rank.malformed for rank in ranks)
            key, restarts = candidate.endpoint.key, sum(rank.restarts for rank in ranks)
            if restarts != self._restarts.get(key, 0):
                self._restarts[key] = restarts
                self.accuracy.of(key).restarted()


def _followed(endpoint: Endpoint) -> list[Followed]:
    names = (endpoint.hostport, endpoint.name, endpoint.key, *endpoint.aliases)
    return [
        Followed(endpoint.key, source.publisher, source.rank, source.events, source.replay, names)
        for source in endpoint.sources
    ]
