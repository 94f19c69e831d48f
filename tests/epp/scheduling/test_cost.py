"""The cost: waits, work, price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.scheduling.cost import (
    Policy,
    copy_share,
    cost,
    price,
    room_seconds,
    slot_seconds,
    work_seconds,
)


@pytest.mark.parametrize(
    ("running", "slots", "expected"),
    [(300, None, 0.0), (7, 8, 0.0), (8, 8, 0.5), (11, 8, 2.0)],
)
def test_a_full_batch_makes_wait(running: int, slots: int | None, expected: float) -> None:
    """A slot comes free every decode time over slots; those already queued for one go first."""
    assert slot_seconds(running, slots, decode_seconds=4.0) == expected


def test_work_is_uncached_tokens_by_rate() -> None:
    """Without lower tiers the work is what must be computed."""
    assert work_seconds(500, 1000.0) == 0.5


def test_a_slower_tier_is_used_where_it_is_quicker() -> None:
    """Tokens held on CPU are loaded, those on a disk slower than computing are computed."""
    policy = Policy(load_rates={"CPU": 10_000.0, "STORAGE": 500.0})

    assert work_seconds(500, 1000.0, {"CPU": 400}, policy) == pytest.approx(0.1 + 0.04)
    assert work_seconds(500, 1000.0, {"STORAGE": 400}, policy) == 0.5
    assert work_seconds(100, 1000.0, {"CPU": 400}, policy) == pytest.approx(0.01)


def test_an_unknown_medium_has_a_rate() -> None:
    """Connectors may send names we do not know; they load at the policy's other rate."""
    assert work_seconds(120, 1000.0, {"CXL": 120}) == pytest.approx(0.01)


def test_the_price_rises_with_the_batch() -> None:
    """1 in an idle pool, and 0.08 for each sequence on a pod that a prefill delays; 3 more where one pod of
    ten has a full KV cache."""
    assert [price(0), price(25), price(25, 0.1)] == [1.0, 3.0, 6.0]


def test_new_blocks_take_the_room_of_others() -> None:
    """What they evict is computed again three times, at the pool's rate."""
    assert room_seconds(500, 1000.0) == 1.5


def test_cost_is_the_formula_of_the_design() -> None:
    """wait + price x work + 5 ms per running sequence."""
    assert cost(1.0, 0.5, 4, 2.0) == pytest.approx(1.0 + 1.0 + 0.02)


def test_those_who_will_use_a_copy_share_its_work() -> None:
    """Nobody asked lately: the request bears it whole. Four uses for two copies: a ninth."""
    assert [copy_share(0.0, 1), copy_share(4.0, 1)] == [1.0, pytest.approx(1 / 9)]


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(1, 1000), st.integers(1, 1000))
def test_more_uses_and_fewer_copies_make_a_copy_cheaper(a: float, b: float, m: int, n: int) -> None:
    """Its share of the work is between nothing and all, falls with the uses and rises with the copies."""
    assert 0 < copy_share(max(a, b), min(m, n)) <= copy_share(min(a, b), max(m, n)) <= 1


@given(
    uncached=st.integers(0, 10**6),
    rate=st.floats(1, 1e6),
    lower=st.dictionaries(st.sampled_from(["CPU", "STORAGE", "X"]), st.integers(0, 10**6)),
)
def test_lower_tiers_never_make_work_longer(uncached: int, rate: float, lower: dict[str, int]) -> None:
    """Whatever is held elsewhere, it is used only where it helps, and work is never negative."""
    assert 0 <= work_seconds(uncached, rate, lower) <= work_seconds(uncached, rate) * (1 + 1e-9)


@given(st.integers(0, 2000), st.integers(1, 1000), st.floats(0.01, 100))
def test_one_more_running_never_shortens_the_wait(running: int, slots: int, decode: float) -> None:
    """The wait for a slot grows with the batch."""
    assert slot_seconds(running, slots, decode) <= slot_seconds(running + 1, slots, decode)


@given(
    wait=st.floats(0, 1e4),
    more=st.floats(0, 1e4),
    work=st.floats(0, 1e3),
    running=st.integers(0, 1000),
    others=st.integers(0, 1000),
)
def test_more_load_never_makes_a_pod_cheaper(
    wait: float, more: float, work: float, running: int, others: int
) -> None:
    """A longer wait costs at least as much, and so does a larger batch."""
    now = cost(wait, work, running, price(running))

    assert now <= cost(wait + more, work, running, price(running))
    assert now <= cost(wait, work, running + others, price(running + others))
