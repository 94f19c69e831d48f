"""One priority level of the queue: fair between tenants, by deficit round robin in tokens. Pure.

The algorithm is M. Shreedhar and G. Varghese's (SIGCOMM 1995): tenants are visited in turn, each visit grants
a quantum of tokens, and a tenant's oldest request goes as soon as its grants cover it. Visits are counted
here, not made: how many grants the oldest request needs says in which round it goes, so a heap of rounds
gives the next one. A prompt of 100,000 tokens costs no more than one of 10, however small the quantum.

A tenant's requests that may go to different subsets of the pool are different flows, so that one whose subset
is full holds back nobody else. So are those that wait for one endpoint (``Bound``); of these the newest goes
first: they only wait when there is more than the endpoint can do in time, and served in the order they came
all would be late (adaptive LIFO: B. Maurer, "Fail at Scale", ACM Queue 13/8, 2015).
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from kvist_epp.load.endpoint_load import Load
from kvist_epp.load.tpot_admission import LIGHT_TOKENS, Pacing


class Bound(NamedTuple):
    """Whoever waits for one endpoint."""

    endpoint: str
    """Its key."""
    light: bool
    """With so few new tokens that they hardly count: what costs much does not hold them back."""


Subset = frozenset[str] | Bound | None
"""``ip`` and ``ip:port`` in canonical text (``pick.canonical``), or one endpoint; None: any endpoint."""


class Spot(NamedTuple):
    """Where a request waits."""

    subset: Subset = None
    need: int = 0
    """New tokens for the endpoint it is bound to, when it began to wait."""
    pacing: Pacing | None = None
    """That endpoint's."""

    @classmethod
    def bound(cls, load: Load, need: int) -> "Spot":
        """For this endpoint."""
        return cls(Bound(load.key, need <= LIGHT_TOKENS), need, load.pacing)


ANYWHERE: Final = Spot()

MayGo = Callable[[Subset, int], bool]
"""Whether a request of this subset with so many new tokens may go."""

QUANTUM: Final = 512
"""Tokens a visit grants: less than most prompts have, so that tenants alternate request by request, and
what one can be ahead of another is a request, not a quantum. Small costs nothing, as rounds are counted."""

_STALE: Final = 64
"""Entries of a heap that may be out of date before it is made anew, besides as many as there are flows."""


class Ticket:
    """One request's place in the queue; whoever queues it adds what it needs in a subclass."""

    __slots__ = (
        "_after",
        "_before",
        "_flow",
        "came",
        "number",
        "priority",
        "since",
        "size",
        "spot",
        "tenant",
        "tokens",
    )

    def __init__(self, priority: int, tenant: str, spot: Spot, tokens: int, size: int) -> None:
        """``tokens``: what it costs its tenant. ``size``: bytes of memory it holds."""
        self.priority = priority
        self.tenant = tenant
        self.spot = spot
        self.tokens = max(tokens, 1)
        self.size = size
        self.since = 0.0
        """When it came, in seconds."""
        self.came = 0
        """In order of arrival, from 1."""
        self.number = 0
        """The same while it is in the queue, else 0."""
        self._flow: Flow | None = None
        self._before: Ticket | None = None
        self._after: Ticket | None = None


class Flow:
    """What one tenant has waiting for one subset: a list through the tickets, oldest first."""

    __slots__ = ("deficit", "first", "last", "since", "subset", "tenant", "turn")

    def __init__(self, tenant: str, subset: Subset) -> None:
        self.tenant = tenant
        self.subset = subset
        self.first: Ticket | None = None
        self.last: Ticket | None = None
        self.deficit = 0
        """Tokens granted and not used; gone when nothing waits any more."""
        self.since = 0
        """The round of its last visit: grants count from there."""
        self.turn = 0
        """Its entry in the ring: which of those in one round comes first."""

    @property
    def next(self) -> Ticket | None:
        """Whose turn it is: the oldest; of those bound to an endpoint the newest."""
        return self.last if isinstance(self.subset, Bound) else self.first

    def link(self, ticket: Ticket) -> None:
        """At the end."""
        ticket._flow, ticket._before, ticket._after = self, self.last, None
        if self.last is None:
            self.first = ticket
        else:
            self.last._after = ticket
        self.last = ticket

    def unlink(self, ticket: Ticket) -> None:
        """From anywhere."""
        before, after = ticket._before, ticket._after
        if before is None:
            self.first = after
        else:
            before._after = after
        if after is None:
            self.last = before
        else:
            after._before = before
        ticket._flow = ticket._before = ticket._after = None


