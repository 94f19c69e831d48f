"""What is handed over to whom, and when."""

import pytest
from tests.epp.prewarm.pool import SIZE, Pool

from kvist_epp.prewarm.plan import FAILURES, MOST_STEPS, PATIENCE_SECONDS
from kvist_epp.prewarm.rounds import ROUND_SECONDS


def hot_pool(*names: str, **terms: float) -> Pool:
    """The first pod holds a prompt that two tenants ask for."""
    pool = Pool(*names, **terms)  # type: ignore[arg-type]
    pool.hold(names[0], "abcdef")
    pool.heat("abcdef")
    return pool


def test_a_picker_that_starts_hands_nothing_over() -> None:
    """All pods join at once then, and nothing is hot."""
    pool = Pool("a", "b")
    assert (pool.due(), pool.plan.idle, pool.plan.given.begun) == ([], True, 0)


def test_a_pod_that_joins_gets_what_is_hot_step_by_step() -> None:
    """Each step goes on from the last, the next one when it is answered; then there is nothing left."""
    pool = hot_pool("a")
    pool.join("b")
    assert pool.play() == [("b", "ab"), ("b", "abcd"), ("b", "abcdef")]
    assert (pool.holds("b", "abcdef"), pool.plan.idle) == (6, True)
    given = pool.plan.given
    assert (given.begun, given.steps, given.tokens, given.failed) == (1, 3, 6 * SIZE, 0)


def test_one_step_at_a_time() -> None:
    """Nothing more is asked of a pod before it has answered."""
    pool = hot_pool("a")
    pool.join("b")
    assert pool.due() == [("b", "ab")]
    assert pool.due() == []


def test_a_step_is_in_the_ledger_until_it_is_answered() -> None:
    """So that the cost of a pick sees the work."""
    pool = hot_pool("a")
    pool.join("b")
    pool.due()
    assert (pool.ledger.owed("t/b"), pool.ledger.running("t/b")) == (2 * SIZE, 1)
    pool.answer(pool.steps[0])
    assert (pool.ledger.owed("t/b"), pool.ledger.running("t/b")) == (0, 0)


def test_events_that_come_late_cost_nothing() -> None:
    """What was asked for counts as held before the index knows of it."""
    pool = hot_pool("a")
    pool.join("b")
    pool.due()
    pool.plan.ended(pool.steps[0], pool.now)
    assert pool.due() == [("b", "abcd")]
    assert pool.steps[0].uncached == 2 * SIZE


def test_what_a_pod_has_by_then_is_passed_over() -> None:
    """A request, or another replica of the picker, was quicker."""
    pool = hot_pool("a")
    pool.join("b")
    pool.hold("b", "abcd")
    assert pool.play() == [("b", "abcdef")]


@pytest.mark.parametrize(("tokens", "asked"), [(0, []), (4 * SIZE, ["ab", "abcd"])])
def test_the_budget_is_kept(tokens: int, asked: list[str]) -> None:
    """The hottest part that fits it; without one nothing is handed over."""
    pool = hot_pool("a", tokens=tokens)
    pool.join("b")
    assert [text for _, text in pool.play()] == asked


def test_a_small_cache_is_not_filled() -> None:
    """A pod is given half of what it holds at most: the other half is for what requests bring."""
    pool = hot_pool("a")
    pool.plan.cache = {"t/b": 8 * SIZE}.get
    pool.join("b")
    assert [text for _, text in pool.play()] == ["ab", "abcd"]


def test_a_pod_that_works_for_requests_is_left_alone() -> None:
    """Until it owes hardly anything."""
    pool = hot_pool("a")
    pool.join("b")
    pool.ledger.routed("request", "t/b", 8_000, 8_000, pool.now)
    assert pool.due() == []
    pool.now += 0.4
    assert pool.due() == []
    pool.now += 0.1
    assert pool.due() == [("b", "ab")]


def test_a_pod_whose_cache_is_full_is_left_alone() -> None:
    """What it were given would go at once, or something that runs would."""
    pool = hot_pool("a")
    pool.join("b")
    pool.ledger.calibrate("t/b", crowd=3)
    assert pool.due() == []
    pool.ledger.calibrate("t/b")
    assert pool.due() == [("b", "ab")]


