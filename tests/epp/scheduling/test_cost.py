"""The cost: waits, work, price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.scheduling.cost import (
    TERMS,
    EndpointCost,
    Match,
    PoolCost,
    price_of_work,
    share_of_copy,
    slot_seconds,
    terms,
    terms_in,
    terms_of_one,
)


@pytest.mark.parametrize(
    ("running", "slots", "expected"),
    [(300, None, 0.0), (7, 8, 0.0), (8, 8, 0.5), (11, 8, 2.0)],
)
def test_a_full_batch_makes_wait(running: int, slots: int | None, expected: float) -> None:
    """A slot comes free every decode time over slots; those already queued for one go first."""
    assert slot_seconds(running, slots, decode_seconds=4.0) == expected


def test_the_price_rises_with_the_batch() -> None:
    """1 in an idle pool, and 0.08 for each sequence on an endpoint that a prefill delays; 3 more where one
    endpoint of ten has a full KV cache."""
    assert [price_of_work(0), price_of_work(25), price_of_work(25, 0.1)] == [1.0, 3.0, 6.0]


def row(
    key: str = "a",
    *,
    backlog: float = 0.0,
    uncached: int = 1000,
    held: int = 0,
    running: int = 0,
    slots: int | None = None,
    rate: float = 1000.0,
    share: float = 1.0,
    deferred: bool = False,
) -> EndpointCost:
    """One endpoint for one request."""
    load = EndpointLoad(key, rate=rate, backlog_tokens=backlog, slots=slots)
    return EndpointCost(load, Match(held), uncached, uncached / rate, running, share, deferred)


def seconds(name: str, *rows: EndpointCost, uses: float = 0.0) -> list[float]:
    """Return one term of each endpoint."""
    return dict(zip(TERMS, terms(rows, rows[0].uncached + rows[0].hit.tokens, uses), strict=True))[name]


def test_every_term_has_a_test_and_published_names_stay() -> None:
    """Each term has a test below that begins with its name; names that ``/debug/pick`` has shown stay."""
    tests = [name for name in globals() if name.startswith("test_")]

    assert [name for name in TERMS if not any(test.startswith(f"test_{name}_") for test in tests)] == []
    assert {"wait", "slot", "deferral", "work", "decode", "eviction", "copy"} <= set(TERMS)


def test_wait_is_the_backlog_at_the_endpoints_rate() -> None:
    """In seconds of prefill; a tenth of what is queued for it in the picker is added."""
    rows = [row(backlog=500), row(backlog=500, rate=250.0), row("b", backlog=500)]
    assert seconds("wait", *rows) == [0.5, 2.0, 0.5]

    for one in rows:
        one.load.tpot = TpotAdmission(0.06)
    assert rows[2].load.tpot is not None
    rows[2].load.tpot.add_queued("request", 2000, 0.0)
    assert seconds("wait", *rows) == [0.5, 2.0, 0.7]


def test_slot_is_the_time_until_a_sequence_ends() -> None:
    """The slot term is above 0 where the batch is full and the time that requests decode is learned."""
    rows = [row(running=running, slots=8) for running in (7, 8, 8)]
    rows[1].load.decode_seconds = 5.0

    assert seconds("slot", *rows) == [0.0, 5.0 / 8, 0.0]


def test_deferral_costs_a_little() -> None:
    """A deferred prompt costs 0.2 s, and more where the endpoint is tight."""
    rows = [row(), row(deferred=True), row(deferred=True, share=0.4), row()]
    lean = 0.8 * (1 + 1 + 0.4 + 1) / 4

    assert seconds("deferral", *rows) == [0.0, 0.2, pytest.approx(0.2 * lean / 0.4), 0.0]


def test_work_is_priced_by_the_pools_batch_and_shared_with_others_who_use_a_copy() -> None:
    """Three seconds for one in a pool that runs 25 on each; four uses for two copies: a ninth of the copy."""
    alone = [row(uncached=100, held=900, running=25), row("b", running=25)]

    assert seconds("work", *alone) == pytest.approx([0.3, 3.0])
    assert seconds("work", *alone, uses=4.0) == pytest.approx([0.3, 3.0 * (100 + 900 / 9) / 1000])


def test_decode_costs_a_little_for_each_running_sequence() -> None:
    """The decode term is 5 ms for each running sequence."""
    assert seconds("decode", row(), row(running=4)) == [0.0, 0.02]


def test_eviction_is_what_others_compute_again() -> None:
    """Blocks evicted by the new ones are computed again three times, at the pool's rate."""
    assert seconds("eviction", row(uncached=500), row(uncached=500, rate=3000.0)) == [0.75, 0.75]


