"""Which prefix is requested from which endpoint, and when."""

import pytest
from tests.epp.prewarm.prewarm_pool import SIZE, Pool

from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.prewarm.prewarm_planner import EXPIRY_SECONDS, MAX_FAILURES, MAX_STEPS
from kvist_epp.prewarm.refresh_schedule import ROUND_SECONDS


def hot_pool(*names: str, **terms: float) -> Pool:
    """Return a pool whose first endpoint holds a prompt that two tenants request."""
    pool = Pool(*names, **terms)  # type: ignore[arg-type]
    pool.hold(names[0], "abcdef")
    pool.heat("abcdef")
    return pool


def test_a_picker_that_starts_requests_nothing() -> None:
    """All endpoints join at once at the start, and no prefix is hot."""
    pool = Pool("a", "b")
    assert (pool.poll(), pool.planner.idle, pool.stats.begun) == ([], True, 0)


def test_an_endpoint_that_joins_gets_hot_prefixes_step_by_step() -> None:
    """Each step continues the last once that is answered, until nothing is left."""
    pool = hot_pool("a")
    pool.join("b")
    assert pool.play() == [("b", "ab"), ("b", "abcd"), ("b", "abcdef")]
    assert (pool.holds("b", "abcdef"), pool.planner.idle) == (6, True)
    given = pool.stats
    assert (given.begun, given.steps, given.tokens, given.failed) == (1, 3, 6 * SIZE, 0)


def test_one_step_at_a_time() -> None:
    """An endpoint gets no step before it has answered the last one."""
    pool = hot_pool("a")
    pool.join("b")
    assert pool.poll() == [("b", "ab")]
    assert pool.poll() == []


def test_a_prewarming_request_is_in_flight_until_it_is_answered() -> None:
    """The cost of a pick includes the work of prewarming."""
    pool = hot_pool("a")
    pool.join("b")
    pool.poll()
    assert (pool.tracker.backlog("t/b"), pool.tracker.running("t/b")) == (2 * SIZE, 1)
    pool.answer(pool.steps[0])
    assert (pool.tracker.backlog("t/b"), pool.tracker.running("t/b")) == (0, 0)


def test_events_that_come_late_cost_nothing() -> None:
    """Tokens that were requested count as held before the index knows of them."""
    pool = hot_pool("a")
    pool.join("b")
    pool.poll()
    pool.planner.on_ended(pool.steps[0], pool.now)
    assert pool.poll() == [("b", "abcd")]
    assert pool.steps[0].uncached == 2 * SIZE


def test_blocks_that_an_endpoint_has_by_then_are_skipped() -> None:
    """A request, or another replica of the picker, may have been quicker."""
    pool = hot_pool("a")
    pool.join("b")
    pool.hold("b", "abcd")
    assert pool.play() == [("b", "abcdef")]


@pytest.mark.parametrize(("tokens", "asked"), [(0, []), (4 * SIZE, ["ab", "abcd"])])
def test_the_budget_is_kept(tokens: int, asked: list[str]) -> None:
    """The hottest part within the budget is requested, and nothing if the budget is 0."""
    pool = hot_pool("a", tokens=tokens)
    pool.join("b")
    assert [text for _, text in pool.play()] == asked


def test_a_small_cache_is_not_filled() -> None:
    """An endpoint gets at most half of what its cache holds; the other half is for requests."""
    pool = hot_pool("a")
    pool.cache_tokens["t/b"] = 8 * SIZE
    pool.join("b")
    assert [text for _, text in pool.play()] == ["ab", "abcd"]


def test_an_endpoint_with_a_backlog_is_left_alone() -> None:
    """Steps wait until the endpoint has hardly any backlog."""
    pool = hot_pool("a")
    pool.join("b")
    pool.tracker.add(InFlightRequest("request", 8_000), "t/b", 8_000, pool.now)
    assert pool.poll() == []
    pool.now += 0.4
    assert pool.poll() == []
    pool.now += 0.1
    assert pool.poll() == [("b", "ab")]