@pytest.mark.parametrize("leaves", [Pool.objects_to, Pool.leave])
def test_what_only_a_pod_that_goes_holds_goes_to_the_others(leaves) -> None:  # type: ignore[no-untyped-def]
    """Whether it is on its way out or gone at once; what another pod holds too is nowhere computed again."""
    pool = hot_pool("a", "b", "c")
    for name in ("a", "b"):
        pool.hold(name, "xyz")
    pool.heat("xyz")
    pool.due()
    leaves(pool, "a")
    asked = [(name, text) for name, text in pool.play() if text != "xyz"]
    assert [text for _, text in asked] == ["ab", "abcd", "abcdef"]
    assert {name for name, _ in asked} <= {"b", "c"}
    assert pool.plan.idle


def test_what_one_pod_alone_holds_is_kept_for_a_while() -> None:
    """After a pod went: each hot beginning has its turn in each round, at the cost of one block, on the pod
    that holds it; what two pods hold, and what is not hot, is left alone; and it ends."""
    pool = Pool("a", "b", "c")
    for name, word in (("b", "only"), ("b", "both"), ("c", "both"), ("c", "cold")):
        pool.hold(name, word)
        if word != "cold":
            pool.heat(word)
    assert pool.due() == []
    pool.objects_to("a")
    turns, begin = list[float](), pool.now
    while pool.now < begin + 2 * PATIENCE_SECONDS:
        for name, text in pool.due():
            assert (name, text) == ("b", "only")
            assert [step.uncached for step in pool.steps] == [SIZE]
            pool.answer(pool.steps[0])
            turns.append(pool.now - begin)
        pool.now += 0.25
    assert PATIENCE_SECONDS / ROUND_SECONDS <= len(turns) <= PATIENCE_SECONDS / ROUND_SECONDS + 1
    assert max(turns) < PATIENCE_SECONDS
    assert (pool.plan.given.kept, pool.plan.short) == (len(turns), False)


def test_a_busy_pod_is_not_asked_to_keep() -> None:
    """Not before it has time."""
    pool = Pool("a", "b")
    pool.hold("b", "only")
    pool.heat("only")
    pool.due()
    pool.objects_to("a")
    pool.ledger.routed("request", "t/b", 16_000, 16_000, pool.now)
    assert pool.due() == []
    pool.now += 1.0
    assert pool.due() == [("b", "only")]


def test_others_share_the_work_of_a_pod_that_goes() -> None:
    """Each of them one beginning at a time, where the policy would send it."""
    pool = Pool("a", "b", "c")
    for heat, word in enumerate(("abcd", "ijkl", "wxyz"), 1):
        pool.hold("a", word)
        pool.heat(word, "one", *["two"] * heat)
    pool.hold("c", "wx")
    pool.due()
    pool.objects_to("a")
    assert pool.due() == [("c", "wxyz"), ("b", "ij")]
    for step in pool.steps:
        pool.answer(step)
    assert pool.due() == [("b", "ijkl"), ("c", "ab")]


def test_a_pod_that_comes_back_is_given_what_it_lost() -> None:
    """Joined again; what it kept is not computed again."""
    pool = hot_pool("a", "b")
    pool.hold("b", "ab")
    pool.objects_to("b", "not ready")
    pool.play()
    pool.objects_to("b", "")
    assert pool.play() == [("b", "abcd"), ("b", "abcdef")]


def test_the_end_of_a_pod_ends_its_steps() -> None:
    """A step of a pod that cannot be picked any more is not waited for, and its ledger entry goes with it."""
    pool = hot_pool("a")
    pool.join("b")
    pool.due()
    [step] = pool.steps
    assert pool.plan.wants(step)
    pool.leave("b")
    pool.due()
    assert (pool.plan.wants(step), pool.plan.idle) == (False, True)
    pool.plan.ended(step, pool.now, good=False)
    assert pool.plan.idle


def test_errors_make_it_wait_and_then_give_up() -> None:
    """Twice as long after each error in a row; after the last one the pod is given nothing more."""
    pool = hot_pool("a")
    pool.join("b")
    for failure in range(FAILURES):
        assert pool.due() == [("b", "ab")]
        pool.answer(pool.steps[0], good=False)
        pool.now += 2**failure - 0.01
        assert pool.due() == []
        pool.now += 0.02
    assert (pool.due(), pool.plan.idle) == ([], True)
    assert (pool.plan.given.failed, pool.plan.given.dropped) == (FAILURES, 1)