def test_load_takes_the_time_of_loading() -> None:
    """Loads from slower tiers count as they are, however many sequences run: these do not wait for them."""
    loaded, computed = row(uncached=500, running=100), row(uncached=500, running=100)
    loaded.loading = 0.25
    assert seconds("load", loaded, computed) == [0.25, 0.0]


def test_copy_costs_a_little() -> None:
    """Fifty milliseconds for a whole prompt that another endpoint holds."""
    assert seconds("copy", row(uncached=0, held=1000), row(uncached=1000)) == [0.0, 0.05]


def test_requests_that_will_use_a_copy_share_its_work() -> None:
    """A request bears the whole work of a copy without recent uses; with four uses for two copies, a
    ninth."""
    assert [share_of_copy(0.0, 1), share_of_copy(4.0, 1)] == [1.0, pytest.approx(1 / 9)]


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(1, 1000), st.integers(1, 1000))
def test_more_uses_and_fewer_copies_make_a_copy_cheaper(a: float, b: float, m: int, n: int) -> None:
    """The share is between 0 and 1, falls with the uses and rises with the copies."""
    assert 0 < share_of_copy(max(a, b), min(m, n)) <= share_of_copy(min(a, b), max(m, n)) <= 1


@given(st.integers(0, 2000), st.integers(1, 1000), st.floats(0.01, 100))
def test_one_more_running_never_shortens_the_wait(running: int, slots: int, decode: float) -> None:
    """The wait for a slot grows with the batch."""
    assert slot_seconds(running, slots, decode) <= slot_seconds(running + 1, slots, decode)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 1000), st.integers(0, 1000))
def test_more_load_never_makes_an_endpoint_cheaper(a: float, b: float, m: int, n: int) -> None:
    """A longer backlog costs at least as much, and so does a larger batch, beside the same other endpoint."""
    costs = []
    for backlog, running in ((min(a, b), min(m, n)), (max(a, b), max(m, n))):
        columns = terms([row(backlog=backlog, running=running), row("b")], 1000, 0.0)
        costs.append(sum(column[0] for column in columns))

    assert costs[0] <= costs[1]


@given(
    st.floats(0, 1e6),
    st.integers(1, 100_000),
    st.integers(0, 100_000),
    st.integers(0, 300),
    st.sampled_from((None, 8, 200)),
    st.floats(0, 9),
)
def test_the_terms_of_one_endpoint_are_those_of_the_list(
    backlog: float, uncached: int, held: int, running: int, slots: int | None, loading: float
) -> None:
    """``terms_of_one`` returns, to the last bit, what ``terms_in`` returns of the same endpoint."""
    one = row(backlog=backlog, uncached=uncached, held=held, running=running, slots=slots)
    one.load.decode_seconds, one.loading = 3.0, loading
    pool = PoolCost(2.5, 9_000.0, min(uncached, 40), 0.0001)
    one.own = pool.least_uncached + 0.25 * (uncached - pool.least_uncached)
    slot = slot_seconds(running, slots, 3.0)

    assert terms_of_one(pool, one, slot) == tuple(term[0] for term in terms_in(pool, (one,)))
