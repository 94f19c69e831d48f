"""kvist's own picker in virtual time: the product's director, registry and exchange between replicas, driven
by the agenda instead of an event loop.

Only what takes no time here is left out: sockets, parsing and rendering, tokenising, and the check of decoded
blocks (text decodes and encodes without a loss).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

from kvist_epp.director.assembly import make_director
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.request_context import PromptMatch, RequestContext
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, PickResult
from kvist_epp.flowcontrol.driver import SLICE_SECONDS
from kvist_epp.flowcontrol.flow_controller import QueuedRequest
from kvist_epp.http2.call import UNKNOWN_PEER
from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.lookup import Member
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.in_flight import Attempt, RequestListener
from kvist_epp.names import LABEL_MAX_NUM_SEQS, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.prefix_stats.hot_prefixes import HotPrefixes
from kvist_epp.replicas.load_server import FollowerCall, LoadServer
from kvist_epp.replicas.messages import Handshake, decode_update, encode_ack
from kvist_epp.replicas.prompt_digests import URGENT_TOKENS
from kvist_epp.replicas.remote_load import RemoteLoad
from kvist_epp.replicas.replication import POLL_SECONDS, URGENT_SECONDS
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import ReplicationStats, Stages
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import LogWriter, RequestLine, RequestLog
from kvist_sim.virtual.jobs import BLOCK, Call, block_text
from kvist_sim.virtual.policy import Context, Pod, Request, Spec
from kvist_sim.virtual.tiers import DISK, HOST, SHARED, LoadNote, TierNote

VOLUME: Final = "volume"  # the storage that all engines share, if they share one
ROOT: Final[Root] = (None, None)
SETTINGS: Final = Settings(max_endpoints=1, queue_bytes=1 << 40)
"""The product's defaults; time counts here, not memory, and nothing fails over."""
TICK_SECONDS: Final = 0.25
"""``kvist_epp.app.app.TICK_SECONDS``; that module starts sockets."""
KEPT_HEADERS: Final = (REQUEST_ID_HEADER, SESSION_HEADER)


class IndexFeed:
    """The byte index of all replicas: they get the same events at the same time."""

    def __init__(self) -> None:
        self.index = Index()
        self.numbers: dict[Pod, int] = {}
        self.routers: list[Kvist] = []
        self.storages: dict[str, int] = {}
        """Number in the index of the volume that engines share, once it has blocks."""

    def joined(self, pod: Pod) -> None:
        """Add a publisher with an empty cache."""
        self.numbers[pod] = self.index.publisher(_publisher(pod))

    def left(self, pod: Pod) -> None:
        """Remove it with its blocks."""
        self.index.leave(self.numbers.pop(pod))
        while self.index.sweep(10_000):
            pass

    def told(self, pod: Pod, notes: list[Any], now: float) -> None:
        """Take in events: removals in one call, as the picker joins them; stored blocks with their text."""
        number, removed = self.numbers[pod], list[int]()
        for note in notes:
            if isinstance(note, int):
                removed.append(note)
                continue
            if removed:
                self.index.removed(number, removed)
                removed = []
            if isinstance(note, TierNote):
                self._slower(number, note)
                continue
            job, first, end = note
            self._stored(pod, job, first, end, now, loaded=isinstance(note, LoadNote))
        if removed:
            self.index.removed(number, removed)

    def _slower(self, number: int, note: TierNote) -> None:
        """Take in an event of a slower place; the GPU has announced the block (``kvevents.tier_blocks``)."""
        if not note.stored:
            self.index.removed(number, note.names, medium=note.medium)
            return
        if (medium := note.medium) == SHARED:
            number = self.storages.setdefault(VOLUME, self.index.publisher(VOLUME))
        for name in note.names:
            if not self.index.held(number, (name,), medium, counted=medium == HOST):
                self.index.held_as_others(number, name, medium)

    def _stored(self, pod: Pod, job: Any, first: int, end: int, now: float, *, loaded: bool) -> None:
        call: Call = job.call
        names, texts = job.hashes[first:end], block_text(call, first, end)
        parent = job.hashes[first - 1] if first else None
        self.index.stored(self.numbers[pod], ROOT, parent, names, texts, block_size=BLOCK)
        if loaded:
            return  # nothing was computed
        prompt = first * BLOCK < call.tokens
        tokens = min(end * BLOCK, call.tokens) - first * BLOCK if prompt else (end - first) * BLOCK
        for router in self.routers:
            router.observed(pod, call, tokens, end * BLOCK, now, prompt=prompt)


@dataclass(slots=True, eq=False)
class FollowerSink:
    """One replica that follows another: what it is sent arrives, and is acknowledged, at once."""

    follower: "Kvist"
    replica: str
    call: FollowerCall = field(init=False)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    peer: str = UNKNOWN_PEER

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        self.follower.context.after(0.0, self._arrive, data + content)

    def close(self, status: int = 0, message: str = "") -> None:
        raise AssertionError(f"replicas in virtual time stay connected: {status} {message}")

    def _arrive(self, data: bytes) -> None:
        update = decode_update(data)
        self.follower.remote_load.apply(self.replica, update, self.follower.now())
        self.call.on_message(encode_ack(seq=update.seq))


