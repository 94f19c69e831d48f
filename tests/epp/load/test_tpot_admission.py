"""TPOT admission: the prefill that an endpoint may take up while its sequences decode in time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.load.requests import progress, route

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import (
    FREE_SHARE,
    LEAST_SHARE,
    LIGHT_TOKENS,
    MARGIN,
    STEP_SECONDS,
    TpotAdmission,
)
from kvist_epp.load.tracker import LoadTracker

RATE = 1_000.0
TARGET = 0.060
SAMPLE = EngineSample(running=30, block_size=16, blocks=100_000)


def paced(target: float = TARGET) -> tuple[LoadTracker, EndpointLoad, TpotAdmission]:
    """An endpoint that has to keep to a time per output token."""
    tracker = LoadTracker(default_rate=RATE, tpot_seconds=target)
    load = tracker.load("pod")
    assert load.tpot is not None
    return tracker, load, load.tpot


def decoding(tracker: LoadTracker, sequences: int, now: float) -> None:
    """Add so many sequences whose prompts are computed."""
    for number in range(sequences):
        route(tracker, f"decoding-{number}", "pod", 0, 10, now)


def busy(undisturbed: float, prefill: float = 0.0) -> tuple[LoadTracker, EndpointLoad, TpotAdmission]:
    """An endpoint with 30 sequences of so many seconds a token, of whose time prompts took such a share."""
    tracker, load, admission = paced()
    decoding(tracker, 30, 0.0)
    tokens = 30 * 2.0 * (1.0 - prefill) / undisturbed
    for step in range(5):
        admission.on_computed(2.0 * prefill * RATE if step else 0.0)
        tracker.on_scrape("pod", replace(SAMPLE, generation_tokens=step * tokens), 2.0 + 2.0 * step)
    return tracker, load, admission


def test_without_a_target_nothing_waits() -> None:
    """Without a TPOT target, every prompt is admitted."""
    load = LoadTracker(default_rate=RATE).load("pod")
    assert load.tpot is None
    assert load.admits_queued(10**6, 1.0)


@given(st.floats(0.010, 0.045), st.floats(0.0, 0.6))
def test_the_share_is_what_decoding_leaves(undisturbed: float, prefill: float) -> None:
    """Time per token without prompts is learned beside them, and the rest up to the target is theirs."""
    _, _, admission = busy(undisturbed, prefill)
    assert abs(admission.prefill_share - (1.0 - undisturbed / (MARGIN * TARGET))) < 0.01


def test_an_endpoint_that_is_too_slow_by_itself_still_gets_some() -> None:
    """An endpoint that misses the target by itself still admits some prompts."""
    _, load, admission = busy(0.5)
    assert admission.prefill_share == LEAST_SHARE
    assert admission.admits(load, 300, 100.0)


def test_prompts_spend_the_allowance_and_time_brings_it_back() -> None:
    """A burst may go at once; then as much as the share of the time that has passed."""
    tracker, load, admission = busy(0.027)  # half of the time is the prompts'
    assert admission.admits(load, 500, 20.0)
    route(tracker, "one", "pod", 500, 500, 20.0)
    progress(tracker, "one", 0, 20.1, computed=500)
    assert not admission.admits(load, 300, 20.1)
    assert admission.admits(load, 300, 20.0 + 0.3 / admission.prefill_share + 0.01)


def test_a_long_prompt_waits_for_no_more_than_a_burst() -> None:
    """A prompt larger than the burst is admitted when the bucket is full, and overdraws it by three steps at
    most."""
    _, load, admission = busy(0.027)
    assert admission.admits(load, 100_000, 20.0)
    admission.debit(100_000, RATE, 20.0)
    later = 20.0 + 4 * STEP_SECONDS / admission.prefill_share
    assert (admission.admits(load, 100_000, later - 0.1), admission.admits(load, 100_000, later + 0.1)) == (
        False,
        True,
    )


def test_few_tokens_are_held_by_no_allowance() -> None:
    """Few tokens need no allowance, because they are computed along with a decode step."""
    tracker, load, admission = busy(0.027)
    route(tracker, "long", "pod", 5_000, 5_000, 20.0)
    progress(tracker, "long", 0, 20.1, computed=5_000)
    assert (admission.admits(load, LIGHT_TOKENS, 20.2), admission.admits(load, LIGHT_TOKENS + 1, 20.2)) == (
        True,
        False,
    )


def test_half_a_second_of_prefill_in_the_engine_is_enough() -> None:
    """Half a second of prefill keeps an engine busy; more waits where it can still go elsewhere."""
    tracker, load, admission = paced()
    route(tracker, "one", "pod", int(STEP_SECONDS * RATE) + 1, 1_000, 1.0)
    assert not admission.admits(load, 1, 1.0)
    progress(tracker, "one", 400, 1.2, computed=100)
    assert admission.admits(load, 1, 1.2)


def test_a_prompt_needs_free_blocks_in_the_cache() -> None:
    """By the last scrape, less what came since; blocks that requests wait for are not free."""
    tracker, load, admission = paced()
    tracker.on_scrape("pod", replace(SAMPLE, blocks=1_000, cache_usage=0.9), 2.0)
    room = int((0.1 - FREE_SHARE) * 16_000)
    assert (admission.admits(load, room - 1, 2.0), admission.admits(load, room + 1, 2.0)) == (True, False)
    route(tracker, "one", "pod", 200, 200, 2.1)
    assert not admission.admits(load, room - 100, 2.1)
    tracker.on_scrape("pod", replace(SAMPLE, blocks=1_000, cache_usage=0.99, waiting=1), 4.0)
    assert not admission.admits(load, 1, 4.0)


def test_a_prompt_longer_than_the_cache_is_admitted() -> None:
    """A prompt longer than the cache is admitted once half of the cache is free; its engine refuses it."""
    tracker, load, admission = paced()
    tracker.on_scrape("pod", replace(SAMPLE, blocks=1_000, cache_usage=0.45), 2.0)
    assert admission.admits(load, 20_000, 2.0)


def test_cold_caches_come_before_decoding() -> None:
    """If more requests are queued than decode, prompts get all of the time; overdue requests do not count."""
    tracker, load, admission = busy(0.027)
    route(tracker, "long", "pod", 5_000, 5_000, 20.0)
    progress(tracker, "long", 0, 20.1, computed=5_000)
    for number in range(11):
        admission.add_queued(number, 300, 20.1)
    assert load.admits_queued(300, 20.2)
    assert not load.admits_queued(300, 22.2)


def test_what_waits_is_counted() -> None:
    """Tokens of queued requests are counted once each, and not at all after they have left."""
    _, _, admission = paced()
    admission.add_queued("a", 300, 1.0)
    admission.add_queued("b", 200, 1.0)
    assert admission.queued_tokens == 500
    for who in ("a", "a", "b", "unknown"):
        admission.remove_queued(who)
    assert (admission.queued_tokens, admission.queued) == (0, {})


@given(st.floats(0.010, 0.045), st.integers(0, 200), st.integers(0, 200))
def test_more_sequences_leave_less_for_prompts(undisturbed: float, some: int, more: int) -> None:
    """The share for prompts falls with sequences that came since it was learned, never below the least, and
    is the learned one for as many as then."""
    _, _, admission = busy(undisturbed)
    one, other = (admission.share_with(count, 0.0001) for count in (some, some + more))

    assert LEAST_SHARE <= other <= one <= 1.0
    assert admission.share_with(30, 0.0001) == pytest.approx(admission.prefill_share)


def test_an_endpoint_that_shows_nothing_may_take_prompts_all_the_time() -> None:
    """An endpoint on which no sequences were seen may take prompts up all the time."""
    admission = TpotAdmission(TARGET)

    assert (
        admission.share_with(40, 0.001),
        admission.token_time.slowdown,
        admission.token_time.sequences,
    ) == (1.0, 0.0, 0.0)


def test_sequences_slow_tokens_down() -> None:
    """By how much sequences prolong a token is what it takes beyond the least that was seen."""
    tracker, _, admission = busy(0.020)
    assert admission.token_time.slowdown == 0.0
    seconds, tokens = 10.0, 4 * 30 * 2.0 / 0.020
    for step in range(20):
        seconds += 2.0
        tokens += 80 * 2.0 / 0.025 if step else 55 * 2.0 / 0.0225
        tracker.on_scrape("pod", replace(SAMPLE, running=80, generation_tokens=tokens), seconds)

    assert admission.token_time.slowdown == pytest.approx(0.005, abs=0.001)
    assert admission.token_time.sequences == pytest.approx(80, abs=1)


def test_who_comes_later_waits_for_those_who_wait() -> None:
    """The time until an endpoint takes up a prompt is longer by all that waits for it."""
    tracker, _, admission = busy(0.027)
    route(tracker, "one", "pod", 500, 500, 20.0)
    alone = admission.seconds_until_admitted(300, RATE, 20.1)
    admission.add_queued("other", 2_000, 20.1)

    assert 0.0 < alone < 2.0
    later = admission.seconds_until_admitted(300, RATE, 20.1)
    assert later == pytest.approx(alone + 2.0 / admission.prefill_share)