def test_an_answer_forgives_errors() -> None:
    """Only errors in a row count."""
    pool = hot_pool("a")
    pool.join("b")
    for good in (False, True, False, True, False, True):
        assert pool.due()
        pool.answer(pool.steps[0], good=good)
        pool.now += 2.0
    assert (pool.due(), pool.plan.idle) == ([], True)
    assert pool.holds("b", "abcdef") == 6


def test_what_no_engine_takes_is_dropped() -> None:
    """The beginning alone: the next one is asked for."""
    pool = hot_pool("a")
    pool.hold("a", "xyz")
    pool.heat("xyz")
    pool.join("b")
    pool.due()
    first = pool.steps[0]
    pool.plan.drop(first)
    pool.plan.ended(first, pool.now, good=False)
    pool.now += 2.0
    assert all(not text.startswith(first.text.decode()) for _, text in pool.play())
    assert pool.plan.given.dropped == 1


def test_patience_ends() -> None:
    """A pod that never has time for it is left in peace, and so are those who were to take over."""
    pool = hot_pool("a", "c")
    pool.join("b")
    pool.objects_to("a")
    for name in ("b", "c"):
        pool.ledger.routed(f"request {name}", f"t/{name}", 10**9, 10**9, pool.now)
    assert (pool.due(), pool.plan.idle) == ([], False)
    pool.now += PATIENCE_SECONDS
    assert (pool.due(), pool.plan.idle) == ([], True)
    assert pool.plan.given.dropped == 2


@pytest.mark.parametrize("tenants", [("one",), ("one", "one")])
def test_what_is_one_tenants_alone_is_never_asked_for(tenants: tuple[str, ...]) -> None:
    """However often; not for a pod that joins, nor when its pod goes."""
    pool = Pool("a", "c")
    pool.hold("a", "abcdef")
    pool.heat("abcdef", *tenants)
    pool.join("b")
    assert pool.play() == []
    pool.objects_to("a")
    assert pool.play() == []


@pytest.mark.parametrize("root", [(None, "salt"), ("adapter", None), ("adapter", "salt")])
def test_salts_and_adapters_are_never_asked_for(root: tuple[str | None, str | None]) -> None:
    """A salt says that nobody else may profit; an adapter may be loaded on some pods only."""
    pool = Pool("a", "c")
    pool.hold("a", "abcdef", root)
    pool.heat("abcdef", "one", "two", root=root)
    pool.join("b")
    assert pool.play() == []
    pool.objects_to("a")
    assert pool.play() == []


@pytest.mark.parametrize(("ranks", "precise"), [(0, True), (2, True), (1, False)])
def test_pods_whose_cache_is_not_known_get_nothing(ranks: int, precise: bool) -> None:
    """Those that tell no events, that are several engines, or whose events are not believed (yet)."""
    pool = hot_pool("a")
    pool.join("b", ranks=ranks, precise=precise)
    assert pool.play() == []


def test_a_pod_is_given_something_once_it_is_believed() -> None:
    """Its first replay takes a moment."""
    pool = hot_pool("a")
    pool.join("b", precise=False)
    assert pool.due() == []
    pool.lookup.members["t/b"].precise = True
    assert pool.due() == [("b", "ab")]


def test_long_beginnings_have_longer_steps() -> None:
    """Each step is sent from the first byte on, so that there are never more than so many."""
    pool = Pool("a", tokens=10**6, step=SIZE)
    word = "".join(chr(65 + number % 26) for number in range(3 * MOST_STEPS))
    pool.hold("a", word)
    pool.heat(word)
    pool.join("b")
    assert len(pool.play()) == MOST_STEPS


def test_replicas_begin_at_different_places() -> None:
    """So that two do not compute the same at the same time; in the end each has asked for all."""

    def asked(start: float) -> list[str]:
        pool = Pool("a", start=start)
        for heat, word in enumerate(("ab", "cd", "ef", "gh")):
            pool.hold("a", word)
            pool.heat(word, "one", *["two"] * (4 - heat))
        pool.join("b")
        return [text for _, text in pool.play()]

    assert asked(0.0) == ["ab", "cd", "ef", "gh"]
    assert asked(0.5) == ["ef", "gh", "ab", "cd"]
