"""The registry of endpoints: which there are, which are ready, and whose events are trusted.

It owns one ``EndpointState`` for each endpoint and keeps every part in step with the set of endpoints. Driven
by three things: a new set, an engine's scrape, and a tick. No I/O of its own.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvist_epp.director.director import Director
from kvist_epp.director.endpoint_state import EndpointState
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_state import EngineState, partly_served
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.engines.vllm.kv_events import LMCACHE, SHARED
from kvist_epp.engines.vllm.tier_metrics import source_of
from kvist_epp.index.cached_part import Member
from kvist_epp.index.tier_accuracy import BrokenPromise
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.publisher_feed import FollowedPublisher
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.load.end_reports import NO_REPORTS
from kvist_epp.load.in_flight import Attempt, InFlightRequest, Leg, RequestListener
from kvist_epp.prompt.model import Model
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
        self.scraper = Scraper(
            on_scrape=self.on_scrape,
            on_change=self.on_state_change,
            on_unmeasured=self.on_unmeasured,
            interval=settings.scrape_interval if scrape_interval is None else scrape_interval,
            timeout=settings.scrape_timeout,
            key=EngineKey(settings.engine_key_file),
        )
        self.ingestor: Ingestor | None = None
        self.subscriber: Subscriber | None = None
        """None where no events are followed."""
        self.fleet: EndpointSet | None = None
        """None until the endpoints were listed once."""
        self.states: dict[str, EndpointState] = {}
        """By endpoint key."""
        self._unjudged: set[str] = set()
        """Endpoints of which something that trust depends on has changed since the last tick."""
        self._said_reports = {""}
        """What the log has of missing reports."""
        self._on_leaving: list[Callable[[Sequence[str]], None]] = []
        director.tracker.add_listener(self)
        director.tracker.on_doubt = self.scraper.hurry

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
            if (state := self.states[endpoint.key]).endpoint is not endpoint:
                state.update(endpoint, ready=state.scrape.ready, reason=state.scrape.status)
        self._name_models()
        self.director.set_endpoints(self.states.values(), self.clock())

    def activate(self, model: Model, ingestor: Ingestor | None, subscriber: Subscriber | None) -> None:
        """Render prompts by this model, and follow events if there is a subscriber.

        The routing history starts from empty: its plain texts are no prefixes of prompts.
        """
        self.ingestor, self.subscriber = ingestor, subscriber
        self.director.activate(model, ingestor)
        self.director.lookup.storages = {} if ingestor is None else ingestor.tiers.numbers
        self.director.lookup.chunks = {} if ingestor is None else ingestor.tiers.chunks
        fleet = self.fleet or EndpointSet()
        for endpoint in fleet:
            self.director.history.forget(endpoint.key)
            self.director.lookup.leave(endpoint.key)
            self.states[endpoint.key].member = self._add_to_lookup(endpoint)
            self._unjudged.add(endpoint.key)
        if subscriber is not None and fleet:
            subscriber.follow(followed for endpoint in fleet for followed in _followed(endpoint))

    # What is reported

    def on_scrape(self, scrape: EngineState) -> None:
        """An engine answered: correct its load, and what its cache holds."""
        key, sample = scrape.endpoint.key, scrape.sample
        if (state := self.states.get(key)) is None:
            return
        now, director = self.clock(), self.director
        tracker = director.tracker
        tracker.calibrate(
            key,
            rate=scrape.rates.prefill,
            decode_seconds=scrape.rates.decode_seconds,
            slots=scrape.slots(self.settings.max_num_seqs),
            kv_full_at=scrape.kv_full_at,
            transfer_rate=scrape.transfer_rate.rate,
        )
        for request in tracker.reconcile(key, sample.running, sample.waiting, now, asked_at=scrape.asked_at):
            director.progress.on_ended(request, "reconciled", now)
        tracker.on_scrape(key, sample, now)
        if sample.block_size:
            state.member.block_size = sample.block_size
        tokens = sample.cache_tokens or self.settings.approximate_cache_tokens
        director.history.limit(key, round(tokens * director.lookup.bytes_per_token))
        unsettled = tracker.unsettled_hits(key, sample.running, sample.waiting, asked_at=scrape.asked_at)
        state.accuracy.on_counters(round(sample.queries), round(sample.hits), now, unsettled=unsettled)
        self._calibrate_tiers(state, scrape)
        for broken in state.tiers.on_counters(sample.tiers.cached, now):
            self._forget_tier(state, broken)
        if state.storage_trust.doubtful and state.tiers.kept(source_of(self._shared_medium(state))):
            state.storage_trust.on_found()  # it was wiped; what was written since is found
        if state.storage_trust.rejoins(now):
            director.lookup.join_storage(key, state.endpoint.storage_namespace)
        self._unjudged.add(key)

    def _calibrate_tiers(self, state: EndpointState, scrape: EngineState) -> None:
        rates, skipped, limited = scrape.tier_speed.rates, frozenset[str](), False
        if self.settings.skip_slow_tiers:
            skipped, limited = scrape.tier_speed.skipped(state.load.rate, scrape.asked_at), bool(rates)
            self.director.limits_loads |= limited
        self.director.tracker.calibrate_tiers(state.endpoint.key, rates, skipped=skipped, limited=limited)

    def _forget_tier(self, state: EndpointState, broken: BrokenPromise) -> None:
        """Forget the blocks of a tier that the engine did not find there; the endpoint stays precise.

        Shared storage is forgotten for all engines; an engine that finds hardly anything of it again, and
        found nothing in between, is parted from it for a time (``StorageTrust``).
        """
        endpoint, index, lookup = state.endpoint, self.director.index, self.director.lookup
        name = state.member.storage
        shared = None if name is None else lookup.storages.get(name)
        medium = self._shared_medium(state)
        from_storage = broken.source == source_of(medium)
        logger.warning(
            "endpoint %s (%s) got %d tokens from its KV tier '%s' where the index expected %d: the blocks of "
            "that tier are dropped from the index",
            *(endpoint.key, endpoint.hostport, broken.true, broken.source, broken.predicted),
        )
        if shared is not None and from_storage and state.storage_trust.on_missed(self.clock()):
            lookup.part_from_storage(endpoint.key)
            shared = None
        for source in endpoint.sources if self.ingestor is not None else ():
            media = set(index.blocks(index.publisher(source.publisher))) - {SHARED}
            if shared is not None and index.blocks(shared):
                media.add(medium)
            for each in media:
                if source_of(each) == broken.source and self.ingestor is not None:
                    self.ingestor.forget_tier(source.publisher, each)
                    self.director.metrics.tier_resets[endpoint.hostport, each] += 1

    def _shared_medium(self, state: EndpointState) -> str:
        return LMCACHE if state.member.storage in self.director.lookup.chunks else SHARED

    def on_unmeasured(self, scrape: EngineState) -> None:
        """An engine answered without metrics: only what the picker sent there counts."""
        if (state := self.states.get(scrape.endpoint.key)) is not None:
            self.director.tracker.forget_scrapes(state.endpoint.key)

    def on_state_change(self, scrape: EngineState) -> None:
        """An engine became ready or unreachable, or serves something else."""
        if (state := self.states.get(scrape.endpoint.key)) is not None:
            state.update(scrape.endpoint, ready=scrape.ready, reason=scrape.status)
            self.director.set_endpoints(self.states.values(), self.clock())
        self._name_models()

    def on_routed(self, attempt: Attempt) -> None:
        """See ``RequestListener``: the engine's counters are compared with what was routed."""
        request = attempt.request
        if (state := self.states.get(attempt.endpoint)) is not None:
            known = not request.unindexed
            state.accuracy.on_routed(request.indexed_on_gpu, request.tokens, known=known)
            self._unjudged.add(attempt.endpoint)

    def on_moved(self, old: Attempt, new: Attempt) -> None:  # noqa: ARG002
        """See ``RequestListener``: an endpoint that answers what another one computed looks the prompt up,
        too."""
        if new.leg is Leg.DECODE:
            self.on_routed(new)

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """See ``RequestListener``: compare the index with the engine."""
        state = self.states.get(request.endpoint)
        if state is None:
            return
        metrics, name = self.director.metrics, state.endpoint.hostport
        metrics.true_cached[name] += cached
        metrics.verified_prompt[name] += request.tokens
        metrics.verified_predicted[name] += request.predicted_tokens
        metrics.on_saved(cached, request.attempt.load.rate)
        request.saving_counted = True
        if request.index_compared:
            if state.on_cache_truth(request.indexed_on_gpu, cached, now, request.indexed_otherwise):
                self.director.lookup.drops_last_block = True
                logger.info("endpoint %s (%s) %s", state.endpoint.key, name, state.last_block)
            if state.last_block.changes:
                for publisher in state.member.publishers:
                    self.director.index.drops_last_block(publisher, state.last_block.dropped)
            for medium, tokens in (request.indexed_lower or {}).items():
                if medium in request.skipped_media:
                    continue
                metrics.predicted_loads[name, medium] += tokens
                state.tiers.on_taken_up({source_of(medium): tokens})
            self._unjudged.add(request.endpoint)

    def on_tick(self) -> None:
        """Expire requests, decide whose events are trusted, and bring the counters up to date."""
        now = self.clock()
        self.director.on_tick(now)
        self._watch_ends(now)
        if self.subscriber is not None:
            active = self.subscriber.take_active()
            self._count(self.subscriber, active)
            self._unjudged |= active
        for key in self._unjudged:
            if key in self.states:
                self.director.lookup.set_precise(key, precise=not self.why_approximate(key))
        self._unjudged.clear()

    def _watch_ends(self, now: float) -> None:
        """Say once that ends are not reported, or not all of them."""
        reports = self.director.tracker.end_reports
        if reports.certain:
            self._said_reports.discard(NO_REPORTS)
        if (missing := reports.missing(now)) not in self._said_reports:
            self._said_reports.add(missing)
            logger.warning("%s", missing)

    def missing_reports(self) -> str:
        """Return what is missing where no gateway reports how requests end, and what it costs; else empty."""
        return self.director.tracker.end_reports.missing(self.clock())

    # Figures

    def trusted(self) -> Mapping[str, int]:
        """Return 1 (precise) or 0 (approximate) by ``ip:port``; nothing where no prefix is matched."""
        if not self.settings.prefix_matching:
            return {}
        return {state.endpoint.hostport: int(state.member.precise) for state in self.states.values()}

    def blocks(self) -> Mapping[str, Mapping[str, int]]:
        """Return the blocks held by ``ip:port`` and medium."""
        held = self.director.lookup.blocks
        return {state.endpoint.hostport: held(state.member) for state in self.states.values()}

    def backlog(self) -> Mapping[str, int]:
        """Return the backlog in tokens by ``ip:port``."""
        now = self.clock()
        return {state.endpoint.hostport: round(state.load.drain(now)) for state in self.states.values()}

    def evicted_requested_tokens(self) -> int:
        """Return the tokens that engines computed again after every endpoint had evicted them."""
        return 0 if self.ingestor is None else self.ingestor.evicted.requested_tokens

    def cold(self) -> list[str]:
        """Return the endpoints that may be picked and whose first replay of KV events has not ended."""
        if self.subscriber is None:
            return []
        subscriber = self.subscriber
        return [
            key
            for key, state in self.states.items()
            if state.member.publishers and not subscriber.warm(key) and not state.endpoint.refusal
        ]

    def why_approximate(self, key: str) -> str:
        """Return why the index is not trusted for this endpoint; empty when it is, or when no prefix is
        matched."""
        if not self.settings.prefix_matching:
            return ""
        state = self.states[key]
        model = self.director.model
        if model is None or not model.faithful:
            wanted = "the tokenizer is not loaded yet" if self.settings.model else "--model is not set"
            return f"the tokenizer does not decode to exact bytes: {model.why_not}" if model else wanted
        if self.subscriber is None or not state.member.publishers:
            return "the picker does not subscribe to its KV events"
        if not self.subscriber.warm(key):
            return "the first replay of its KV events has not finished"
        if self.subscriber.suspect(key):
            return "some of its KV events are missing"
        if state.accuracy.silent(sum(rank.messages for rank in self.subscriber.stats_of(key))):
            return "it publishes no KV events"
        return state.accuracy.why_not

    def _add(self, endpoint: Endpoint) -> None:
        key, tracker = endpoint.key, self.director.tracker
        scrape = self.scraper.states[key]
        tracker.calibrate(key, slots=scrape.slots(self.settings.max_num_seqs))
        self.states[key] = EndpointState(
            endpoint,
            tracker.load(key),
            scrape.ready,
            scrape.status,
            scrape=scrape,
            member=self._add_to_lookup(endpoint),
        )
        self._unjudged.add(key)

    def _add_to_lookup(self, endpoint: Endpoint) -> Member:
        key, director = endpoint.key, self.director
        publishers, storage = tuple[int, ...](), None
        if self.ingestor is not None:
            publishers = tuple(director.index.publisher(s.publisher) for s in endpoint.sources)
            storage = endpoint.storage_namespace
        member = Member(publishers, precise=False, storage=storage)
        director.lookup.join(key, member)
        tokens = self.settings.approximate_cache_tokens
        director.history.limit(key, round(tokens * director.lookup.bytes_per_token))
        return member

    def _name_models(self) -> None:
        """Which names are adapters, and which are not served by all."""
        scrapes = self.scraper.states.values()
        self.director.set_models(
            self.scraper.adapters() | self.director.index.adapters(),
            partly_served((scrape.endpoint, scrape.served) for scrape in scrapes),
        )

    def _remove(self, endpoint: Endpoint) -> None:
        key, director, now = endpoint.key, self.director, self.clock()
        del self.states[key]
        for request in director.tracker.remove_endpoint(key):
            director.progress.on_ended(request, "left", now)
        director.history.forget(key)
        director.lookup.leave(key)
        director.cache_value.remove(key)
        director.metrics.forget(endpoint.hostport)

    def _count(self, subscriber: Subscriber, active: Iterable[str]) -> None:
        """Sum the counters of the publishers of these endpoints."""
        metrics = self.director.metrics
        for key in active:
            if (state := self.states.get(key)) is None:
                continue
            name = state.endpoint.hostport
            ranks = subscriber.stats_of(state.endpoint.key)
            for kind in ("stored", "removed", "cleared"):
                metrics.events[name, kind] = sum(getattr(rank, kind) for rank in ranks)
            gaps, resets = sum(rank.gaps for rank in ranks), sum(rank.resets for rank in ranks)
            if (gaps, resets) != (metrics.gaps[name], metrics.resets[name]):
                logger.warning(
                    "KV events of %s: %d gaps so far; its blocks were dropped from the index %d times",
                    *(name, gaps, resets),
                )
            metrics.gaps[name], metrics.resets[name] = gaps, resets
            metrics.undecodable[name] = sum(rank.garbage + rank.malformed for rank in ranks)
            restarts = sum(rank.restarts for rank in ranks)
            if restarts != state.restarts:
                state.restarts = restarts
                state.accuracy.on_engine_restart()
                state.tiers.on_engine_restart()


def _followed(endpoint: Endpoint) -> list[FollowedPublisher]:
    names = (endpoint.hostport, endpoint.name, endpoint.key, *endpoint.aliases)
    return [
        FollowedPublisher(
            *(endpoint.key, source.publisher, source.rank, source.events, source.replay, names),
            storage=endpoint.storage_namespace,
            storage_tokens=endpoint.storage_tokens,
        )
        for source in endpoint.sources
    ]
