"""kvist's own picker in virtual time: its index, look-up, history, ledger, rates, cost and pick, as they are.

What is left out is what has no time here: sockets, parsing and rendering, tokenising, and the check of
generated blocks (text decodes and encodes without a loss). Load of other replicas is told through the
ledger's own verbs, in updates as often as the peers send them, and long new prefixes as they tell them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Final

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_state import EngineState, ScrapeState
from kvist_epp.engines.vllm.engine_metrics import FULL_CACHE
from kvist_epp.flowcontrol.capacity import Room
from kvist_epp.flowcontrol.deficit_round_robin import Spot, Ticket
from kvist_epp.flowcontrol.request_queue import Waiting
from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.lookup import Found, Lookup, Member
from kvist_epp.index.routing_history import History, Note
from kvist_epp.load.endpoint_load import Request as Entry
from kvist_epp.load.ledger import Ledger
from kvist_epp.names import LABEL_MAX_NUM_SEQS
from kvist_epp.prefix_stats.recent_uses import Uses
from kvist_epp.replicas.prompt_digests import ANNOUNCED_TOKENS, URGENT_TOKENS, PrefixesInFlight, PromptDigests
from kvist_epp.replicas.replication import URGENT_SECONDS
from kvist_epp.scheduling.cost import DEFAULT, Policy, policy_among
from kvist_epp.scheduling.pick import Candidate, Demand, Scored, choose
from kvist_sim.virtual.jobs import Call, block_text
from kvist_sim.virtual.passage import BLOCK
from kvist_sim.virtual.policy import BYTES_PER_TOKEN, Context, Pod, Request, Spec

ROOT: Final[Root] = (None, None)
SCRAPE_SECONDS: Final = 2.0
"""``Settings.scrape_interval``'s default."""
QUEUE_SECONDS: Final = 60.0
"""``Settings.queue_seconds``'s default."""
QUEUE_REQUESTS: Final = 10_000
QUEUE_BYTES: Final = 1 << 40
"""No bound: what counts is time, not memory."""
LOOK_SECONDS: Final = 0.002
"""Between two looks at who waits, at least."""
CREDIT_SECONDS: Final = 2.0
"""``kvist_epp.director.director.CREDIT_SECONDS``."""


class IndexFeed:
    """The byte index of all replicas: they hear the same events at the same time."""

    def __init__(self) -> None:
        self.index = Index()
        self.numbers: dict[Pod, int] = {}
        self.routers: list[Kvist] = []

    def joined(self, pod: Pod) -> None:
        """A publisher with an empty cache."""
        self.numbers[pod] = self.index.publisher(pod.name)

    def left(self, pod: Pod) -> None:
        """It and its blocks are gone."""
        self.index.leave(self.numbers.pop(pod))
        while self.index.sweep(10_000):
            pass

    def told(self, pod: Pod, notes: list[Any], now: float) -> None:
        """Removals in one go, as ``cache.learn.removals`` joins them; stored blocks with their text."""
        number, gone = self.numbers[pod], list[int]()
        for note in notes:
            if isinstance(note, int):
                gone.append(note)
                continue
            if gone:
                self.index.removed(number, gone)
                gone = []
            job, first, end = note
            self._stored(number, job, first, end, now)
        if gone:
            self.index.removed(number, gone)

    def _stored(self, number: int, job: Any, first: int, end: int, now: float) -> None:
        names, texts = job.hashes[first:end], block_text(job.call, first, end)
        parent = job.hashes[first - 1] if first else None
        self.index.stored(number, ROOT, parent, names, texts, block_size=BLOCK)
        left = max(0, job.call.tokens - end * BLOCK)
        computed = max(0, min(end * BLOCK, job.call.tokens) - first * BLOCK)
        for router in self.routers:
            router.progressed(job.call, 0 if left < BLOCK else left, computed, now)


@dataclass(slots=True, eq=False)
class Trip:
    """A request that this replica routed."""

    session: str
    pod: Pod
    note: Note
    told: bool = False
    """Its engine said that its prompt is computed."""
    entries: list[tuple["Kvist", Entry, PromptDigests | None]] = field(default_factory=list)
    """What the other replicas keep of it."""


class Held(Ticket):
    """A request that waits for a pod."""

    __slots__ = ("request",)

    def __init__(self, request: Request, spot: Spot, since: float) -> None:
        super().__init__(0, "", spot, request.tokens, len(request.text))
        self.request, self.since = request, since


