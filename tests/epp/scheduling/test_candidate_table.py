"""The table of candidates picks what the loop over objects picks, whatever has happened to the loads."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.errors import NoEndpoints
from kvist_epp.load.in_flight import DecodePlace, InFlightRequest, Leg
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.scheduling.candidate_table import CandidateTable
from kvist_epp.scheduling.cost import Match, Policy
from kvist_epp.scheduling.leg_table import LegTable
from kvist_epp.scheduling.load_columns import FEW
from kvist_epp.scheduling.pick import Candidate, Demand, ScoredEndpoint, canonical, choose, explain, named
from kvist_epp.scheduling.pick_record import KEPT, PickRecord
from kvist_epp.scheduling.split_decision import SplitDecision, weigh

MANY = FEW * 7 // 6 + 2
"""Endpoints of which more than ``FEW`` are ready."""
HELD = st.tuples(st.integers(0, 40), st.sampled_from([0, 16, 512, 4096]), st.sampled_from(["", "CPU", "X"]))
EVENTS = st.tuples(
    st.integers(0, 40),
    st.sampled_from(
        [
            "send",
            "send",
            "end",
            "progress",
            "scrape",
            "calibrate",
            "remote",
            "silent",
            "tiers",
            "load",
            "keep",
            "release",
            "receive",
            "queue",
            "leave",
            "metrics",
            "pause",
        ]
    ),
    st.integers(0, 5000),
)


class World:
    """Endpoints whose loads change, and the two ways to pick."""

    def __init__(self, count: int, tpot: float = 0.0) -> None:
        self.tracker = LoadTracker(tpot_seconds=tpot, default_rate=1000.0)
        self.now, self.generated = 10.0, 0
        self.candidates = []
        for number in range(count):
            endpoint = Endpoint(f"p{number}", "ns", f"10.0.0.{number}", 8000)
            self.candidates.append(
                Candidate(endpoint, self.tracker.load(endpoint.key), ready=number % 7 != 6)
            )
        self.table = CandidateTable(self.candidates, self.tracker.changed, record=True)
        self.recorded: list[tuple[PickRecord, dict[str, ScoredEndpoint], tuple[str, ...]]] = []
        """Records of picks, with what the loop over objects showed at that moment, and the answer."""

    def happen(self, number: int, what: str, tokens: int) -> None:
        """One event on one endpoint."""
        self.now += tokens / 50_000
        key = self.candidates[number % len(self.candidates)].endpoint.key
        load, tracker, now = self.tracker.load(key), self.tracker, self.now
        some = next(iter(load.attempts), None)
        if what == "send":
            tracker.add(InFlightRequest(str(tokens), tokens), key, tokens, now)
        elif what == "end" and some:
            tracker.end(some.request, now)
        elif what == "progress" and some:
            tracker.on_progress(some, tokens // 2, now, computed=tokens / 2)
        elif what == "scrape":
            tracker.reconcile(key, tokens % 5, tokens % 3, now)
        elif what == "calibrate":
            slots, full_at = tokens % 6 or None, tokens % 4 or None
            tracker.calibrate(
                key,
                rate=500.0 + tokens,
                slots=slots,
                kv_full_at=full_at,
                decode_seconds=tokens / 1000,
                transfer_rate=900.0 + tokens if tokens % 3 else None,
            )
        elif what == "tiers":
            rates = {"CPU": 1.0 + tokens} if tokens % 2 else {}
            skipped = frozenset(({"CPU"}, {"X"}, {"CPU", "X"}, ())[tokens % 4])
            tracker.calibrate_tiers(key, rates, skipped=skipped, limited=tokens % 3 == 0)
        elif what == "load":
            load.occupy(("CPU", "X")[tokens % 2], tokens / 5000, now)
        elif what == "silent" and some:
            tracker.end_remote(some, now, untracked=True)
        else:
            self.schedule(number, what, tokens)

    def schedule(self, number: int, what: str, tokens: int) -> None:
        """One event that changes what an endpoint may take up, or time that passes."""
        key = self.candidates[number % len(self.candidates)].endpoint.key
        load, tracker, now = self.tracker.load(key), self.tracker, self.now
        if what == "pause":
            self.now += tokens / 1000
        elif what == "keep":
            load.keep_place(tokens % 9, tokens)
        elif what == "release":
            load.release_place(tokens % 9)
        elif what == "receive":
            request = InFlightRequest(str(tokens), tokens)
            tracker.add(request, self.candidates[0].endpoint.key, tokens, now, leg=Leg.PREFILL)
            tracker.begin_decode(request, DecodePlace(key, "", tokens, 0, None), 0, now, leg=Leg.DECODE)
        elif what == "queue" and load.tpot is not None:
            load.tpot.add_queued(tokens % 9, tokens, now - tokens / 2000)
        elif what == "leave" and load.tpot is not None:
            load.tpot.remove_queued(tokens % 9)
        elif what == "metrics":
            self.generated += tokens
            usage, waiting = tokens % 11 / 10, tokens % 2
            blocks = tokens % 3 * 100 or None
            sample = EngineSample(
                running=tokens % 60,
                waiting=waiting,
                cache_usage=usage,
                block_size=16,
                blocks=blocks,
                generation_tokens=self.generated,
            )
            tracker.on_scrape(key, sample, now)

    def both(self, demand: Demand, subset: tuple[str, ...] | None, **given: Any) -> None:
        """Compare the pick of the table with that of the loop."""
        picked = self.table.choose(demand, subset, now=self.now, **given)
        rows = choose(self.candidates, demand, subset, now=self.now, **given)
        assert picked.best.cost_seconds == pytest.approx(rows[0].cost_seconds, rel=1e-9, abs=1e-9)
        assert picked.hostports == tuple(row.endpoint.hostport for row in rows)
        assert (picked.best.full, picked.best.deferred) == (rows[0].full, rows[0].deferred)
        assert picked.best.predicted_ttft_seconds == pytest.approx(rows[0].predicted_ttft_seconds, abs=1e-9)
        assert picked.best.seconds == pytest.approx(rows[0].seconds, rel=1e-9, abs=1e-9)
        shown = ("endpoint", "matched_tokens", "uncached_tokens", "backlog_tokens", "running", "loads")
        assert [getattr(picked.best, name) for name in shown] == [getattr(rows[0], name) for name in shown]
        given.pop("limit")
        explained = explain(self.candidates, demand, subset, now=self.now, **given)
        assert picked.record is not None
        self.recorded.append((picked.record, {row.endpoint.key: row for row in explained}, picked.hostports))

    def check_legs(self, demand: Demand, subset: tuple[str, ...] | None, resting: frozenset[str]) -> None:
        """Compare the two legs that the table finds with those found by looking at each endpoint."""
        able = [
            one
            for one in self.candidates
            if one.endpoint.key not in resting and (subset is None or named(canonical(subset), one.endpoint))
        ]
        best = choose(self.candidates, demand, now=self.now)[0]
        found = weigh(self.table.legs().among(subset, resting), demand, best, now=self.now)
        expected = weigh(LegTable(able, len(able)), demand, best, now=self.now)
        assert type(found) is type(expected)
        if isinstance(found, SplitDecision) and isinstance(expected, SplitDecision):
            assert found.split_seconds == pytest.approx(expected.split_seconds)
            assert found.whole_seconds == pytest.approx(expected.whole_seconds)
            assert found.chosen == expected.chosen

    def check_records(self) -> None:
        """Compare the terms computed from each record now with those of its moment."""
        for record, explained, hostports in self.recorded:
            rows = record.rows()
            assert tuple(row.endpoint.hostport for row in rows[: len(hostports)]) == hostports
            eligible = [row for row in explained.values() if not row.refusal]
            assert len(record.pool.endpoints) == len(eligible)
            assert record.pool.other_count == len(explained) - len(eligible)
            assert {e.key: why for e, why in record.pool.others}.items() <= {
                key: row.refusal for key, row in explained.items()
            }.items()
            if len(eligible) <= FEW:
                assert len(rows) == len(eligible)
            else:
                least = sorted(row.cost_seconds for row in eligible)[KEPT - 1]
                assert {row.endpoint.key for row in rows} >= {
                    row.endpoint.key for row in eligible if row.cost_seconds < least - 1e-9
                }
            for row in rows:
                then = explained[row.endpoint.key]
                assert row.seconds == pytest.approx(then.seconds, rel=1e-9, abs=1e-9)
                assert row.predicted_ttft_seconds == pytest.approx(then.predicted_ttft_seconds, abs=1e-9)
                assert abs(row.backlog_tokens - then.backlog_tokens) <= 1  # rounded at a half
                same = ("endpoint", "matched_tokens", "matched_bytes", "uncached_tokens", "running", "loads")
                assert [getattr(row, name) for name in same] == [getattr(then, name) for name in same]
                assert (row.full, row.deferred, row.refusal) == (then.full, then.deferred, "")


@settings(max_examples=300)
@given(
    count=st.integers(1, 10) | st.integers(MANY - 9, 70),
    events=st.lists(EVENTS, max_size=40),
    held=st.lists(HELD, max_size=20),
    tokens=st.sampled_from([0, 1, 100, 5000]),
    uses=st.sampled_from([0.0, 0.5, 7.0]),
    turn=st.integers(0, 200),
    limit=st.integers(1, 4),
    max_backlog=st.sampled_from([0.0, 0.7, 5.0, float("inf")]),
    near=st.sampled_from([0.001, 0.05]),
    subset=st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=9) | st.just(range(1, 63)),
    tpot=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
)
def test_the_table_picks_what_the_loop_picks(
    count: int,
    events: list[tuple[int, str, int]],
    held: list[tuple[int, int, str]],
    tokens: int,
    uses: float,
    turn: int,
    limit: int,
    max_backlog: float,
    near: float,
    subset: Sequence[int] | None,
    tpot: float,
) -> None:
    """Same endpoints in the same order, same terms of the cost; few endpoints and many, picks in between.
    The records of all picks show at the end what ``explain`` showed at the moment of each."""
    given_to_picks = {"limit": limit, "max_backlog": max_backlog, "policy": Policy(near_seconds=near)}
    compare(World(count, tpot), events, held, tokens, uses, turn, subset, given_to_picks)


@settings(max_examples=300)
@given(
    count=st.integers(MANY, 70),
    events=st.lists(EVENTS, min_size=20, max_size=80),
    held=st.lists(HELD, max_size=30),
    tokens=st.sampled_from([0, 1, 100, 300, 1000, 5000]),
    uses=st.sampled_from([0.0, 7.0]),
    turn=st.integers(0, 200),
    limit=st.integers(1, 4),
    max_backlog=st.sampled_from([0.0, 0.7, float("inf")]),
    tpot=st.sampled_from([0.001, 0.05, 1.0]),
)
def test_many_endpoints_with_schedules_are_picked_as_by_the_loop(
    count: int,
    events: list[tuple[int, str, int]],
    held: list[tuple[int, int, str]],
    tokens: int,
    uses: float,
    turn: int,
    limit: int,
    max_backlog: float,
    tpot: float,
) -> None:
    """Under a TPOT target, endpoints that are tight, defer prompts or have no room are weighed as one by
    one. All events come to ten of them, so that these have schedules of their own."""
    world = World(count, tpot)
    few = [(number % 10, what, size) for number, what, size in events]
    compare(world, few, held, tokens, uses, turn, None, {"limit": limit, "max_backlog": max_backlog})


def compare(
    world: World,
    events: list[tuple[int, str, int]],
    held: list[tuple[int, int, str]],
    tokens: int,
    uses: float,
    turn: int,
    subset: Sequence[int] | None,
    given_to_picks: dict[str, Any],
) -> None:
    """Let these events happen, and compare a pick after each five of them, then all records."""
    count = len(world.candidates)
    hits = {
        f"ns/p{number % count}": Match(
            min(size, tokens), 4 * size, {medium: size // 2} if medium and size else {}
        )
        for number, size, medium in held
    }
    names = None if subset is None else tuple(f"10.0.0.{number}" for number in subset)
    for at, event in enumerate(events):
        world.happen(*event)
        if at % 5:
            continue
        try:
            world.both(Demand(tokens, hits, uses), names, turn=turn + at, **given_to_picks)
        except NoEndpoints as error:
            with pytest.raises(NoEndpoints, match=error.message.split(":", maxsplit=1)[0]):
                choose(world.candidates, Demand(tokens), names, now=world.now)
    world.check_records()


@settings(max_examples=200)
@given(
    count=st.integers(MANY, 70),
    events=st.lists(EVENTS, min_size=10, max_size=60),
    held=st.lists(HELD, max_size=20),
    tokens=st.sampled_from([0, 700, 5000]),
    subset=st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=60),
    resting=st.frozensets(st.integers(0, 60), max_size=3),
    tpot=st.sampled_from([0.0, 0.05]),
)
def test_legs_of_many_endpoints_follow_all_changes(
    count: int,
    events: list[tuple[int, str, int]],
    held: list[tuple[int, int, str]],
    tokens: int,
    subset: list[int] | None,
    resting: frozenset[int],
    tpot: float,
) -> None:
    """After any events the two legs are those of endpoints that are looked at one by one, in the whole pool,
    a subset of the gateway, and while some endpoints rest."""
    world = World(count, tpot)
    hits = {
        f"ns/p{number % count}": Match(
            min(size, tokens), size, {medium: size // 2} if medium and size else {}
        )
        for number, size, medium in held
    }
    names = None if subset is None else tuple(f"10.0.0.{number}" for number in subset)
    for at, event in enumerate(events):
        world.happen(*event)
        if at % 5 == 0:
            keys = frozenset(f"ns/p{number}" for number in resting)
            world.check_legs(Demand(tokens, hits), names if at % 2 else None, keys if at % 3 else frozenset())


@pytest.mark.parametrize("count", [3, FEW, FEW + 1, 200])
def test_equal_endpoints_take_turns_in_a_table(count: int) -> None:
    """Requests that find equal endpoints spread over all of them, whatever their number."""
    tracker = LoadTracker()
    endpoints = [Endpoint(f"p{n}", "ns", f"10.0.{n // 200}.{n % 200}", 8000) for n in range(count)]
    pods = [Candidate(endpoint, tracker.load(endpoint.key)) for endpoint in endpoints]
    table = CandidateTable(pods, tracker.changed)
    picked: Callable[[int], str] = lambda turn: table.choose(Demand(1), now=1.0, turn=turn).hostports[0]  # noqa: E731

    assert {picked(turn) for turn in range(count)} == {endpoint.hostport for endpoint in endpoints}


def test_prompts_that_are_computed_by_now_count_as_sequences() -> None:
    """Without events prompts are computed as time passes, and their sequences then defer the next prompt."""
    world = World(MANY, tpot=0.05)
    for candidate in world.candidates[2:]:
        world.tracker.add(InFlightRequest("", 90_000), candidate.endpoint.key, 90_000, world.now)
    tight, other = world.candidates[0], world.candidates[1]
    for number in range(6):
        world.tracker.add(InFlightRequest(str(number), 100), tight.endpoint.key, 100, world.now)
    other.load.untracked_requests = (
        86  # costs 0.4 s more than the tight one, which costs 0.8 s more if it defers
    )
    for one, allowance in ((tight, -1.0), (other, 0.5)):
        assert one.load.tpot is not None
        one.load.tpot.prefill_share, one.load.tpot._allowance = 0.2, allowance
        world.tracker.changed.add(one.load)
    picked = []
    for seconds in (0.3, 0.4):  # 300 tokens computed: three sequences; then all six
        world.now += seconds
        picked.append(world.table.choose(Demand(5_000), now=world.now).hostports[0])
    assert picked == [tight.endpoint.hostport, other.endpoint.hostport]
    assert picked[1] == choose(world.candidates, Demand(5_000), now=world.now)[0].endpoint.hostport


def test_an_address_names_the_first_endpoint_that_has_it() -> None:
    """With its port or without, whatever the form of the address; a proxy's is no endpoint's."""
    tracker = LoadTracker()
    places = [("10.0.0.1", 8000), ("10.0.0.1", 8001), ("fd00::1", 8000)]
    pods = [
        Candidate(Endpoint(f"p{n}", "ns", address, port), tracker.load(f"ns/p{n}"), ready=n != 1)
        for n, (address, port) in enumerate(places)
    ]
    table = CandidateTable(pods, tracker.changed)
    asked = ["10.0.0.1:8001", "10.0.0.1", "[fd00:0::1]:8000", "fd00::1", "10.9.9.9:80", "", "no address"]
    found = [table.at(address) for address in asked]
    assert [one and one.endpoint.name for one in found] == ["p1", "p0", "p2", "p2", None, None, None]
    assert found == [
        next((one for one in pods if named(canonical((each,)), one.endpoint)), None) for each in asked
    ]
    assert list(table.by_key) == ["ns/p0", "ns/p1", "ns/p2"]


@pytest.mark.parametrize("subset", [None, ("10.0.0.1", "10.0.0.2")])
def test_a_table_is_gone_when_nothing_uses_it(subset: tuple[str, ...] | None) -> None:
    """A table that was replaced, with its columns and remembered parts, does not wait for the collector,
    which numpy's arrays hardly move to run."""
    tracker = LoadTracker()
    pods = [
        Candidate(endpoint, tracker.load(endpoint.key))
        for endpoint in [Endpoint(f"p{n}", "ns", f"10.0.0.{n}", 8000) for n in range(60)]
    ]
    gc.disable()
    try:
        table = CandidateTable(pods, tracker.changed, record=True)
        best = table.choose(Demand(100), subset, now=0.0).best
        weigh(table.legs().among(subset, frozenset({"ns/p7"})), Demand(9_000), best, now=0.0)
        left, legs_left = weakref.ref(table), weakref.ref(table.legs())
        del table
        assert left() is None
        assert legs_left() is None
    finally:
        gc.enable()


def test_a_pool_is_not_full_when_time_has_computed_its_backlogs() -> None:
    """Whether all are full is judged as of now, whatever the last event was, among few endpoints and many."""
    for count in (2, 60):
        tracker = LoadTracker(tpot_seconds=0.05, default_rate=1_000.0)
        pods = []
        for number in range(count):
            endpoint = Endpoint(f"p{number}", "ns", f"10.0.0.{number}", 8000)
            pods.append(Candidate(endpoint, tracker.load(endpoint.key)))
            tracker.add(InFlightRequest(str(number), 40_000), endpoint.key, 40_000, 0.0)
        assert choose(pods, Demand(100), now=1.0, max_backlog=30.0)[0].full
        table = CandidateTable(pods, tracker.changed)
        assert not table.choose(Demand(100), now=100.0, max_backlog=30.0).best.full
        assert not choose(pods, Demand(100), now=100.0, max_backlog=30.0)[0].full
