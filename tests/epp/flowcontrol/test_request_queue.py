"""The request queue, against a naive implementation and by examples."""

import tracemalloc
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.flowcontrol.oracles import QUANTUM, Plain, Want

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.flowcontrol.deficit_round_robin import EndpointFlow, FlowKey, QueueItem, Subset
from kvist_epp.flowcontrol.queue_deadlines import QueueDeadlines
from kvist_epp.flowcontrol.request_queue import RequestQueue

A: Subset = frozenset({"10.0.0.1"})
B: Subset = frozenset({"10.0.0.2"})
ENDPOINT = Endpoint(name="a", namespace="", address="10.0.0.1", port=8000)
"""The endpoint of subset A."""
POD: Subset = EndpointFlow("pod", light=False)


class Named(QueueItem):
    """A queue item with the name of its counterpart in the naive queue."""

    __slots__ = ("name",)

    def __init__(
        self,
        name: int,
        priority: int = 0,
        tenant: str = "",
        subset: Subset = None,
        tokens: int = 1,
        size: int = 1,
    ) -> None:
        super().__init__(priority, tenant, FlowKey(subset), tokens, size)
        self.name = name


def anybody(_: Subset, _need: int = 0) -> bool:
    """Every subset has room."""
    return True


def name(ticket: QueueItem | None) -> int | None:
    """Return the name of an item."""
    assert ticket is None or isinstance(ticket, Named)
    return ticket.name if ticket else None


def names(tickets: list[QueueItem] | None) -> list[int | None] | None:
    """Return the names of items."""
    return None if tickets is None else [name(ticket) for ticket in tickets]


class Twins:
    """Both queues, with the same operations applied."""

    def __init__(self, dice: Random) -> None:
        self.quick = RequestQueue(9, 60, quantum=QUANTUM)
        self.plain = Plain(9, 60)
        self.here: dict[int, tuple[Named, Want]] = {}
        self.dice = dice
        self.arrival = 0

    def come(self) -> None:
        """Add a request with random properties to both queues."""
        dice = self.dice
        self.arrival += 1
        who = (
            dice.choice((0, 0, 0, 1, -1, -2)),
            dice.choice("aabc"),
            dice.choice((None, None, A, B, POD, POD)),
        )
        cost = (dice.choice((1, 8, 9, 16, 40)), dice.randrange(12))
        ticket, want = Named(self.arrival, *who, *cost), Want(self.arrival, *who, *cost)
        displaced = names(self.quick.offer(ticket))
        assert displaced == self.plain.offer(want)
        for gone in displaced or ():
            assert gone is not None
            del self.here[gone]
        if displaced is not None:
            self.here[self.arrival] = ticket, want

    def go(self) -> bool:
        """Dispatch a request from random subsets."""
        able = self.dice.choice(((None, A, B, POD), (None, A, B, POD), (None, A), (A, POD), (B,)))
        gone = name(self.quick.take(lambda subset, _need: subset in able))
        assert gone == self.plain.take(lambda subset: subset in able)
        if gone is None:
            return False
        ticket, want = self.here.pop(gone)
        if self.dice.random() < 0.2:
            self.quick.requeue(ticket, FlowKey(B))
            want.subset = B
            self.plain.requeue(want)
            self.here = dict(sorted([*self.here.items(), (gone, (ticket, want))]))
        return True

    def give_up(self) -> None:
        """Remove a random request."""
        if self.here:
            ticket, want = self.here.pop(self.dice.choice(list(self.here)))
            assert self.quick.remove(ticket)
            assert not self.quick.remove(ticket)
            self.plain.remove(want)

    def check(self) -> None:
        """Check that both queues hold the same requests, and all counts."""
        waiting, quick = self.plain.waiting, self.quick
        assert names(list(quick)) == [want.name for want in waiting] == list(self.here)
        assert name(quick.oldest()) == (waiting[0].name if waiting else None)
        assert quick.requests == len(waiting) <= 9
        assert quick.size == sum(want.size for want in waiting) <= 60
        assert quick.tokens == sum(want.tokens for want in waiting)
        by_level = Counter(want.priority for want in waiting)
        assert {priority: level.requests for priority, level in quick.levels.items()} == by_level
        for priority in range(-3, 4):
            above = [w.subset for w in waiting if w.priority >= priority]
            assert quick.has_unrestricted(priority) == (None in above)
            assert quick.has_restricted_to(ENDPOINT, priority) == any(
                isinstance(subset, frozenset) and ENDPOINT.address in subset for subset in above
            )
        assert quick.count_from(0) == sum(count for priority, count in by_level.items() if priority >= 0)