class Kvist:
    """One replica of the picker."""

    def __init__(self, context: Context, policy: Policy = DEFAULT) -> None:
        assert isinstance(context.feed, IndexFeed), "this policy is made with its own feed"
        self._context = context
        self._policy = policy
        self._feed = context.feed
        self._feed.routers.append(self)
        self.ledger = Ledger(default_rate=context.prefill_rate, tpot_seconds=context.tpot_seconds)
        self.ledger.eased = self._wake
        self._waiting = Waiting(QUEUE_REQUESTS, QUEUE_BYTES)
        self._due = self._later = False
        """It will look who may go: at once, in a while."""
        self._history = History()
        self.lookup = Lookup(self._feed.index, self._history, bytes_per_token=BYTES_PER_TOKEN)
        self._uses = Uses()
        self._elsewhere = PrefixesInFlight()
        self._candidates: dict[Pod, Candidate] = {}
        self._pods: dict[str, Pod] = {}
        self._states: dict[Pod, EngineState] = {}
        self._trips: dict[Request, Trip] = {}
        self._updates: list[Callable[[], None]] = []
        """What the others are to be told."""
        self._told_at = 0.0
        """When they were last told something, or might have been."""
        self._turn = 0
        self._chosen: tuple[Scored, Found] | None = None

    def joined(self, pod: Pod, now: float) -> None:  # noqa: ARG002  # part of the protocol
        """As ``Membership`` and ``Picker.shared_with`` do it."""
        self._uses.replicas = len(self._context.peers)
        if len(self._context.peers) > 1:
            near = policy_among(len(self._context.peers) - 1, paced=self.ledger.paced).near_seconds
            self._policy = replace(self._policy, near_seconds=near)
        labels = {LABEL_MAX_NUM_SEQS: str(self._context.max_num_seqs)}
        endpoint = Endpoint(pod.name, "virtual", "10.0.0.1", 1024 + pod.number, labels, uid=pod.name)
        state = self._states[pod] = EngineState(endpoint, ScrapeState.READY)
        self._candidates[pod] = Candidate(endpoint, self.ledger.load(endpoint.key))
        self._pods[endpoint.key] = pod
        self.ledger.calibrate(endpoint.key, slots=state.slots())
        self.lookup.join(endpoint.key, Member((self._feed.numbers[pod],), block_size=pod.block_size))

    def left(self, pod: Pod, now: float) -> None:  # noqa: ARG002
        """Its account is closed."""
        key = self._candidates.pop(pod).endpoint.key
        del self._states[pod], self._pods[key]
        self.lookup.leave(key)
        self.ledger.forget(key)
        self._history.forget(key)
        self._wake()

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        """``Picker.decide``."""
        best = self._choose(request, now)
        self.ledger.load(best.endpoint.key).wanted(best.uncached_tokens, now)
        if (spot := self._paced(best)) is not None:
            self._waiting.offer(Held(request, spot, now))
            self._wake()
            return None
        return pods.index(self._pods[best.endpoint.key])

    def _choose(self, request: Request, now: float) -> Scored:
        """``Picker._choose``."""
        self._turn += 1
        found = self.lookup.look(ROOT, [request.text])
        candidates = list(self._candidates.values())
        demand = Demand(found.tokens, found.hits, self._uses.lately(found.place, now))
        [best] = choose(candidates, demand, now=now, turn=self._turn, limit=1, policy=self._policy)
        self._chosen = best, found
        return best

    def _paced(self, best: Scored) -> Spot | None:
        """``Picker._paced``."""
        return Spot.bound(self.ledger.load(best.endpoint.key), best.uncached_tokens) if best.closed else None

    def _wake(self) -> None:
        """``Queue.wake``."""
        if self._waiting.requests and not self._due:
            self._due = True
            self._context.after(0.0, self._work, None)

    def _work(self, _nothing: None) -> None:
        """``Queue._work``."""
        self._due = False
        now = self._now()
        room = Room(list(self._candidates.values()), now, inf)
        while self._candidates and self._step(room, now):
            pass
        if self._waiting.requests and not self._later:
            self._later = True
            self._context.after(max(room.relieved_in(), LOOK_SECONDS), self._look_again, None)

    def _look_again(self, _nothing: None) -> None:
        self._later = False
        self._wake()

    def _step(self, room: Room, now: float) -> bool:
        """``Queue._step``."""
        oldest = self._waiting.oldest()
        if isinstance(oldest, Held) and now - oldest.since >= QUEUE_SECONDS:
            self._waiting.leave(oldest)
            self._context.refuse(oldest.request)
            return True
        held = self._waiting.take(room.may_go)
        if not isinstance(held, Held):
            return False
        best = self._choose(held.request, now)
        if (spot := self._paced(best)) is not None:
            self._waiting.again(held, spot)
        else:
            self._context.send(held.request, self._pods[best.endpoint.key])
        return True

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """``Picker._book``."""
        assert self._chosen is not None, "choose comes first"
        best, found = self._chosen
        self._uses.note(found.place, now)
        session, key = str(request.number), best.endpoint.key
        own = self.ledger.routed(session, key, best.uncached_tokens, found.tokens, now)
        trip = self._trips[request] = Trip(session, pod, self._history.note(key, ROOT, request.text))
        if len(self._context.peers) > 1:
            self._spread(trip, own, request.text)

    def progressed(self, call: Call, left: int, computed: int, now: float) -> None:
        """``Picker.observed``: the engine's events tell of one of its requests."""
        trip = self._trips.get(call)
        if trip is None:
            return
        self.ledger.progress(trip.session, left, now, computed=computed)
        if not left and not trip.told:
            trip.told = True
            self._context.after(CREDIT_SECONDS, self._credited, trip)
        for peer, entry, _ in trip.entries:
            peer.hears_progress(entry, left, computed, now)

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Responses do not pass through the picker."""

    def finished(self, request: Request, pod: Pod, now: float) -> None:  # noqa: ARG002
        """The access log will tell."""
        self._context.after(self._context.ended_seconds, self._ended, request)

    def scraped(self, pod: Pod, now: float) -> None:
        """``Scraper._answered`` and ``Membership.scraped``."""
        state, page = self._states[pod], pod.page
        state.sample = page
        state.rates.observe(page, now)
        if page.cache_usage < FULL_CACHE:
            state.batch.observe(page.running, page.waiting)
        key, rates = state.endpoint.key, state.rates
        self.ledger.calibrate(
            key,
            rate=rates.prefill,
            decode_seconds=rates.decode_seconds,
            slots=state.slots(),
            crowd=state.crowd,
        )
        self.ledger.reconcile(key, page.running, page.waiting, now)
        self.ledger.scraped(key, page, now)

    def _ended(self, request: Request) -> None:
        trip = self._trips.pop(request)
        self.ledger.settled(trip.session, self._now(), "")
        self._credited(trip)
        for peer, entry, prefix in trip.entries:
            self._tell(partial(peer.hears_end, entry, prefix))

    def _credited(self, trip: Trip) -> None:
        self._history.drop(trip.note)

    def _now(self) -> float:
        return self._context.clock()

    # Replicas

    def _tell(self, update: Callable[[], None], *, hurry: bool = False) -> None:
        """``Replication.run``: what has come together is told every interval; after a long new prompt, at
        once."""
        interval, now = self._context.gossip_seconds, self._now()
        if not self._updates:
            self._told_at += (now - self._told_at) // interval * interval if interval else 0.0
            self._context.after(max(0.0, self._told_at + interval - now), self._told, None)
        self._updates.append(update)
        if hurry and interval > URGENT_SECONDS:
            self._context.after(URGENT_SECONDS, self._told, None)

    def _told(self, _nothing: None) -> None:
        if self._updates:
            updates, self._updates = self._updates, []
            self._told_at = self._now()
            for update in updates:
                update()

    def _spread(self, trip: Trip, own: Entry, prompt: bytes) -> None:
        prefix = PromptDigests.compute(ROOT, prompt) if own.uncached >= ANNOUNCED_TOKENS else None
        if prefix is not None:
            self._tell(partial(self.ledger.described, own, prefix.content))
        for peer in self._context.peers:
            if isinstance(peer, Kvist) and peer is not self:
                entry = replace(own, load=peer.ledger.load(own.load.key), origin=f"{id(self)}")
                trip.entries.append((peer, entry, prefix))
                hurry = own.uncached >= URGENT_TOKENS
                self._tell(partial(peer.hears_routed, entry, prefix), hurry=hurry)

    def hears_routed(self, entry: Entry, prefix: PromptDigests | None) -> None:
        """``replicas.remote_load``: another replica routed a request."""
        if entry.load.key in self.lookup.members:
            entry.content = None if prefix is None else prefix.content
            self.ledger.taken(entry, self._now())
            if prefix is not None:
                self._elsewhere.add(entry.load.key, prefix)
                self.lookup.elsewhere = self._elsewhere.match

    def hears_progress(self, entry: Entry, left: int, computed: int, now: float) -> None:
        """Events of another replica's request come to all replicas alike; of one that is not told of yet, the
        telling has what its replica knows by then (``replicas.load_server``)."""
        if entry.open:
            self.ledger.advanced(entry, left, now, computed=computed)
        else:
            entry.remaining, entry.progressed = min(entry.uncached, float(left)), True

    def hears_end(self, entry: Entry, prefix: PromptDigests | None) -> None:
        """It has ended."""
        if entry.open:
            self.ledger.parted(entry, self._now())
        if prefix is not None and entry.load.key in self.lookup.members:  # else it was not added
            self._elsewhere.remove(entry.load.key, prefix)


KVIST: Final = Spec(
    "kvist",
    "this project: priced cost (DESIGN section 6)",
    Kvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=SCRAPE_SECONDS,
)
