"""One pod's account: its requests, and the prompt tokens it still owes. Pure.

A pod whose KV events tell how prompts advance is believed: what it owes falls when it says so. Time alone
drains the others' accounts at the prefill rate, and that runs ahead of every busy engine: decoding, steps
that begin late and prompts that wait for blocks are not in the rate. Estimates that ran ahead saw no queue on
any pod (``docs/decisions/0014``).
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Final

from kvist_epp.load.prefill_rate import Pace
from kvist_epp.load.tpot_admission import LIGHT_TOKENS, Pacing

DEFAULT_RATE: Final = 15_928.0
"""Prefill tokens/s until a pod's own is learned: Qwen3-32B on one H100 (``kvist sim``'s default timing)."""
STEP_TOKENS: Final = 8_192
"""The most that engines usually compute in a step (vLLM's ``--max-num-batched-tokens`` on large GPUs)."""
QUIET_SECONDS: Final = 1.0
"""Events that are later than a step and this are not coming."""
REMAINDER: Final = 256
"""Less than a block of most engines: events tell of full blocks, so nothing may be told of so few tokens."""
OVERTAKEN_SECONDS: Final = 0.15
"""Between two requests whose order at the engine is sure, though other pickers' are heard of late (0.1 s)."""


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
    content: Hashable = None
    """Equal for equal prompts, where several replicas route; None: not known, or little of it is new."""

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
    told_at: float = -inf
    """When events last told of work on it, or the first of its present queue came; infinitely long ago: they
    never did."""
    carriers: dict[Hashable, Request] = field(default_factory=dict)
    """By content, the one of equal prompts that owes their tokens."""
    pace: Pace = field(default_factory=Pace)
    pacing: Pacing | None = None
    """What prefill it may take up; None: any."""

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

    def opens(self, tokens: int, now: float) -> bool:
        """Whether it may take up one of those who wait for it now, with so many new tokens, as of the last
        ``drain``."""
        return self.pacing is None or self.pacing.open(self, tokens, now)

    def wanted(self, tokens: int, now: float) -> None:
        """A newcomer with so many new tokens came for it, and may have to wait."""
        if self.pacing is not None and tokens > LIGHT_TOKENS:
            self.pacing.turn.wanted(now)

    def relieved_in(self, max_owed_seconds: float) -> float:
        """Seconds until it owes no more than that if nothing ends or arrives; infinite where its batch or
        its cache is full."""
        if self._runs(self.slots) or self._runs(self.crowd):
            return inf
        return max(0.0, self.owed / self.rate - max_owed_seconds)

    def drain(self, now: float) -> float:
        """Let the time since the last call prefill at ``rate``, as far as events should have told of it and
        did not; returns the tokens still owed."""
        told_until = self.told_at + QUIET_SECONDS + STEP_TOKENS / self.rate
        budget = (now - max(self.at, told_until)) * self.rate
        self.at = max(self.at, now)
        if budget <= 0:
            return self.owed
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

    def tell(self, request: Request, tokens: float, now: float, computed: float) -> None:
        """Events say that so many of its tokens are left, and so many more computed. Engines compute in the
        order of arrival, so what came before it and was not told of has been computed, too: less than a
        block, or a prompt that came for another one's prefix and found it cached."""
        self.drain(now)
        self.set_remaining(request, tokens)
        for head in self._overtaken(request):
            self.set_remaining(head, 0.0)
        carrier = self.carriers.get(request.content, request)
        if carrier is not request:
            self.set_remaining(carrier, min(carrier.remaining, tokens))
        self.pace.advanced(computed, self.owed, request.routed_at, now)
        if self.pacing is not None:
            self.pacing.computes(computed)
        self.told_at = request.heard_at = now
        request.progressed = True

    def _overtaken(self, by: Request) -> list[Request]:
        before = takewhile(lambda head: head.routed_at < by.routed_at, self.queue)
        early = by.routed_at - OVERTAKEN_SECONDS
        return [
            head
            for head in before
            if not head.progressed and (head.remaining <= REMAINDER or head.routed_at < early)
        ]

    def add(self, request: Request) -> None:
        """A request was routed here; it owes all of its tokens unless ``remaining`` is set."""
        self.requests[request] = None
        if self._is_carried(request):
            request.uncached = request.remaining = 0.0
        if self.pacing is not None:
            self.pacing.takes(request.remaining, self.rate, request.routed_at, request.origin)
        if request.remaining > 0:
            if not self.queue and self.told_at > -inf:
                self.told_at = max(self.told_at, request.routed_at)
            self.queue[request] = None
            self.owed += request.remaining

    def describe(self, request: Request, content: Hashable) -> None:
        """What its prompt is. Several replicas may send one here at the same moment: the engine computes it
        once and finds it in its cache for the others, of which no event tells. So one of them owes it."""
        request.content = content
        if self._is_carried(request):
            self.set_remaining(request, 0.0)
            request.uncached = 0.0

    def _is_carried(self, request: Request) -> bool:
        """Whether another one owes its tokens; if not, it does from now on, for all that are equal."""
        content = request.content
        return content is not None and self.carriers.setdefault(content, request) is not request

    def drop(self, request: Request) -> None:
        """A request has ended."""
        left = request.remaining
        self.set_remaining(request, 0.0)
        del self.requests[request]
        if self.carriers.get(request.content) is request:
            self._bequeath(request, left)
        if self.pacing is not None:
            self.pacing.returns(request.uncached)
        if self.missing:
            self.missing -= 1

    def _bequeath(self, carrier: Request, tokens: float) -> None:
        """Who owed for equal prompts has ended; what was not computed for it will be for the next of them."""
        content = carrier.content
        del self.carriers[content]
        heir = next((one for one in self.requests if one.content == content), None) if tokens else None
        if heir is not None:
            self.carriers[content] = heir
            heir.uncached = tokens
            self.set_remaining(heir, tokens)

    def still_waiting(self, newest: list[Request]) -> None:
        """The engine has not begun these: they owe all of their tokens, whatever time has drained."""
        for request in reversed(newest):
            if not request.progressed and request.remaining < request.uncached:
                self.set_remaining(request, request.uncached)
        self.queue = OrderedDict.fromkeys(sorted(self.queue, key=routed_at))


def routed_at(request: Request) -> float:
    """For sorting."""
    return request.routed_at