def test_an_endpoint_whose_cache_is_full_is_left_alone() -> None:
    """The engine would evict the prefix at once, or preempt a running request."""
    pool = hot_pool("a")
    pool.join("b")
    pool.tracker.calibrate("t/b", kv_full_at=3)
    assert pool.poll() == []
    pool.tracker.calibrate("t/b")
    assert pool.poll() == [("b", "ab")]


@pytest.mark.parametrize("leaves", [Pool.refuse, Pool.leave])
def test_prefixes_of_an_endpoint_that_leaves_go_to_the_others(leaves) -> None:  # type: ignore[no-untyped-def]
    """Whether the endpoint drains or is removed at once; prefixes with another holder are not computed
    again."""
    pool = hot_pool("a", "b", "c")
    for name in ("a", "b"):
        pool.hold(name, "xyz")
    pool.heat("xyz")
    pool.poll()
    leaves(pool, "a")
    asked = [(name, text) for name, text in pool.play() if text != "xyz"]
    assert [text for _, text in asked] == ["ab", "abcd", "abcdef"]
    assert {name for name, _ in asked} <= {"b", "c"}
    assert pool.planner.idle


def test_prefixes_with_a_single_holder_are_refreshed_for_a_while() -> None:
    """After an endpoint left, each hot prefix is requested once per round from its only holder, for one
    block.

    Prefixes with two holders and those that are not hot are left alone, and the refreshing ends.
    """
    pool = Pool("a", "b", "c")
    for name, word in (("b", "only"), ("b", "both"), ("c", "both"), ("c", "cold")):
        pool.hold(name, word)
        if word != "cold":
            pool.heat(word)
    assert pool.poll() == []
    pool.refuse("a")
    turns, begin = list[float](), pool.now
    while pool.now < begin + 2 * EXPIRY_SECONDS:
        for name, text in pool.poll():
            assert (name, text) == ("b", "only")
            assert [step.uncached for step in pool.steps] == [SIZE]
            pool.answer(pool.steps[0])
            turns.append(pool.now - begin)
        pool.now += 0.25
    assert EXPIRY_SECONDS / ROUND_SECONDS <= len(turns) <= EXPIRY_SECONDS / ROUND_SECONDS + 1
    assert max(turns) < EXPIRY_SECONDS
    assert (pool.stats.kept, pool.planner.recovering) == (len(turns), False)


def test_a_busy_endpoint_is_not_refreshed() -> None:
    """A refresh waits until the endpoint has capacity."""
    pool = Pool("a", "b")
    pool.hold("b", "only")
    pool.heat("only")
    pool.poll()
    pool.refuse("a")
    pool.tracker.add(InFlightRequest("request", 16_000), "t/b", 16_000, pool.now)
    assert pool.poll() == []
    pool.now += 1.0
    assert pool.poll() == [("b", "only")]


def test_the_others_share_the_prefixes_of_an_endpoint_that_leaves() -> None:
    """Each of them gets one prefix at a time, where the policy would send it."""
    pool = Pool("a", "b", "c")
    for heat, word in enumerate(("abcd", "ijkl", "wxyz"), 1):
        pool.hold("a", word)
        pool.heat(word, "one", *["two"] * heat)
    pool.hold("c", "wx")
    pool.poll()
    pool.refuse("a")
    assert pool.poll() == [("c", "wxyz"), ("b", "ij")]
    for step in pool.steps:
        pool.answer(step)
    assert pool.poll() == [("b", "ijkl"), ("c", "ab")]


def test_an_endpoint_that_comes_back_gets_what_it_lost() -> None:
    """An endpoint that joins again does not compute what it kept."""
    pool = hot_pool("a", "b")
    pool.hold("b", "ab")
    pool.refuse("b", "not ready")
    pool.play()
    pool.refuse("b", "")
    assert pool.play() == [("b", "abcd"), ("b", "abcdef")]