@given(st.integers(0, 2**32))
@settings(max_examples=150)
def test_the_queue_equals_the_naive_queue(seed: int) -> None:
    """Whatever is added, dispatched and removed, the order is the same, no request is lost or duplicated, and
    no bound is exceeded."""
    twins = Twins(Random(seed))
    for _ in range(60):
        twins.dice.choice((twins.come, twins.come, twins.come, twins.go, twins.give_up))()
        twins.check()
    while twins.here:
        twins.go()
    twins.check()


@given(
    st.lists(
        st.lists(st.integers(1, 3000), min_size=60, max_size=80),  # tokens of each tenant's requests
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=30)
def test_tenants_with_a_backlog_get_equal_shares_of_tokens(backlogs: list[list[int]]) -> None:
    """While all of them wait, no tenant is ahead of another by more than its largest requests and two
    quanta."""
    waiting, served = RequestQueue(10**6, 10**9), Counter[str]()
    for tenant, sizes in enumerate(backlogs):
        for tokens in sizes:
            assert waiting.offer(Named(0, tenant=f"t{tenant}", tokens=tokens)) == []
    left = Counter({f"t{n}": len(sizes) for n, sizes in enumerate(backlogs)})
    slack = 2 * 512 + 2 * max(max(sizes) for sizes in backlogs)
    while min(left.values()) > 0:
        ticket = waiting.take(anybody)
        assert ticket is not None
        served[ticket.tenant] += ticket.tokens
        left[ticket.tenant] -= 1
        shares = [served[tenant] for tenant in left]
        assert max(shares) - min(shares) <= slack


def test_a_flood_of_one_tenant_costs_the_others_nothing() -> None:
    """With 1,000 requests of one tenant and 100 each of four others, the first 400 taken are 80 of each."""
    waiting = RequestQueue(10**6, 10**9)
    for tenant, count in (("flood", 1000), ("a", 100), ("b", 100), ("c", 100), ("d", 100)):
        for _ in range(count):
            waiting.offer(Named(0, tenant=tenant, tokens=600))
    served = Counter(ticket.tenant for _ in range(400) if (ticket := waiting.take(anybody)))

    assert served == dict.fromkeys(("flood", "a", "b", "c", "d"), 80)


def test_a_new_tenant_is_served_within_a_round() -> None:
    """A tenant without waiting requests does not queue behind another tenant's backlog."""
    waiting = RequestQueue(10**6, 10**9)
    for number in range(1000):
        waiting.offer(Named(number, tenant="flood", tokens=5000))
    for _ in range(10):
        waiting.take(anybody)
    waiting.offer(Named(-1, tenant="late", tokens=400))

    assert -1 in [name(waiting.take(anybody)) for _ in range(2)]


def test_a_tenant_that_comes_again_and_again_gets_no_more_than_its_share() -> None:
    """Emptying one's queue between requests is no way around the others' turns."""
    waiting = RequestQueue(10**6, 10**9)
    for _ in range(200):
        waiting.offer(Named(0, tenant="steady", tokens=500))
    served = Counter[str]()
    waiting.offer(Named(0, tenant="hopping", tokens=500))
    for _ in range(100):
        ticket = waiting.take(anybody)
        assert ticket is not None
        served[ticket.tenant] += 1
        if ticket.tenant == "hopping":
            waiting.offer(Named(0, tenant="hopping", tokens=500))

    assert abs(served["hopping"] - served["steady"]) <= 2


def test_higher_levels_go_first() -> None:
    """No request is dispatched while one of a higher priority could be."""
    waiting = RequestQueue(100, 10**6)
    for number in range(40):
        waiting.offer(Named(number, priority=(number * 7) % 5 - 2, tenant=str(number % 3)))
    order = [ticket.priority for _ in range(40) if (ticket := waiting.take(anybody))]

    assert order == sorted(order, reverse=True)
    assert (len(order), waiting.requests, waiting.size, waiting.tokens) == (40, 0, 0, 0)


def test_a_full_subset_delays_no_other_request() -> None:
    """Neither in its own level, nor of the same tenant, nor below."""
    waiting = RequestQueue(100, 10**6)
    for number, (priority, subset) in enumerate([(1, A), (1, A), (1, B), (0, None), (1, A)]):
        waiting.offer(Named(number, priority, subset=subset))

    assert [name(waiting.take(lambda s, _need: s != A)) for _ in range(3)] == [2, 3, None]
    assert [name(waiting.take(anybody)) for _ in range(3)] == [0, 1, 4]


@pytest.mark.parametrize(
    ("newcomer", "displaced"),
    [
        (Named(9, priority=0), [3]),
        (Named(9, priority=-1), [3]),
        (Named(9, priority=-2), None),
        (Named(9, priority=-3), None),
        (Named(9, priority=5, size=9), None),
    ],
)
def test_the_newest_of_the_lowest_sheddable_level_gives_way(
    newcomer: Named, displaced: list[int] | None
) -> None:
    """A full queue takes only whom it can make room for, from negative levels below its own."""
    waiting = RequestQueue(4, 8)
    for number, priority in enumerate([-1, -2, 0, -2]):
        waiting.offer(Named(number, priority, size=2))

    assert names(waiting.offer(newcomer)) == displaced
    assert (newcomer.number > 0) is (displaced is not None)


def test_a_large_request_displaces_several_small_ones() -> None:
    """A request displaces as many sheddable ones as its bytes need, and none if they do not suffice."""
    waiting = RequestQueue(100, 10)
    for number in range(10):
        waiting.offer(Named(number, priority=-1 if number < 4 else 0))

    assert names(waiting.offer(Named(10, size=5))) is None
    assert waiting.requests == 10
    assert names(waiting.offer(Named(11, size=4))) == [3, 2, 1, 0]


def test_thousands_of_tenants_are_cheap() -> None:
    """20,000 requests of as many tenants hold less than 1 KB each in the queue, and nothing later."""
    tracemalloc.start()
    try:
        waiting = RequestQueue(10**6, 10**9)
        before = tracemalloc.get_traced_memory()[0]
        tickets = [Named(n, tenant=f"tenant-{n}", tokens=1 + n % 700) for n in range(20_000)]
        for ticket in tickets:
            waiting.offer(ticket)
        held = (tracemalloc.get_traced_memory()[0] - before) / 20_000
        for ticket in tickets[:16_000:2]:
            waiting.remove(ticket)
        while waiting.take(anybody):
            pass
        del tickets, ticket
        after = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert held < 1000
    assert after < 3_000_000  # the tables of emptied dictionaries, until they next grow
    assert (waiting.requests, waiting.levels) == (0, {})


steps = st.lists(st.tuples(st.sampled_from(["come", "wait", "empty", "back"]), st.floats(0, 50)), max_size=30)


@given(steps)
def test_queue_deadlines_count_each_state_of_the_pool_separately(steps: list[tuple[str, float]]) -> None:
    """Time for capacity and time in an empty pool count separately, whatever the pool does meanwhile; the
    oldest requests expire first."""
    now, empty = 5.0, False
    patience = QueueDeadlines(60.0, 180.0, now)
    came: list[tuple[tuple[float, float], dict[bool, float]]] = []
    for what, seconds in steps:
        now += seconds
        for _, waited in came:
            waited[empty] += seconds
        if what == "come":
            came.append((patience.stamp(now), {True: 0.0, False: 0.0}))
        elif what != "wait":
            empty = what == "empty"
            patience.observe(now, pool_empty=empty)
    limit = 180.0 if empty else 60.0
    left = [patience.seconds_left(stamp, now) for stamp, _ in came]

    assert left == pytest.approx([limit - waited[empty] for _, waited in came])
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(left))
    assert patience.pool_empty is empty