class Kvist(RequestListener):
    """One replica of the picker: hands arrivals, events, scrapes and ends to the product's objects."""

    hot: HotPrefixes | None = None

    def __init__(
        self,
        context: Context,
        settings: Settings | None = None,
        *,
        log: RequestLog | None = None,
        replica: str = "",
        scrape_interval: float = 0.0,
    ) -> None:
        """``settings``: by default the product's, with what the context says. ``log`` gets the request log.

        ``scrape_interval``: see ``EndpointRegistry``.
        """
        assert isinstance(context.feed, IndexFeed), "this policy is made with its own feed"
        self.context = context
        self._feed = context.feed
        self._feed.routers.append(self)
        self.settings = settings or replace(
            SETTINGS,
            prefill_tokens_per_second=context.prefill_rate,
            tpot_target=context.tpot_seconds,
            max_num_seqs=context.max_num_seqs,
        )
        self.director = make_director(
            self.settings,
            metrics=PickerMetrics(),
            log=log or RequestLog(LogWriter(2), enabled=False),
            now=0.0,
            wake=self._wake,
            index=self._feed.index,
            hot=self.hot,
            replica=replica or f"replica-{context.replica}",
        )
        tracker = self.director.tracker
        self.registry = EndpointRegistry(
            self.settings, self.director, self.now, scrape_interval=scrape_interval
        )
        self.completion = CompletionHandler(self.director, self.now, self._forward_end)
        self._pods: dict[str, Pod] = {}
        """By ``ip:port``."""
        self.endpoints: dict[Pod, Endpoint] = {}
        self._queued: dict[QueuedRequest, Request] = {}
        self._due = False
        self._due_later = inf
        self._ticking = False
        self.remote_load = RemoteLoad(
            self.director.replica, tracker, self.director.lookup.members.__contains__
        )
        self.load_server = LoadServer(
            lambda: Handshake(self.director.replica, b"", False),
            tracker,
            self.remote_load,
            ReplicationStats(),
            self.now,
        )
        self._exchange_at = inf
        self._poll_at = 0.0

    def now(self) -> float:
        """Return the time of the agenda."""
        return self.context.clock()

    # The pool

    def joined(self, pod: Pod, now: float) -> None:  # noqa: ARG002
        if not self._ticking:
            self._ticking = True
            self._tick(None)
            self._connect()
        labels = {LABEL_MAX_NUM_SEQS: str(self.context.max_num_seqs)}
        port = 1024 + pod.number
        endpoint = Endpoint(
            pod.name, "virtual", "10.0.0.1", port, labels, kv_events="tcp://10.0.0.1:1", uid=pod.name
        )
        self.endpoints[pod] = endpoint
        self._pods[endpoint.hostport] = pod
        self._follow()
        lookup = self.director.lookup
        lookup.leave(endpoint.key)
        lookup.storages = self._feed.storages
        member = Member((self._feed.numbers[pod],), block_size=pod.block_size, storage=VOLUME)
        lookup.join(endpoint.key, member)

    def left(self, pod: Pod, now: float) -> None:  # noqa: ARG002
        endpoint = self.endpoints.pop(pod)
        del self._pods[endpoint.hostport]
        self._follow()

    def _follow(self) -> None:
        self.registry.follow(EndpointSet(tuple(self.endpoints.values())))

    # Requests

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        answer = self.director.offer_matched(self._context_of(request), now)
        if isinstance(answer, QueuedRequest):
            self._queued[answer] = request
            return None
        pod = self._pods[answer.endpoints[0]]
        skipped = self.registry.states[self.endpoints[pod].key].load.skipped_media
        if skipped and isinstance(request, Call):  # as ``RequestContext.body_for`` says it in the body
            request.load_tiers = frozenset((HOST, DISK, SHARED)) - skipped
        return pods.index(pod)

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Implement ``Policy``: the director knows."""

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Implement ``Policy``: responses do not pass through the picker."""

    def finished(self, request: Request, pod: Pod, now: float) -> None:  # noqa: ARG002
        """Implement ``Policy``: the access log will report it."""
        entry = AccessLogEntry(self.session(request), self.session(request), None, 200)
        self.context.after(self.context.ended_seconds, self._on_access_log, entry)

    def session(self, request: Request) -> str:
        """Return the session id of a request; every request has its own."""
        return str(request.number)

    def tenant(self, request: Request) -> str:  # noqa: ARG002
        """Return the tenant of a request; empty: it names none."""
        return ""

    def _context_of(self, request: Request) -> RequestContext:
        prompts, session = [request.text], self.session(request)
        found = self.director.lookup.look(ROOT, prompts)
        match = PromptMatch("chat", None, session, prompts, ROOT, found, "precise")
        line = RequestLine(id=session, session=session, path="", kind=match.kind, outcome="picked")
        return RequestContext(
            session,
            self.tenant(request),
            None,
            line,
            Stages(),
            KEPT_HEADERS,
            may_wait=True,
            size=len(request.text),
            match=match,
        )

    def _on_access_log(self, entry: AccessLogEntry) -> None:
        self.completion.on_access_log([entry])

    def _forward_end(self, entry: AccessLogEntry) -> None:
        """Each request's end is reported to the replica that routed it; after expiry to none."""

    # The queue

    def _wake(self) -> None:
        """Do as ``FlowDriver.wake``."""
        if not self._due and self.director.flow is not None and not self.director.flow.idle:
            self._due = True
            self.context.after(0.0, self._poll, None)

    def _poll(self, _nothing: None) -> None:
        """Do as ``FlowDriver``."""
        self._due = False
        flow, now = self.director.flow, self.now()
        assert flow is not None, "it has limits"
        poll = flow.poll(now)
        while (outcome := poll.step(now)) is not None:
            if outcome.decision is not None:
                self._answer(self._queued.pop(outcome.request), outcome.decision)
        seconds = max(poll.seconds_until_due(), SLICE_SECONDS)
        if seconds < inf and now + seconds < self._due_later:
            self._due_later = now + seconds
            self.context.after(seconds, self._on_timer, self._due_later)

    def _on_timer(self, due: float) -> None:
        if due == self._due_later:
            self._due_later = inf
            self._wake()

    def _answer(self, request: Request, decision: Decision | Exception) -> None:
        if isinstance(decision, PickResult):
            self.context.send(request, self._pods[decision.endpoints[0]])
        elif isinstance(decision, Exception):
            self.context.refuse(request)

    def _tick(self, _nothing: None) -> None:
        """Do as ``EndpointRegistry.on_tick``; whose events are trusted does not change here."""
        self.director.on_tick(self.now())
        self.context.after(TICK_SECONDS, self._tick, None)

    # What engines report

    def observed(self, pod: Pod, call: Call, tokens: int, depth: int, now: float, *, prompt: bool) -> None:
        """Take in a stored event of one of the engine's requests."""
        endpoint = self.endpoints.get(pod)
        if endpoint is not None:
            phase = "prefill" if prompt else "decode"
            session = self.session(call)
            seen = Observation(_publisher(pod), endpoint.key, session, tokens, None, phase, depth)  # type: ignore[arg-type]
            self.director.progress.on_observation(seen, now)

    def scraped(self, pod: Pod, now: float) -> None:
        state = self.registry.scraper.states[self.endpoints[pod].key]
        self.registry.scraper.on_answer(state, pod.page, state.served, now)

    # Other replicas

    def _connect(self) -> None:
        """Follow each other replica; see ``replicas.replication``."""
        others = [one for one in self.context.peers if isinstance(one, Kvist) and one is not self]
        if not others:
            return
        self.director.set_other_replicas(len(others))
        self.director.lookup.remote_prefixes = self.remote_load.prefixes.match
        self.director.tracker.add_listener(self)
        self.director.tracker.add_listener(self.load_server)
        for other in others:
            sink = FollowerSink(self, other.director.replica)
            self.remote_load.on_connected(other.director.replica, self.now())
            sink.call = other.follow(sink, self.director.replica)
        self._exchange_in(self.context.gossip_seconds)

    def follow(self, sink: FollowerSink, replica: str) -> FollowerCall:
        """Another replica follows this one."""
        call = sink.call = self.load_server.start(sink)
        call.on_message(encode_ack(Handshake(replica, b"", False)))
        return call

    def on_routed(self, attempt: Attempt) -> None:
        """Do as ``Replication.on_routed``."""
        request = attempt.request
        urgent = request.prompt is not None and request.tokens - request.indexed_tokens >= URGENT_TOKENS
        if urgent and self.context.gossip_seconds > URGENT_SECONDS:
            self._exchange_in(URGENT_SECONDS)

    def _exchange_in(self, seconds: float) -> None:
        due = self.now() + seconds
        if due < self._exchange_at:
            self._exchange_at = due
            self.context.after(seconds, self._exchange, due)

    def _exchange(self, due: float) -> None:
        """Do as ``Replication.run``."""
        if due != self._exchange_at:
            return
        self._exchange_at = inf
        self.load_server.tick()
        if (now := self.now()) >= self._poll_at:
            self.remote_load.poll(now)
            self._poll_at = now + POLL_SECONDS
        self._exchange_in(max(self.context.gossip_seconds, SLICE_SECONDS))


def _publisher(pod: Pod) -> str:
    return f"{pod.name}/0"


KVIST: Final = Spec(
    "kvist",
    "this project: the product's own director (docs/policy.md)",
    Kvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=SETTINGS.scrape_interval,
)