def test_the_end_of_an_endpoint_ends_its_steps() -> None:
    """The steps of an endpoint that cannot be picked are dropped, and their backlog goes with them."""
    pool = hot_pool("a")
    pool.join("b")
    pool.poll()
    [step] = pool.steps
    assert pool.planner.is_wanted(step)
    pool.leave("b")
    pool.poll()
    assert (pool.planner.is_wanted(step), pool.planner.idle) == (False, True)
    pool.planner.on_ended(step, pool.now, good=False)
    assert pool.planner.idle


def test_errors_delay_the_next_step_and_end_in_giving_up() -> None:
    """The delay doubles with each error in a row; after the last one the endpoint gets nothing more."""
    pool = hot_pool("a")
    pool.join("b")
    for failure in range(MAX_FAILURES):
        assert pool.poll() == [("b", "ab")]
        pool.answer(pool.steps[0], good=False)
        pool.now += 2**failure - 0.01
        assert pool.poll() == []
        pool.now += 0.02
    assert (pool.poll(), pool.planner.idle) == ([], True)
    assert (pool.stats.failed, pool.stats.dropped) == (MAX_FAILURES, 1)


def test_an_answer_resets_the_errors() -> None:
    """Errors count only if they are consecutive."""
    pool = hot_pool("a")
    pool.join("b")
    for good in (False, True, False, True, False, True):
        assert pool.poll()
        pool.answer(pool.steps[0], good=good)
        pool.now += 2.0
    assert (pool.poll(), pool.planner.idle) == ([], True)
    assert pool.holds("b", "abcdef") == 6


def test_a_prefix_that_no_engine_accepts_is_dropped() -> None:
    """The prefix alone is dropped, and the next one is requested."""
    pool = hot_pool("a")
    pool.hold("a", "xyz")
    pool.heat("xyz")
    pool.join("b")
    pool.poll()
    first = pool.steps[0]
    pool.planner.drop(first)
    pool.planner.on_ended(first, pool.now, good=False)
    pool.now += 2.0
    assert all(not text.startswith(first.text.decode()) for _, text in pool.play())
    assert pool.stats.dropped == 1


def test_pending_prefixes_expire() -> None:
    """Prefixes are dropped if the endpoints that should get them never have capacity."""
    pool = hot_pool("a", "c")
    pool.join("b")
    pool.refuse("a")
    for name in ("b", "c"):
        pool.tracker.add(InFlightRequest(f"request {name}", 10**9), f"t/{name}", 10**9, pool.now)
    assert (pool.poll(), pool.planner.idle) == ([], False)
    pool.now += EXPIRY_SECONDS
    assert (pool.poll(), pool.planner.idle) == ([], True)
    assert pool.stats.dropped == 2


@pytest.mark.parametrize("tenants", [("one",), ("one", "one")])
def test_prefixes_of_a_single_tenant_are_never_requested(tenants: tuple[str, ...]) -> None:
    """However hot they are, no endpoint that joins or stays gets them."""
    pool = Pool("a", "c")
    pool.hold("a", "abcdef")
    pool.heat("abcdef", *tenants)
    pool.join("b")
    assert pool.play() == []
    pool.refuse("a")
    assert pool.play() == []


@pytest.mark.parametrize("root", [(None, "salt"), ("adapter", None), ("adapter", "salt")])
def test_prefixes_with_salts_or_adapters_are_never_requested(root: tuple[str | None, str | None]) -> None:
    """A salt means that no other client may profit; an adapter may be loaded on some endpoints only."""
    pool = Pool("a", "c")
    pool.hold("a", "abcdef", root)
    pool.heat("abcdef", "one", "two", root=root)
    pool.join("b")
    assert pool.play() == []
    pool.refuse("a")
    assert pool.play() == []


@pytest.mark.parametrize(("ranks", "precise"), [(0, True), (2, True), (1, False)])
def test_endpoints_whose_cache_is_not_known_get_nothing(ranks: int, precise: bool) -> None:
    """Endpoints without events, of several engines, or in approximate mode are left alone."""
    pool = hot_pool("a")
    pool.join("b", ranks=ranks, precise=precise)
    assert pool.play() == []