Entry = tuple[int, int, Flow]
"""Round, turn, flow; of no effect once the flow has another turn or is empty."""


class Ring:
    """The flows of one subset, by the round in which each may send its oldest request."""

    __slots__ = ("entries", "flows")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.flows = 0

    def put(self, entry: Entry) -> None:
        """A flow has a round, and no other."""
        heappush(self.entries, entry)
        if len(self.entries) > 2 * self.flows + _STALE:
            self.entries = [entry for entry in self.entries if _counts(entry)]
            heapify(self.entries)

    def top(self) -> Entry:
        """The next flow's entry; there must be a flow."""
        while not _counts(self.entries[0]):
            heappop(self.entries)
        return self.entries[0]


class Rounds:
    """One level. Each verb takes logarithmic time in the tenants, ``take`` also linear in the subsets."""

    __slots__ = ("_flows", "_quantum", "_rings", "_round", "_turn")

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._flows: dict[tuple[str, Subset], Flow] = {}
        self._rings: dict[Subset, Ring] = {}
        self._round = 0
        self._turn = 0

    @property
    def tenants(self) -> int:
        """Tenants that wait, once for each subset."""
        return len(self._flows)

    def add(self, ticket: Ticket) -> None:
        """Behind the others of its tenant; before them where all are bound to one endpoint."""
        flow = self._flows.get((ticket.tenant, ticket.spot.subset))
        if flow is None:
            flow = self._open(ticket.tenant, ticket.spot.subset)
        flow.link(ticket)
        if flow.next is ticket:
            self._place(flow)

    def remove(self, ticket: Ticket) -> None:
        """It gives up, whatever its place."""
        flow = ticket._flow
        if flow is None:
            return
        was_next = flow.next is ticket
        flow.unlink(ticket)
        if flow.first is None:
            self._close(flow)
        elif was_next:
            self._place(flow)

    def take(self, may_go: MayGo) -> Ticket | None:
        """The next one of those who may go; None when there is none."""
        tops = [top for ring in self._rings.values() if _goes(top := ring.top(), may_go)]
        if not tops:
            return None
        visit, _, flow = min(tops)
        self._round = max(self._round, visit)
        return self._serve(flow, visit)

    def _serve(self, flow: Flow, visit: int) -> Ticket | None:
        ticket = flow.next
        if ticket is None:
            return None
        flow.deficit += (visit - flow.since) * self._quantum - ticket.tokens
        flow.unlink(ticket)
        following = flow.next
        if following is None:
            self._close(flow)
        elif following.tokens <= flow.deficit:  # its visit goes on
            flow.since = visit
        else:
            flow.since = self._round
            self._place(flow)
        return ticket

    def _open(self, tenant: str, subset: Subset) -> Flow:
        flow = self._flows[tenant, subset] = Flow(tenant, subset)
        flow.since = self._round
        self._rings.setdefault(subset, Ring()).flows += 1
        return flow

    def _close(self, flow: Flow) -> None:
        del self._flows[flow.tenant, flow.subset]
        ring = self._rings[flow.subset]
        ring.flows -= 1
        if not ring.flows:
            del self._rings[flow.subset]

    def _place(self, flow: Flow) -> None:
        """In the round in which its grants cover its next request."""
        assert flow.next is not None, "only a flow with requests has a place"
        self._turn += 1
        flow.turn = self._turn
        visits = max(0, -(-(flow.next.tokens - flow.deficit) // self._quantum))
        self._rings[flow.subset].put((flow.since + visits, flow.turn, flow))


def _counts(entry: Entry) -> bool:
    return entry[1] == entry[2].turn and entry[2].first is not None


def _goes(entry: Entry, may_go: MayGo) -> bool:
    flow = entry[2]
    return flow.next is not None and may_go(flow.subset, flow.next.spot.need)
