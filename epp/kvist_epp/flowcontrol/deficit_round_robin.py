"""One priority level of the queue: fair between tenants, by deficit round robin in tokens. Pure.

The algorithm is M. Shreedhar and G. Varghese's (SIGCOMM 1995): tenants are visited in turn, each visit grants
a quantum of tokens, and a tenant's oldest request is dispatched as soon as its grants cover it. Visits are
computed here, not made: the number of grants that the oldest request needs gives the round in which it is
dispatched, so a heap of rounds gives the next one. A prompt of 100,000 tokens costs no more than one of 10,
however small the quantum.

A tenant's requests that may be sent to different subsets of the pool are different flows, so that one whose
subset is full delays no other. So are requests that wait for one endpoint (``EndpointFlow``). Of these the
newest is dispatched first: they only wait when there is more than the endpoint can do in time, and served in
the order they came all would be too late (adaptive LIFO: B. Maurer, "Fail at Scale", ACM Queue 13/8, 2015).

Example: quantum 512; tenant a has prompts of 1,000 and 100 tokens queued, tenant b one of 600. The first
prompt of each needs 2 grants, so both stand in round 2 and a, which came first, is served. Its deficit is
then 2 x 512 - 1,000 = 24, so its prompt of 100 needs one more grant: round 3. b follows in round 2, then a.
"""

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import LIGHT_TOKENS, TpotAdmission


class EndpointFlow(NamedTuple):
    """Subset of the requests that wait for one endpoint."""

    endpoint: str
    """Key of the endpoint."""
    light: bool
    """True for requests with few uncached tokens, which larger requests do not hold back."""


Subset = frozenset[str] | EndpointFlow | None
"""``ip`` and ``ip:port`` in canonical text (``pick.canonical``), or one endpoint; None: any endpoint."""


class FlowKey(NamedTuple):
    """Names the flow in which a request waits."""

    subset: Subset = None
    uncached: int = 0
    """Uncached tokens on the endpoint it waits for, when it began to wait."""
    tpot: TpotAdmission | None = None
    """TPOT admission of that endpoint."""

    @classmethod
    def for_endpoint(cls, load: EndpointLoad, uncached: int) -> "FlowKey":
        """Return the key of a request that waits for this endpoint."""
        return cls(EndpointFlow(load.key, uncached <= LIGHT_TOKENS), uncached, load.tpot)


ANY_ENDPOINT: Final = FlowKey()

CanDispatch = Callable[[Subset, int], bool]
"""Return whether a request of this subset with this number of uncached tokens may be dispatched."""

QUANTUM: Final = 512
"""Tokens that a visit grants: less than most prompts have, so that tenants alternate request by request and
one is ahead of another by at most a request. A small quantum costs no time, because rounds are computed."""

_STALE: Final = 64
"""Outdated entries of a heap, beyond the number of flows, at which it is rebuilt."""


class QueueItem:
    """One request's place in the queue; a subclass adds its owner's data."""

    __slots__ = (
        "_after",
        "_before",
        "_flow",
        "arrival",
        "key",
        "number",
        "priority",
        "since",
        "size",
        "tenant",
        "tokens",
    )

    def __init__(self, priority: int, tenant: str, key: FlowKey, tokens: int, size: int) -> None:
        """``tokens``: what it costs its tenant. ``size``: bytes of memory it holds."""
        self.priority = priority
        self.tenant = tenant
        self.key = key
        self.tokens = max(tokens, 1)
        self.size = size
        self.since = 0.0
        """When it came, in seconds."""
        self.arrival = 0
        """Its number in order of arrival, from 1."""
        self.number = 0
        """The same while it is in the queue, else 0."""
        self._flow: Flow | None = None
        self._before: QueueItem | None = None
        self._after: QueueItem | None = None


class Flow:
    """Requests that one tenant has queued for one subset: a list through the items, oldest first."""

    __slots__ = ("deficit", "first", "last", "since", "subset", "tenant", "turn")

    def __init__(self, tenant: str, subset: Subset) -> None:
        self.tenant = tenant
        self.subset = subset
        self.first: QueueItem | None = None
        self.last: QueueItem | None = None
        self.deficit = 0
        """Tokens granted and not used; 0 while nothing is queued."""
        self.since = 0
        """Round of its last visit: grants count from there."""
        self.turn = 0
        """Its entry in the ring: orders those of one round."""

    @property
    def next(self) -> QueueItem | None:
        """The item to dispatch next: the oldest; of those bound to an endpoint the newest."""
        return self.last if isinstance(self.subset, EndpointFlow) else self.first

    def append(self, item: QueueItem) -> None:
        """Add an item at the end."""
        item._flow, item._before, item._after = self, self.last, None
        if self.last is None:
            self.first = item
        else:
            self.last._after = item
        self.last = item

    def unlink(self, item: QueueItem) -> None:
        """Remove an item from anywhere."""
        before, after = item._before, item._after
        if before is None:
            self.first = after
        else:
            before._after = after
        if after is None:
            self.last = before
        else:
            after._before = before
        item._flow = item._before = item._after = None


