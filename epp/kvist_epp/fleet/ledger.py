"""What each pod still owes: known, not scraped. Pure; every clock is a parameter (seconds, any monotonic
origin).

A request adds its uncached tokens when it is routed. They go away as the engine's events show prefill
advancing; between events they drain at the pod's learned rate, oldest request first, as vLLM schedules. The
request itself goes away when the access log settles it, when nothing was heard of it for long, or when
scrapes show fewer requests than we think; scrapes that show more tell of traffic that did not pass through
us.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

DEFAULT_RATE: Final = 15_928.0
"""Prefill tokens/s until a pod's own is learned: Qwen3-32B on one H100 (``kvist sim``'s default timing)."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way."""

    session: str
    load: "Load"
    uncached: float
    """Tokens to prefill when it was routed."""
    total: int
    """All prompt tokens, cached ones included."""
    routed_at: float
    heard_at: float
    """When something was last heard of it."""
    remaining: float = 0.0
    """Tokens still to prefill, as far as known; never below zero."""
    progressed: bool = False
    """Events have told its progress: what scrapes suggest does not count any more."""
    number: int = 0
    """Of all requests its replica routed."""
    origin: str = ""
    """The replica that routed it and will say how it ends; empty: this one."""
    orphan: bool = False
    """That replica has gone: nobody will."""

    @property
    def open(self) -> bool:
        """Whether it still counts."""
        return self in self.load.requests


