"""kvist's own picker in virtual time: the product's director, registry and exchange between replicas, driven
by the agenda instead of an event loop.

Only what takes no time here is left out: sockets, parsing and rendering, tokenising, and the check of decoded
blocks (text decodes and encodes without a loss).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Final

from kvist_epp.director.assembly import make_director
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.request_context import PromptMatch, RequestContext
from kvist_epp.disaggregation.leg_bodies import Prefilled
from kvist_epp.disaggregation.legs import OFF, ON, PrefillLeg, SecondLeg
from kvist_epp.disaggregation.prefill_outcome import PrefillFailure
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, Effect, PickResult
from kvist_epp.flowcontrol.driver import SLICE_SECONDS
from kvist_epp.flowcontrol.flow_controller import QueuedRequest
from kvist_epp.http2.call import UNKNOWN_PEER
from kvist_epp.index.cached_part import Member
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.in_flight import Attempt, RequestListener
from kvist_epp.names import LABEL_MAX_NUM_SEQS, LABEL_ROLES, REQUEST_ID_HEADER, SESSION_HEADER
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
from kvist_sim.virtual.index_feed import ROOT, VOLUME, IndexFeed, publisher_of
from kvist_sim.virtual.jobs import Call
from kvist_sim.virtual.loads import limit_loads
from kvist_sim.virtual.policy import RATIOS, Context, Pod, Request, Spec

SETTINGS: Final = Settings(max_endpoints=1, queue_bytes=1 << 40)
"""The product's defaults; time counts here, not memory, and nothing fails over."""
TICK_SECONDS: Final = 0.25
"""``kvist_epp.app.app.TICK_SECONDS``; that module starts sockets."""
PATH: Final = "/v1/chat/completions"
BODY: Final = b'{"messages":[]}'
"""Of all requests: prompts are matched by their text, and answers are as long as the workload says. The
director can change it, such as to say from where the engine may load blocks."""
PREFILLED: Final = Prefilled(b"{}")
"""What the first leg of a request leaves."""
LEASE_SECONDS: Final = 30.0
"""``kv_lease_duration`` of vLLM's NixlConnector."""
KEPT_HEADERS: Final = (REQUEST_ID_HEADER, SESSION_HEADER)


@dataclass(slots=True, eq=False)
class FollowerSink:
    """One replica that follows another: what it is sent arrives, and is acknowledged, at once."""

    follower: "Kvist"
    replica: str
    call: FollowerCall = field(init=False)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    from_envoy: bool = False
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
        disaggregation: bool = False,
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
            disaggregation=ON if disaggregation else OFF,
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
        self._legs: dict[Request, PrefillLeg] = {}
        """Requests whose prompts are being computed for another engine."""
        splitter = self.director.splitter
        self._second = None if splitter is None else SecondLeg(self.director, splitter, LEASE_SECONDS)
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
        labels = {LABEL_MAX_NUM_SEQS: str(self.context.max_num_seqs), LABEL_ROLES[0]: pod.role}
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
        if (splitter := self.director.splitter) is not None:
            for other in self.endpoints.values():  # the product connects new pairs before requests need them
                splitter.pairs.warm.add(endpoint.key, other.key)
                splitter.pairs.warm.add(other.key, endpoint.key)

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
        if isinstance(answer, PrefillLeg):
            self._split(request, answer)
            return None
        assert isinstance(answer, PickResult), "there is no other effect"
        limit_loads(request, answer.body)
        return pods.index(self._pods[answer.endpoints[0]])

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Implement ``Policy``: the director knows."""

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Implement ``Policy``: responses do not pass through the picker."""

    def prefilled(self, request: Request, pod: Pod, now: float, *, lost: bool) -> Pod | None:  # noqa: ARG002
        """Do as ``LegDriver``: the first engine has answered, or its connection broke."""
        assert self._second is not None, "it has split a request"
        outcome = PrefillFailure.UNREACHABLE if lost else PREFILLED
        answer = self._second.on_prefilled(self._legs.pop(request), outcome, now, now)
        return self._pods[answer.endpoints[0]] if isinstance(answer, PickResult) else None

    def _split(self, request: Request, leg: PrefillLeg) -> None:
        """Do as ``LegDriver``: the first engine is asked."""
        self._legs[request] = leg
        first, second = leg.split.prefill.endpoint, leg.split.decode.endpoint
        self.context.split(request, self._pods[first.hostport], self._pods[second.hostport])

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
        line = RequestLine(id=session, session=session, path=PATH, kind=match.kind, outcome="picked")
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
            body=BODY,
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

    def _answer(self, request: Request, decision: Decision | Effect | Exception) -> None:
        if isinstance(decision, PickResult):
            limit_loads(request, decision.body)
            self.context.send(request, self._pods[decision.endpoints[0]])
        elif isinstance(decision, PrefillLeg):
            self._split(request, decision)
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
            seen = Observation(publisher_of(pod), endpoint.key, session, tokens, None, phase, depth)  # type: ignore[arg-type]
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


KVIST: Final = Spec(
    "kvist",
    "this project: the product's own director (docs/policy.md)",
    Kvist,
    events=True,
    feed=IndexFeed,
    scrape_seconds=SETTINGS.scrape_interval,
)

FLUID: Final = Spec(
    "kvist-fluid",
    "this project: any engine may compute prompts for others (role both)",
    partial(Kvist, disaggregation=True),
    events=True,
    feed=IndexFeed,
    scrape_seconds=SETTINGS.scrape_interval,
)
FIXED: Final = tuple(
    replace(FLUID, name=f"kvist-pd-{ratio}", summary=f"this project: roles {ratio}", prefill_share=share)
    for ratio, share in RATIOS.items()
)
"""The same with fixed roles, prefill to decode."""