def test_an_endpoint_gets_prefixes_once_it_is_precise() -> None:
    """The first replay of a new endpoint takes a moment."""
    pool = hot_pool("a")
    pool.join("b", precise=False)
    assert pool.poll() == []
    pool.lookup.members["t/b"].precise = True
    assert pool.poll() == [("b", "ab")]


def test_long_prefixes_have_longer_steps() -> None:
    """Each step is sent from the first byte on, so the number of steps is bounded."""
    pool = Pool("a", tokens=10**6, step=SIZE)
    word = "".join(chr(65 + number % 26) for number in range(3 * MAX_STEPS))
    pool.hold("a", word)
    pool.heat(word)
    pool.join("b")
    assert len(pool.play()) == MAX_STEPS


def test_replicas_begin_at_different_places() -> None:
    """Two replicas do not compute the same prefix at the same time, but each requests all of them in the
    end."""

    def asked(start: float) -> list[str]:
        pool = Pool("a", start=start)
        for heat, word in enumerate(("ab", "cd", "ef", "gh")):
            pool.hold("a", word)
            pool.heat(word, "one", *["two"] * (4 - heat))
        pool.join("b")
        return [text for _, text in pool.play()]

    assert asked(0.0) == ["ab", "cd", "ef", "gh"]
    assert asked(0.5) == ["ef", "gh", "ab", "cd"]


def test_endpoints_that_compute_for_others_are_prewarmed() -> None:
    """With disaggregation, an endpoint that only computes prompts gets the hot prefixes when it joins, and
    one that only answers gets none."""
    pool = hot_pool("a", splits=True)
    pool.join("decode", role="decode")
    pool.join("prefill", role="prefill")
    assert pool.play() == [("prefill", "ab"), ("prefill", "abcd"), ("prefill", "abcdef")]


def test_prefixes_of_an_endpoint_that_computes_for_others_go_to_its_like() -> None:
    """With disaggregation, the prefixes of an endpoint which left go to one that computes prompts, though
    requests may not be sent there, and though an endpoint that answers has got them by a transfer."""
    pool = Pool(splits=True)
    for name, role in (("first", "prefill"), ("second", "prefill"), ("decode", "decode")):
        pool.join(name, role=role)
    pool.poll()
    pool.hold("first", "abcdef")
    pool.hold("decode", "abcdef")
    pool.heat("abcdef")
    pool.leave("first")
    assert pool.play() == [("second", "ab"), ("second", "abcd"), ("second", "abcdef")]


@pytest.mark.parametrize("splits", [False, True])
def test_endpoints_that_only_answer_are_prewarmed_where_none_computes_for_them(*, splits: bool) -> None:
    """Without disaggregation, or without an endpoint that only computes prompts, endpoints that answer get
    the hot prefixes."""
    pool = hot_pool("a", splits=splits)
    pool.join("decode", role="decode")
    if not splits:
        pool.join("prefill", role="prefill")
    assert {name for name, _ in pool.play()} == {"decode"}


def test_an_endpoint_that_begins_or_ends_to_compute_for_others_is_no_loss() -> None:
    """An endpoint that only answers has not left when another one begins to compute prompts, and has not
    joined when that one is not ready for a moment."""
    pool = Pool(splits=True)
    pool.join("decode", role="decode")
    pool.poll()
    pool.join("prefill", role="prefill")
    pool.poll()
    assert not pool.planner.recovering
    pool.hold("prefill", "abcdef")
    pool.heat("abcdef")
    pool.refuse("prefill", "not ready")
    pool.now += 1.0
    pool.poll()
    assert pool.stats.begun <= 1, "the prefixes of the one that left, once, not a share for one that joined"


def test_an_endpoint_that_cannot_be_prewarmed_is_no_reason_to_prewarm_none() -> None:
    """Endpoints that answer are prewarmed where the only one that computes for others is approximate."""
    pool = hot_pool("a", splits=True)
    pool.join("prefill", role="prefill", precise=False)
    pool.join("decode", role="decode")
    assert {name for name, _ in pool.play()} == {"decode"}
