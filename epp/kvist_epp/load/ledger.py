"""What each pod still owes: known, not scraped. Pure; every clock is a parameter (seconds, any monotonic
origin).

A request adds its uncached tokens when it is routed. They go away as the engine's events show prefill
advancing; where no events tell, they drain at the pod's learned rate, oldest request first, as vLLM schedules
(``fleet/load.py``). The request itself goes away when the access log settles it, when nothing was heard of it
for long, or when scrapes show fewer requests than we think; scrapes that show more tell of traffic that did
not pass through us.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.endpoint_load import DEFAULT_RATE, Load, Request, routed_at
from kvist_epp.load.prefill_rate import Paces
from kvist_epp.load.tpot_admission import Pacing


class Ledger:
    """The accounts of all pods. Everything is O(1) per request, amortised, but ``reconcile`` (the pod's
    requests)."""

    def __init__(
        self,
        *,
        default_rate: float = DEFAULT_RATE,
        expire_seconds: float = 300.0,
        grace_seconds: float = 0.5,
        max_requests: int = 100_000,
        tpot_seconds: float = 0.0,
    ) -> None:
        """``expire_seconds``: a request not heard of for this long is gone. ``grace_seconds``: a request
        routed this shortly before a scrape may not have reached the engine yet. ``max_requests`` bounds
        memory: the one heard of longest ago goes first. ``tpot_seconds``: time per output token that pods
        are to keep to; 0: none, they get whatever comes."""
        self._paces = Paces(default_rate)
        self._expire_seconds = expire_seconds
        self._grace = grace_seconds
        self._max_requests = max_requests
        self._tpot_seconds = tpot_seconds
        self._loads: dict[str, Load] = {}
        self._sessions: dict[str, list[Request]] = {}
        self._heard: OrderedDict[Request, None] = OrderedDict()
        self._count = 0
        self.changes: list[Request] | None = None
        """Requests of ours that were routed or have ended since somebody took the list; None: nobody does."""
        self.eased: Callable[[], None] = lambda: None
        """Told whenever a pod may have got room: a request ended or advanced, a scrape corrected it."""

    def __len__(self) -> int:
        return sum(len(load.requests) for load in self._loads.values())

    @property
    def expire_seconds(self) -> float:
        """A request not heard of for this long is gone."""
        return self._expire_seconds

    @property
    def paced(self) -> bool:
        """Pods are to keep to a time per output token."""
        return self._tpot_seconds > 0

    def ours(self) -> list[Request]:
        """Open requests that were routed here, heard of longest ago first."""
        return list(self._heard)

    def load(self, endpoint_key: str) -> Load:
        """The pod's account, opened when there is none; the same object until ``forget``."""
        load = self._loads.get(endpoint_key)
        if load is None:
            pacing = Pacing(self._tpot_seconds) if self._tpot_seconds else None
            load = Load(endpoint_key, rate=self._paces.rate(endpoint_key), pacing=pacing)
            self._loads[endpoint_key] = load
        return load

    def routed(self, session: str, endpoint_key: str, uncached: int, total: int, now: float) -> Request:
        """A request goes to this pod and owes ``uncached`` of its ``total`` prompt tokens.

        Clients may send one session id with several requests at once: each counts.
        """
        load = self.load(endpoint_key)
        load.drain(now)
        self._count += 1
        owed = float(max(uncached, 0))
        request = Request(session, load, owed, total, now, now, remaining=owed, number=self._count)
        load.add(request)
        if self.changes is not None:
            self.changes.append(request)
        self._sessions.setdefault(session, []).append(request)
        self._heard[request] = None
        if len(self._heard) > self._max_requests:
            self._drop(next(iter(self._heard)))
        return request

    def described(self, request: Request, content: Hashable) -> None:
        """What a request's prompt is: one of another replica that is equal is computed with it."""
        request.load.describe(request, content)
        self.eased()

    def taken(self, request: Request, now: float) -> None:
        """A peer routed it. If the last scrape may have counted it as foreign, it is not any more."""
        load = request.load
        load.drain(now)
        load.add(request)
        if load.foreign and request.routed_at <= load.looked_at:
            load.foreign -= 1

    def parted(self, request: Request, now: float, *, silent: bool = False) -> None:
        """A peer's request has ended; or the peer is ``silent``, and the request foreign from now on."""
        if not request.open:
            return
        request.load.drain(now)
        request.load.drop(request)
        if silent:
            request.load.foreign += 1
        self.eased()

    def advanced(self, request: Request, tokens_remaining: int, now: float, *, computed: float = 0.0) -> None:
        """``progress`` of a peer's request."""
        self._told(request, tokens_remaining, now, computed)

    def progress(self, session: str, tokens_remaining: int, now: float, *, computed: float = 0.0) -> None:
        """The engine's events say that so many tokens are left to prefill (0: it decodes), and that so many
        were ``computed`` since it said so last; strangers are ignored."""
        requests = self._sessions.get(session)
        if not requests:
            return
        request = next((r for r in requests if r.remaining > 0), requests[0])
        self._heard.move_to_end(request)
        self._told(request, tokens_remaining, now, computed)

    def _told(self, request: Request, tokens_remaining: int, now: float, computed: float) -> None:
        load = request.load
        load.tell(request, float(tokens_remaining), now, computed)
        if load.pace.rate is not None:
            self._teach(load, load.pace.rate)
        else:
            load.rate = max(load.rate, load.pace.shown)
        self.eased()

    def settled(self, session: str, now: float, endpoint_key: str = "") -> Request | None:
        """The request has ended (the oldest, where a session has several, on this pod if one is named): it
        owes nothing. Returns it, or None."""
        requests = self._sessions.get(session, ())
        request = next((r for r in requests if endpoint_key in ("", r.load.key)), None)
        if request is None:
            return None
        request.load.drain(now)
        return self._drop(request)

    def moved(self, session: str, old_key: str, new_key: str, uncached: int, now: float) -> None:
        """The request went to another pod than the one it was routed to; there it owes ``uncached``
        tokens."""
        request = self.settled(session, now, old_key)
        if request is not None:
            self.routed(session, new_key, uncached, request.total, now)

    def expire(self, now: float) -> list[str]:
        """Drop what nothing was heard of for ``expire_seconds``; the sessions dropped."""
        gone: list[str] = []
        while self._heard:
            request = next(iter(self._heard))
            if now - request.heard_at < self._expire_seconds:
                break
            gone.append(self._drop(request).session)
        return gone

    def forget(self, endpoint_key: str) -> list[str]:
        """The pod has left: close its account; our sessions that were on it."""
        load = self._loads.pop(endpoint_key, None)
        if self._paces.forget(endpoint_key):
            self._set_rates()
        return self._end(tuple(load.requests)) if load else []

    def reconcile(
        self, endpoint_key: str, running: int, waiting: int, now: float, *, asked_at: float | None = None
    ) -> list[str]:
        """Compare with what the engine says it has; ``asked_at``: when the scrape was sent (default:
        ``now``).

        More than ours and our peers': the rest is foreign. Fewer, twice in a row: the ones heard of longest
        ago have ended unnoticed. Ours among them end, and their sessions are returned; a peer's are left to
        that peer, which sees the same. Requests that still wait in the engine owe all of their tokens: vLLM
        starts the oldest first, so those are the newest.
        """
        load = self.load(endpoint_key)
        load.drain(now)
        there = max(running, 0) + max(waiting, 0)
        load.foreign = max(0, there - len(load.requests))
        load.looked_at = now if asked_at is None else asked_at
        arrived = self._arrived(load, load.looked_at)
        missing = max(0, len(arrived) - there)
        silent = sorted(arrived, key=self._silence)[: min(missing, load.missing)]
        ended = [request for request in silent if request.orphan or not request.origin]
        sessions = self._end(ended)
        load.missing = missing - len(ended)
        theirs = max(0, waiting - load.foreign)
        kept = [request for request in arrived if request in load.requests]
        load.still_waiting(kept[-theirs:] if theirs else [])
        self.eased()
        return sessions

    def calibrate(
        self,
        endpoint_key: str,
        *,
        rate: float | None = None,
        decode_seconds: float | None = None,
        slots: int | None = None,
        crowd: int | None = None,
    ) -> None:
        """What scrapes taught about this pod; None: nothing (yet). Its own events know the rate better.
        Without any: the fastest's."""
        load = self.load(endpoint_key)
        load.decode_seconds = decode_seconds
        load.slots, load.crowd = slots, crowd
        if rate is not None and rate > 0 and load.pace.rate is None:
            self._teach(load, max(rate, load.pace.shown))
        self.eased()

    def scraped(self, endpoint_key: str, sample: EngineSample, now: float) -> None:
        """An engine's own account; what it tells of its time per token."""
        load = self.load(endpoint_key)
        if load.pacing is not None:
            load.pacing.scraped(sample, load.drain(now), load.rate, now)
            self.eased()

    def _teach(self, load: Load, rate: float) -> None:
        if self._paces.learn(load.key, rate):
            self._set_rates()
        else:
            load.rate = self._paces.rate(load.key, load.pace.shown)

    def _set_rates(self) -> None:
        for load in self._loads.values():
            load.rate = self._paces.rate(load.key, load.pace.shown)

    def owed(self, endpoint_key: str, now: float | None = None) -> int:
        """Tokens the pod still has to prefill; as of the last change without ``now``."""
        if (load := self._loads.get(endpoint_key)) is None:
            return 0
        return round(load.owed if now is None else load.drain(now))

    def running(self, endpoint_key: str) -> int:
        """Requests on the pod, foreign ones included."""
        load = self._loads.get(endpoint_key)
        return load.running if load else 0

    def rate(self, endpoint_key: str) -> float:
        """Prefill tokens/s: learned, else that of the fastest pod that has learned its own, else the
        default."""
        load = self._loads.get(endpoint_key)
        return load.rate if load else self._paces.rate(endpoint_key)

    def all_owed(self, now: float) -> Mapping[str, int]:
        """Tokens owed per endpoint key, for the metrics."""
        return {key: round(load.drain(now)) for key, load in self._loads.items()}

    def _arrived(self, load: Load, asked_at: float) -> list[Request]:
        """Those the engine must have had when it was asked, in the order they were routed."""
        arrived = [request for request in load.requests if request.routed_at <= asked_at - self._grace]
        return sorted(arrived, key=routed_at)

    def _silence(self, request: Request) -> float:
        """When it was last heard of. Of requests heard of at nearly the same time each replica gives up its
        own first: else two could each wait for the other."""
        return request.heard_at + (self._grace if request.origin else 0.0)

    def _end(self, requests: Iterable[Request]) -> list[str]:
        """These have ended; the sessions of ours."""
        sessions = []
        for request in requests:
            if request.origin:
                request.load.drop(request)
            else:
                sessions.append(self._drop(request).session)
        return sessions

    def _drop(self, request: Request) -> Request:
        request.load.drop(request)
        if self.changes is not None:
            self.changes.append(request)
        del self._heard[request]
        requests = self._sessions[request.session]
        requests.remove(request)
        if not requests:
            del self._sessions[request.session]
        self.eased()
        return request
