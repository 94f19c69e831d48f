"""Load between replicas: whatever is lost on the way, in the end all replicas agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.epp.replicas.virtual_replicas import EXPIRE, PODS, Replica, World

from kvist_epp.replicas.remote_load import FORGET_SECONDS, SILENCE_SECONDS

THREE = range(3)
picks = st.integers(0, 10)


class Replicas(RuleBasedStateMachine):
    """Three replicas that route, end requests, lose messages, are partitioned, die and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.routed: list[tuple[Replica, str]] = []

    def one(self, pick: int) -> Replica:
        """Return one of the live replicas."""
        return self.world.replicas[pick % len(self.world.replicas)]

    @rule(
        pick=picks,
        pod=st.sampled_from(PODS),
        tokens=st.integers(0, 5000),
        session=st.sampled_from(["", "", "", "client"]),
    )
    def route(self, pick: int, pod: str, tokens: int, session: str) -> None:
        """Route a request; some clients use one session id for all their requests, at all replicas."""
        replica = self.one(pick)
        self.routed.append((replica, replica.routed(pod, tokens, self.world.now, session)))

    @rule(pick=picks, at=picks)
    def end(self, pick: int, at: int) -> None:
        """Report the end of a request to any replica."""
        if self.routed:
            _, session = self.routed.pop(at % len(self.routed))
            self.one(pick).logged(session, self.world.now)

    @rule(pick=picks, at=picks)
    def compute(self, pick: int, at: int) -> None:
        """Show one of the replicas, by events, that the prompt of another one's request is computed."""
        remote_load = self.one(pick).remote_load
        attempts = [one for other in remote_load.replicas.values() for one in other.attempts.values()]
        if attempts:
            remote_load.forget_prompt(attempts[at % len(attempts)])

    @rule(ticks=st.integers(1, 60))
    def time(self, ticks: int) -> None:
        """Let time pass."""
        for _ in range(ticks):
            self.world.tick()

    @rule(pick=picks, update=st.booleans())
    def lose(self, pick: int, update: bool) -> None:
        """Lose a message between two replicas."""
        self.world.tick()
        connection = self.world.connections[pick % len(self.world.connections)]
        (connection.updates if update else connection.acknowledged).clear()

    @rule(pick=picks, other=picks)
    def part(self, pick: int, other: int) -> None:
        """Partition two replicas; their messages wait on the way."""
        self.world.cut.add(frozenset((self.one(pick).name, self.one(other).name)))

    @rule()
    def heal(self) -> None:
        """Remove all partitions."""
        self.world.cut.clear()

    @rule(pick=picks)
    def reconnect(self, pick: int) -> None:
        """Break a connection and open it again."""
        connection = self.world.connections[pick % len(self.world.connections)]
        self.world.connect(connection.follower, connection.followed)

    @rule(pick=picks, politely=st.booleans())
    def restart(self, pick: int, politely: bool) -> None:
        """Kill a replica, or let it leave; another one takes its place."""
        replica = self.one(pick)
        (self.world.leave if politely else self.world.die)(replica)
        self.world.join()

    @invariant()
    def loads_are_consistent(self) -> None:
        """The backlog of an endpoint is the sum of its requests, and no replica has its own requests as
        remote ones."""
        for replica in self.world.replicas:
            for pod in PODS:
                load = replica.tracker.load(pod)
                assert abs(load.backlog_tokens - sum(one.backlog for one in load.attempts)) < 1e-3
                assert all(one.request.origin != replica.name for one in load.attempts)
            assert len(replica.remote_load) == sum(
                1 for origin, *_ in replica.state() if origin != replica.name
            )

    def teardown(self) -> None:
        """Check that all replicas agree after a quiet time, and are empty when everything has expired.

        Requests that are about to expire are exempt: an update that was delayed on its way makes them
        younger.
        """
        self.world.calm(3 * SILENCE_SECONDS)
        present = {replica.name for replica in self.world.replicas}
        lasting = self.world.now - EXPIRE + 2 * SILENCE_SECONDS
        expiring = set[tuple[str, int, str, str]]()
        for replica in self.world.replicas:
            old = replica.state() - replica.state(lasting)
            expiring |= {row for row in old if row[0] == replica.name}
        states = [replica.state() - expiring for replica in self.world.replicas]
        of_the_living = [{row for row in state if row[0] in present} for state in states]
        assert of_the_living[0] == of_the_living[1] == of_the_living[2]
        for replica in self.world.replicas:
            own = {row for row in replica.state() if row[0] == replica.name}
            assert len(own) == len(replica.tracker.own())
        for _ in THREE:
            self.world.calm(max(EXPIRE, FORGET_SECONDS))
            for replica in self.world.replicas:
                replica.tracker.expire(self.world.now + replica.skew)
        self.world.calm(1.0)
        for replica in self.world.replicas:
            assert (replica.state(), len(replica.remote_load), len(list(replica.tracker.table))) == (
                set(),
                0,
                0,
            )
            assert (len(replica.remote_load.prefixes), replica.remote_load._digests) == (0, {})
            assert set(replica.remote_load.replicas) == present - {replica.name}


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_load_routed_by_one_is_seen_by_the_others_within_an_interval() -> None:
    """A request that one replica routes counts in all replicas, by its tokens and as a running request."""
    world = World(3)
    world.calm(0.2)
    world.replicas[0].routed("ns/a", 5000, world.now)
    world.tick()

    for replica in world.replicas:
        now = world.now + replica.skew
        assert replica.tracker.running("ns/a") == 1
        assert abs(replica.tracker.backlog("ns/a", now) - 4900) <= 1