Entry = tuple[int, int, Flow]
"""Round, turn, flow; of no effect once the flow has another turn or is empty."""


class SubsetFlows:
    """The flows of one subset, by the round in which each may dispatch its next request."""

    __slots__ = ("entries", "flows")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.flows = 0

    def put(self, entry: Entry) -> None:
        """Set a flow's round; an earlier one counts no longer."""
        heappush(self.entries, entry)
        if len(self.entries) > 2 * self.flows + _STALE:
            self.entries = [entry for entry in self.entries if _counts(entry)]
            heapify(self.entries)

    def top(self) -> Entry:
        """Return the next flow's entry; there must be a flow."""
        while not _counts(self.entries[0]):
            heappop(self.entries)
        return self.entries[0]


class DeficitRoundRobin:
    """One level. Each method takes logarithmic time in the tenants, ``take`` also linear in the subsets."""

    __slots__ = ("_flows", "_quantum", "_round", "_subsets", "_turn")

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._flows: dict[tuple[str, Subset], Flow] = {}
        self._subsets: dict[Subset, SubsetFlows] = {}
        self._round = 0
        self._turn = 0

    @property
    def subsets(self) -> Collection[Subset]:
        """Subsets of the queued requests, each once."""
        return self._subsets.keys()

    @property
    def tenants(self) -> int:
        """Tenants with queued requests, counted once for each subset."""
        return len(self._flows)

    def add(self, item: QueueItem) -> None:
        """Add an item behind the others of its tenant; before them where all wait for one endpoint."""
        subset = item.key.subset
        flow = self._flows.get((item.tenant, subset))
        if flow is None:
            flow = self._flows[item.tenant, subset] = Flow(item.tenant, subset)
            flow.since = self._round
            self._subsets.setdefault(subset, SubsetFlows()).flows += 1
        flow.append(item)
        if flow.next is item:
            self._place(flow)

    def remove(self, item: QueueItem) -> None:
        """Remove an item, whatever its place."""
        flow = item._flow
        if flow is None:
            return
        was_next = flow.next is item
        flow.unlink(item)
        if flow.first is None:
            self._close(flow)
        elif was_next:
            self._place(flow)

    def take(self, can_dispatch: CanDispatch) -> QueueItem | None:
        """Take out the next item of those that can be dispatched; None when there is none."""
        tops = [top for flows in self._subsets.values() if _ready(top := flows.top(), can_dispatch)]
        if not tops:
            return None
        visit, _, flow = min(tops)
        self._round = max(self._round, visit)
        item = flow.next
        if item is None:
            return None
        flow.deficit += (visit - flow.since) * self._quantum - item.tokens
        flow.unlink(item)
        following = flow.next
        if following is None:
            self._close(flow)
        elif following.tokens <= flow.deficit:  # its visit goes on
            flow.since = visit
        else:
            flow.since = self._round
            self._place(flow)
        return item

    def _close(self, flow: Flow) -> None:
        del self._flows[flow.tenant, flow.subset]
        flows = self._subsets[flow.subset]
        flows.flows -= 1
        if not flows.flows:
            del self._subsets[flow.subset]

    def _place(self, flow: Flow) -> None:
        """Put it in the round in which its grants cover its next request."""
        assert flow.next is not None, "only a flow with requests has a place"
        self._turn += 1
        flow.turn = self._turn
        visits = max(0, -(-(flow.next.tokens - flow.deficit) // self._quantum))
        self._subsets[flow.subset].put((flow.since + visits, flow.turn, flow))


def _counts(entry: Entry) -> bool:
    return entry[1] == entry[2].turn and entry[2].first is not None


def _ready(entry: Entry, can_dispatch: CanDispatch) -> bool:
    flow = entry[2]
    return flow.next is not None and can_dispatch(flow.subset, flow.next.key.uncached)
