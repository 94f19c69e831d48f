"""Among the data-parallel ranks behind a port, what is cached is weighed with what they have to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.scheduling.cost import Match
from kvist_epp.scheduling.rank_choice import choose_rank

TOKENS = 3_000
RATE = 10_000.0


def load(*running: int | None, backlog: float = 0.0, slots: int | None = None) -> EndpointLoad:
    """Return an endpoint with a request on each of these ranks; None: on a rank that is not known."""
    found = EndpointLoad("ns/e", rate=RATE, slots=slots, decode_seconds=2.0)
    for number, rank in enumerate(running):
        attempt = Attempt(InFlightRequest(str(number), TOKENS), found, 0.0, 0.0, 0.0, rank=rank)
        attempt.backlog = backlog
        found.attempts[attempt] = None
    return found


def held(*tokens: int) -> list[Match]:
    """Return what the ranks hold of the prompt."""
    return [Match(each) for each in tokens]


def test_ranks_that_hold_the_same_are_left_to_the_engine() -> None:
    """A system prompt that all have, or none, is no reason to name one: the engine knows their queues."""
    assert choose_rank(held(2_000, 2_000, 2_000), load(0, 0, 1), TOKENS, 9.0) is None
    assert choose_rank(held(0, 0), load(0), TOKENS, 0.0) is None


def test_the_rank_that_holds_the_prompt_gets_it() -> None:
    """A conversation stays with its rank, though that has some requests more."""
    assert choose_rank(held(2_000, 2_900, 2_000), load(1, 1, 1), TOKENS, 1.0) == 1


@pytest.mark.parametrize("slots", [None, 40])
def test_a_prefix_that_many_share_spreads_over_the_ranks(slots: int | None) -> None:
    """The rank that had it first does not get every request, even if few have come yet."""
    busy = load(*[0] * 20, slots=slots)
    assert choose_rank(held(2_000, 0, 0, 0), busy, TOKENS, 8.0) in {1, 2, 3}
    assert choose_rank(held(2_000, 0, 0, 0), load(0), TOKENS, 0.0) == 0


def test_prompts_that_wait_on_a_rank_are_waited_for() -> None:
    """The backlog of a rank counts in seconds: computing the prompt elsewhere may be quicker."""
    assert choose_rank(held(2_000, 0), load(0, backlog=9_000.0), TOKENS, 0.0) == 1
    assert choose_rank(held(2_000, 0), load(0, backlog=100.0), TOKENS, 0.0) == 0


def test_of_ranks_with_nothing_the_one_with_the_fewest_requests_is_named() -> None:
    """Ranks that hold nothing differ by their requests, where the holder has too much to do."""
    assert choose_rank(held(2_000, 0, 0), load(*[0] * 30, *[1] * 3, 2), TOKENS, 9.0) == 2


@given(
    tokens=st.lists(st.sampled_from([0, 500, 2_999, 3_000]), min_size=1, max_size=8),
    running=st.lists(st.none() | st.integers(0, 9), max_size=30),
    uses=st.sampled_from([0.0, 3.0, 100.0]),
    slots=st.sampled_from([None, 1, 16]),
)
def test_a_rank_is_named_if_they_differ(
    tokens: list[int], running: list[int | None], uses: float, slots: int | None
) -> None:
    """Whatever is on them: a number of a rank that exists, and none if all hold the same."""
    found = choose_rank(held(*tokens), load(*running, slots=slots), TOKENS, uses)
    assert (found is None) == (len(set(tokens)) == 1)
    assert found is None or 0 <= found < len(tokens)