def test_requests_of_a_silent_replica_are_untracked_until_it_is_back() -> None:
    """A partition loses the tokens of requests, not their number; after it nothing counts twice."""
    world = World(2)
    here, there = world.replicas
    world.calm(0.2)
    there.routed("ns/a", 50_000, world.now)
    world.tick()
    world.cut.add(frozenset((here.name, there.name)))
    for _ in range(40):
        world.tick()
    load = here.tracker.load("ns/a")
    parted = (len(here.remote_load), load.backlog_tokens, load.untracked_requests, load.running)
    here.tracker.reconcile("ns/a", 1, 0, world.now + here.skew)
    world.calm(0.5)

    assert parted == (0, 0.0, 1, 1)
    assert (len(here.remote_load), load.untracked_requests, load.running) == (1, 0, 1)
    assert load.backlog_tokens > 40_000


def test_a_request_that_a_scrape_counted_before_its_update_counts_once() -> None:
    """A request that is untracked by a scrape and then arrives in an update is one request."""
    world = World(2)
    here, there = world.replicas
    world.calm(0.2)
    there.routed("ns/a", 100, world.now)
    here.tracker.reconcile("ns/a", 1, 0, world.now + 0.05 + here.skew)
    before = here.tracker.running("ns/a")
    world.tick()

    assert (before, here.tracker.running("ns/a")) == (1, 1)


def test_an_access_log_entry_reaches_the_replica_that_routed_the_request() -> None:
    """Envoy's access log goes to one replica, whichever replica routed the request."""
    world = World(3)
    first, second, _ = world.replicas
    world.calm(0.2)
    own, chosen = first.routed("ns/a", 100, world.now), first.routed("ns/b", 100, world.now, "client")
    world.tick()
    second.logged(own, world.now)
    second.logged(chosen, world.now)
    second.logged("unknown", world.now)
    forwarded = [
        len(second.remote_load.outbox(replica.name)) for replica in world.replicas if replica is not second
    ]
    world.calm(0.3)

    assert forwarded == [3, 1]
    assert [replica.state() for replica in world.replicas] == [set(), set(), set()]


def test_a_second_log_entry_of_an_own_request_is_not_forwarded() -> None:
    """An entry of a request that has ended already goes to no other replica."""
    world = World(2)
    here, there = world.replicas
    session = here.routed("ns/a", 100, world.now)
    here.logged(session, world.now)
    here.logged(session, world.now)

    assert len(here.remote_load.outbox(there.name)) == 0


def test_requests_of_a_replica_that_left_stay_at_the_other_replicas() -> None:
    """An access-log entry at any replica ends them in all replicas."""
    world = World(3)
    gone, here, there = world.replicas
    session = gone.routed("ns/a", 100, world.now)
    gone.routed("ns/a", 200, world.now)
    world.leave(gone)
    world.calm(2 * SILENCE_SECONDS)
    kept = [replica.tracker.running("ns/a") for replica in (here, there)]
    here.logged(session, world.now)
    world.calm(0.3)

    assert (kept, [replica.tracker.running("ns/a") for replica in (here, there)]) == ([2, 2], [1, 1])
    assert here.remote_load.counts() == {"heard": 1, "silent": 0, "left": 1}


def test_scrapes_end_orphans_but_not_the_requests_of_a_live_replica() -> None:
    """If an engine has fewer requests, each replica ends its own, and all end those of a replica that has
    left."""
    world = World(3)
    gone, here, there = world.replicas
    for replica in world.replicas:
        replica.routed("ns/a", 100, world.now)
    world.leave(gone)
    world.calm(1.0)
    ended = [
        [request.session for request in here.tracker.reconcile("ns/a", 0, 0, world.now + here.skew)]
        for _ in range(2)
    ]
    kept = {origin for origin, *_ in here.state()}
    world.calm(1.0)

    assert (ended, kept) == ([[], [f"{here.name}.0"]], {there.name})
    assert {origin for origin, *_ in there.state()} == {gone.name, there.name}


def test_two_replicas_never_wait_for_each_other_to_end_a_request() -> None:
    """If two requests had their last event at the same moment, each replica takes its own as the one that
    ended."""
    world = World(2)
    for replica in world.replicas:
        replica.routed("ns/a", 100, world.now)
    world.calm(1.0)
    for replica in world.replicas:
        for _ in range(2):
            replica.tracker.reconcile("ns/a", 1, 0, world.now + replica.skew)
    world.calm(0.3)

    for replica in world.replicas:
        replica.tracker.reconcile("ns/a", 1, 0, world.now + replica.skew)
        assert replica.tracker.running("ns/a") == 1


def test_a_request_that_ended_during_a_break_ends_with_the_next_full_update() -> None:
    """No update reports the end, but the request is missing from the list of open ones."""
    world = World(2)
    here, there = world.replicas
    world.calm(0.2)
    ended, kept = (there.routed("ns/a", 100, world.now) for _ in range(2))
    world.calm(0.2)
    world.cut.add(frozenset((here.name, there.name)))
    there.routed("ns/a", 100, world.now)
    world.tick()
    there.logged(ended, world.now)
    world.tick()
    [connection] = [connection for connection in world.connections if connection.follower is here]
    world.connect(here, there)
    world.calm(0.3)

    assert connection.outgoing.in_flight
    assert here.state() == there.state()
    assert {session for _, _, session, _ in here.state()} >= {kept}
    assert here.tracker.running("ns/a") == 2