@dataclass(slots=True, eq=False)
class Load:
    """One pod's account, read by the cost for each pick: plain attributes, kept by the ``Ledger`` alone."""

    key: str
    rate: float = DEFAULT_RATE
    """Prefill tokens/s."""
    owed: float = 0.0
    """Tokens owed at ``at``; ``drain`` first."""
    foreign: int = 0
    """Requests the engine has beyond ours and our peers', by the last scrape."""
    slots: int | None = None
    """Sequences the engine runs at once; None: not known, so never taken for full."""
    crowd: int | None = None
    """Sequences it ran when its KV cache was full and requests waited in it; None: that was not so."""
    decode_seconds: float | None = None
    """Mean time from first to last token of a request on this pod; None: not learned."""
    at: float = 0.0
    requests: dict[Request, None] = field(default_factory=dict)
    """Ours and our peers' on their way, in the order they were heard of."""
    queue: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    """Those with tokens left, oldest first."""
    missing: int = 0
    """How many requests fewer than those the last scrape showed, less those that ended since."""
    looked_at: float = -inf
    """When the last scrape was sent."""

    @property
    def running(self) -> int:
        """Requests on the pod, whoever sent them."""
        return len(self.requests) + self.foreign

    def full(self, max_owed_seconds: float) -> bool:
        """Whether it should get no more, as of the last ``drain``: its batch is full, or it owes more than
        that many seconds of prefill. What a scrape did not find is not counted: ends are told late."""
        return self._runs(self.slots) or self.owed > max_owed_seconds * self.rate

    def closed(self, max_owed_seconds: float) -> bool:
        """Whether nobody who waits may go there: it is full, or so is its KV cache."""
        return self._runs(self.crowd) or self.full(max_owed_seconds)

    def _runs(self, number: int | None) -> bool:
        return number is not None and len(self.requests) + self.foreign - self.missing >= number

    def relieved_in(self, max_owed_seconds: float) -> float:
        """Seconds until it owes no more than that if nothing ends or arrives; infinite where its batch or
        its cache is full."""
        if self._runs(self.slots) or self._runs(self.crowd):
            return inf
        return max(0.0, self.owed / self.rate - max_owed_seconds)

    def drain(self, now: float) -> float:
        """Let the time since the last call prefill at ``rate``; returns the tokens still owed."""
        budget = (now - self.at) * self.rate
        if budget <= 0:
            return self.owed
        self.at = now
        queue = self.queue
        while queue and budget > 0:
            head = next(iter(queue))
            done = min(head.remaining, budget)
            budget -= done
            self.set_remaining(head, head.remaining - done)
        return self.owed

    def set_remaining(self, request: Request, tokens: float) -> None:
        """Correct what one request still owes; one that owes again is the engine's oldest, so it goes
        first."""
        tokens = min(max(tokens, 0.0), request.uncached)
        self.owed += tokens - request.remaining
        if tokens <= 0:
            self.queue.pop(request, None)
        elif request not in self.queue:
            self.queue[request] = None
            self.queue.move_to_end(request, last=False)
        request.remaining = tokens
        if not self.queue or self.owed < 0:  # rounding errors of floats end here
            self.owed = sum(r.remaining for r in self.queue)

    def add(self, request: Request) -> None:
        """A request was routed here; it owes all of its tokens unless ``remaining`` is set."""
        self.requests[request] = None
        if request.remaining > 0:
            self.queue[request] = None
            self.owed += request.remaining

    def drop(self, request: Request) -> None:
        """A request has ended."""
        self.set_remaining(request, 0.0)
        del self.requests[request]
        if self.missing:
            self.missing -= 1

    def still_waiting(self, newest: list[Request]) -> None:
        """The engine has not begun these: they owe all of their tokens, whatever time has drained."""
        for request in reversed(newest):
            if not request.progressed and request.remaining < request.uncached:
                self.set_remaining(request, request.uncached)
        self.queue = OrderedDict.fromkeys(sorted(self.queue, key=_routed_at))


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
    ) -> None:
        """``expire_seconds``: a request not heard of for this long is gone. ``grace_seconds``: a request
        routed this shortly before a scrape may not have reached the engine yet. ``max_requests`` bounds
        memory: the one heard of longest ago goes first."""
        self._default_rate = default_rate
        self._expire_seconds = expire_seconds
        self._grace = grace_seconds
        self._max_requests = max_requests
        self._loads: dict[str, Load] = {}
        self._learned: dict[str, float] = {}
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

    def ours(self) -> list[Request]:
        """Open requests that were routed here, heard of longest ago first."""
        return list(self._heard)

    def load(self, endpoint_key: str) -> Load:
        """The pod's account, opened when there is none; the same object until ``forget``."""
        load = self._loads.get(endpoint_key)
        if load is None:
            load = self._loads[endpoint_key] = Load(endpoint_key, rate=self._prior())
        return load

    def routed(self, session: str, endpoint_key: str, uncached: int, total: int, now: float) -> None:
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

    def advanced(self, request: Request, tokens_remaining: int, now: float) -> None:
        """``progress`` of a peer's request."""
        request.load.drain(now)
        request.load.set_remaining(request, float(tokens_remaining))
        request.progressed = True
        request.heard_at = now
        self.eased()

    def progress(self, session: str, tokens_remaining: int, now: float) -> None:
        """The engine's events say that so many tokens are left to prefill (0: it decodes); strangers are
        ignored."""
        requests = self._sessions.get(session)
        if not requests:
            return
        request = next((r for r in requests if r.remaining > 0), requests[0])
        request.load.drain(now)
        request.load.set_remaining(request, float(tokens_remaining))
        request.progressed = True
        request.heard_at = now
        self._heard.move_to_end(request)
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
        self._learned.pop(endpoint_key, None)
        load = self._loads.pop(endpoint_key, None)
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
        """What scrapes taught about this pod; None: nothing (yet). Without a rate: the others' median."""
        load = self.load(endpoint_key)
        load.decode_seconds = decode_seconds
        load.slots, load.crowd = slots, crowd
        if rate is not None and rate > 0:
            self._learned[endpoint_key] = load.rate = rate
            prior = self._prior()
            for other in self._loads.values():
                if other.key not in self._learned:
                    other.rate = prior
        self.eased()

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
        """Prefill tokens/s: learned, else the median of the pods that have learned theirs, else the
        default."""
        load = self._loads.get(endpoint_key)
        return load.rate if load else self._prior()

    def all_owed(self, now: float) -> Mapping[str, int]:
        """Tokens owed per endpoint key, for the metrics."""
        return {key: round(load.drain(now)) for key, load in self._loads.items()}

    def _prior(self) -> float:
        rates = sorted(self._learned.values())
        return rates[len(rates) // 2] if rates else self._default_rate

    def _arrived(self, load: Load, asked_at: float) -> list[Request]:
        """Those the engine must have had when it was asked, in the order they were routed."""
        arrived = [request for request in load.requests if request.routed_at <= asked_at - self._grace]
        return sorted(arrived, key=_routed_at)

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


def _routed_at(request: Request) -> float:
    return request.routed_at
