"""Keeps every part in step with the fleet: who is there, who is ready, whose events are trusted.

Driven by three things: a new fleet, an engine's scrape, and a tick. No I/O of its own.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvist_epp.director.director import Picker
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import EngineState, partly_served
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.index.index_accuracy import Trust
from kvist_epp.index.lookup import Member
from kvist_epp.kvevents.followed import Followed
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.load.in_flight import Flight
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Membership:
    """One for the process; ``learner`` and ``subscriber`` are None where no events are followed."""

    settings: Settings
    picker: Picker
    learner: Learner | None
    subscriber: Subscriber | None
    trust: Trust
    scraper: Scraper = field(init=False)
    """Set right after: it calls back."""
    fleet: EndpointSet | None = None
    """None until it was listed once."""
    going: Callable[[Sequence[str]], None] = lambda _keys: None
    """Told of endpoints that leave, while all that is known of them still is."""
    _candidates: dict[str, Candidate] = field(default_factory=dict)
    _restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of engines that their trust knows of."""

    def follow(self, fleet: EndpointSet) -> None:
        """From now on this is the fleet.

        An endpoint that is another engine now has left and joined. One that only may not be picked for a
        while, or has other labels, keeps all that is known of it."""
        left, joined = fleet.since(self.fleet or EndpointSet())
        if left:
            self.going([endpoint.key for endpoint in left])
        self.fleet = fleet
        self.scraper.follow(fleet)
        for endpoint in left:
            self._left(endpoint)
        if self.subscriber is not None and (left or joined):
            self.subscriber.follow(followed for endpoint in fleet for followed in _followed(endpoint))
        for endpoint in joined:
            self._joined(endpoint)
        for endpoint in fleet:
            if self._candidates[endpoint.key].endpoint is not endpoint:
                self._stands(self.scraper.states[endpoint.key])
        self._name_models()
        self.picker.gather(self._candidates.values())

    def understand(self, learner: Learner | None, subscriber: Subscriber | None) -> None:
        """Prompts are understood, and events followed where there is a subscriber. What was routed before is
        forgotten: it was kept as bodies, which no prompt begins with."""
        self.learner, self.subscriber = learner, subscriber
        self.picker.flights.release_all()
        fleet = self.fleet or EndpointSet()
        for endpoint in fleet:
            self.picker.history.forget(endpoint.key)
            self.picker.lookup.leave(endpoint.key)
            self._look_at(endpoint)
        if subscriber is not None and fleet:
            subscriber.follow(followed for endpoint in fleet for followed in _followed(endpoint))

    def scraped(self, state: EngineState) -> None:
        """An engine answered: calibrate what it owes and what its cache holds."""
        key, sample = state.endpoint.key, state.sample
        candidate = self._candidates.get(key)
        if candidate is None:
            return
        now = self.picker.clock()
        ledger = self.picker.ledger
        ledger.calibrate(
            key,
            rate=state.rates.prefill,
            decode_seconds=state.rates.decode_seconds,
            slots=state.slots(self.settings.max_num_seqs),
            crowd=state.crowd,
        )
        ended = ledger.reconcile(key, sample.running, sample.waiting, now, asked_at=state.asked_at)
        self.picker.settled(ended, "reconciled", endpoint=key)
        ledger.scraped(key, sample, now)
        member = self.picker.lookup.members[key]
        if sample.block_size:
            member.block_size = sample.block_size
        tokens = sample.cache_tokens or self.settings.approximate_cache_tokens
        self.picker.history.limit(key, round(tokens * self.picker.lookup.bytes_per_token))
        self.trust.counters(key, round(sample.queries), round(sample.hits), now)

    def changed(self, state: EngineState) -> None:
        """An engine became ready or unreachable, or serves something else."""
        key = state.endpoint.key
        if key in self._candidates:
            self._stands(state)
            self.picker.gather(self._candidates.values())
        self._name_models()

    def departed(self, flight: Flight) -> None:
        """A request was routed: what its engine's counters are held against grows."""
        self.trust.routed(flight.endpoint, flight.indexed, flight.tokens)

    def truth(self, flight: Flight, cached: int, now: float) -> None:
        """An engine's event showed how much of a request was cached."""
        candidate = self._candidates.get(flight.endpoint)
        if candidate is None:
            return
        self.picker.metrics.true_cached[candidate.endpoint.hostport] += cached
        if flight.compared:
            self.trust.record(flight.endpoint, flight.indexed, cached, now)

    def tick(self) -> None:
        """Now and then: expire requests, decide whose events are trusted, bring the counters up to date."""
        now = self.picker.clock()
        self.picker.settled(self.picker.ledger.expire(now), "expired")
        self.picker.tick()
        for key, member in self.picker.lookup.members.items():
            member.precise = not self.why_approximate(key)
        if self.subscriber is not None:
            self._count(self.subscriber)

    def trusted(self) -> Mapping[str, int]:
        """By ``ip:port``: 1 precise, 0 approximate."""
        members = self.picker.lookup.members
        return {c.endpoint.hostport: int(members[key].precise) for key, c in self._candidates.items()}

    def blocks(self) -> Mapping[str, Mapping[str, int]]:
        """Blocks held by ``ip:port`` and medium, over all ranks."""
        held: dict[str, dict[str, int]] = {}
        for key, candidate in self._candidates.items():
            media = held.setdefault(candidate.endpoint.hostport, {})
            for publisher in self.picker.lookup.members[key].publishers:
                for medium, blocks in self.picker.index.blocks(publisher).items():
                    media[medium] = media.get(medium, 0) + blocks
        return held

    def owed(self) -> Mapping[str, int]:
        """Prefill tokens owed, by ``ip:port``."""
        owed = self.picker.ledger.all_owed(self.picker.clock())
        return {c.endpoint.hostport: owed.get(key, 0) for key, c in self._candidates.items()}

    def cold(self) -> list[str]:
        """Endpoints that may be picked, whose events are followed and whose first replay is not over."""
        if self.subscriber is None:
            return []
        subscriber = self.subscriber
        return [
            key
            for key, member in self.picker.lookup.members.items()
            if member.publishers and not subscriber.warm(key) and not self._candidates[key].endpoint.refusal
        ]

    def why_approximate(self, key: str) -> str:
        """Why the index is not believed for this endpoint; empty when it is."""
        member = self.picker.lookup.members[key]
        model = self.picker.model
        if model is None or not model.faithful:
            wanted = "its tokenizer has not come yet" if self.settings.model else "no --model"
            return f"bytes are not faithful: {model.why_not}" if model else wanted
        if self.subscriber is None or not member.publishers:
            return "no KV events are followed"
        if not self.subscriber.warm(key):
            return "its first replay is not over"
        if self.subscriber.suspect(key):
            return "events are missing"
        if self.trust.silent(key, sum(rank.messages for rank in self.subscriber.of(key))):
            return "it publishes no events"
        return self.trust.why_not(key, self.picker.clock())

    def _joined(self, endpoint: Endpoint) -> None:
        key = endpoint.key
        ledger = self.picker.ledger
        ledger.calibrate(key, slots=self.scraper.states[key].slots(self.settings.max_num_seqs))
        self._stands(self.scraper.states[key])
        self._look_at(endpoint)

    def _look_at(self, endpoint: Endpoint) -> None:
        """Of an engine that nothing is known of."""
        key = endpoint.key
        publishers: tuple[int, ...] = ()
        if self.learner is not None:
            publishers = tuple(self.picker.index.publisher(s.publisher) for s in endpoint.sources)
        self.picker.lookup.join(key, Member(publishers, precise=False))
        self.picker.history.limit(
            key, round(self.settings.approximate_cache_tokens * self.picker.lookup.bytes_per_token)
        )

    def _stands(self, state: EngineState) -> None:
        """How the endpoint stands now, as the policy reads it."""
        endpoint = state.endpoint
        load = self.picker.ledger.load(endpoint.key)
        self._candidates[endpoint.key] = Candidate(endpoint, load, state.ready, state.standing)

    def _name_models(self) -> None:
        """Which names are adapters, and which are not served by all."""
        self.picker.adapters = self.scraper.adapters() | self.picker.index.adapters()
        states = self.scraper.states.values()
        self.picker.partly_served = partly_served((state.endpoint, state.served) for state in states)

    def _left(self, endpoint: Endpoint) -> None:
        key = endpoint.key
        self._candidates.pop(key, None)
        self.picker.settled(self.picker.ledger.forget(key), "left", endpoint=key)
        self.picker.history.forget(key)
        self.picker.lookup.leave(key)
        self.picker.savings.forget(key)
        self.trust.forget(key)
        self._restarts.pop(key, None)
        self.picker.metrics.forget(endpoint.hostport)

    def _count(self, subscriber: Subscriber) -> None:
        """Counters by endpoint from the counters by publisher."""
        metrics = self.picker.metrics
        for candidate in self._candidates.values():
            name = candidate.endpoint.hostport
            ranks = subscriber.of(candidate.endpoint.key)
            for kind in ("stored", "removed", "cleared"):
                metrics.events[name, kind] = sum(getattr(rank, kind) for rank in ranks)
            gaps, resets = sum(rank.gaps for rank in ranks), sum(rank.resets for rank in ranks)
            if (gaps, resets) != (metrics.gaps[name], metrics.resets[name]):
                logger.warning("events of %s: %d gaps, %d resets so far", name, gaps, resets)
            metrics.gaps[name], metrics.resets[name] = gaps, resets
            self._restarted(candidate.endpoint.key, sum(rank.restarts for rank in ranks))
            metrics.undecodable[name] = sum(rank.garbage + rank.malformed for rank in ranks)

    def _restarted(self, key: str, restarts: int) -> None:
        if restarts != self._restarts.get(key, 0):
            self._restarts[key] = restarts
            self.trust.of(key).restarted()


def _followed(endpoint: Endpoint) -> list[Followed]:
    names = (endpoint.hostport, endpoint.name, endpoint.key, *endpoint.aliases)
    return [
        Followed(endpoint.key, source.publisher, source.rank, source.events, source.replay, names)
        for source in endpoint.sources
    ]
