"""The price of what slower tiers hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.cost import DEFAULT, Match
from kvist_epp.scheduling.pick import Candidate, Demand, choose
from kvist_epp.scheduling.tier_price import note_loads, price_tiers

DEFAULTS = {"CPU": 10_000.0, "STORAGE": 500.0}


def endpoint(name: str, rate: float = 1000.0, skipped: str = "", **tier_rates: float) -> Candidate:
    """An endpoint with measured tiers."""
    load = EndpointLoad(name, rate=rate, tier_rates=tier_rates, skipped_media=frozenset(skipped.split()))
    return Candidate(Endpoint(name, "ns", f"10.0.0.{ord(name)}", 8000), load)


def test_tokens_of_a_tier_are_loaded_not_computed() -> None:
    """The tokens of a slower tier count as cached, and take the time of loading."""
    priced = price_tiers(
        EndpointLoad("a", rate=1000.0), 900, 3600, {"CPU": 400, "STORAGE": 100}, DEFAULTS, 0.0
    )

    assert (priced.tokens, priced.bytes) == (900, 3600)
    assert priced.loading == pytest.approx(0.04 + 0.2)
    assert [(one.medium, one.tokens, one.seconds, one.compute_seconds) for one in priced.loads] == [
        ("CPU", 400, 0.04, 0.4),
        ("STORAGE", 100, 0.2, 0.1),
    ]


def test_a_measured_rate_replaces_the_default() -> None:
    """Each endpoint's tiers are as fast as its metrics say."""
    load = EndpointLoad("a", rate=1000.0, tier_rates={"CPU": 40_000.0})

    assert price_tiers(load, 400, 0, {"CPU": 400}, DEFAULTS, 0.0).loading == pytest.approx(0.01)


def test_an_unknown_medium_has_a_rate() -> None:
    """Media of unknown names load at the rate of the slowest that is known."""
    assert price_tiers(EndpointLoad("a"), 120, 0, {"CXL": 120}, DEFAULTS, 0.0).loading == pytest.approx(0.24)


def test_what_is_skipped_counts_as_not_cached() -> None:
    """A skipped medium's tokens are computed, and those of slower media, which follow in the prompt, too."""
    load = EndpointLoad("a", rate=1000.0, skipped_media=frozenset({"CPU"}))
    priced = price_tiers(load, 900, 3600, {"CPU": 400, "STORAGE": 100}, DEFAULTS, 0.0)

    assert (priced.tokens, priced.loading) == (400, 0.0)
    assert [one.skipped for one in priced.loads] == [True, True]


@given(
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from(["CPU", "STORAGE", "X"]), st.integers(1, 10**5), max_size=3),
    st.sets(st.sampled_from(["CPU", "STORAGE", "X"])),
    st.floats(1, 1e6),
)
def test_each_token_is_on_the_gpu_or_loaded_or_computed(
    on_gpu: int, lower: dict[str, int], skipped: set[str], rate: float
) -> None:
    """No token is counted twice, and none is lost."""
    load = EndpointLoad("a", rate=rate, skipped_media=frozenset(skipped))
    priced = price_tiers(load, on_gpu + sum(lower.values()), 0, lower, DEFAULTS, 0.0)
    loaded = sum(one.tokens for one in priced.loads if not one.skipped)

    assert priced.tokens == on_gpu + loaded
    assert {one.medium: one.tokens for one in priced.loads} == lower
    assert priced.loading == pytest.approx(sum(one.seconds for one in priced.loads if not one.skipped))


def test_a_pick_prefers_the_gpu_then_host_then_shared_then_computing() -> None:
    """By the seconds of each: 16,000 tokens on the GPU, loaded at 80,000/s or 30,000/s, or computed at
    15,000/s."""
    names = {
        "g": endpoint("g", 15_000.0),
        "h": endpoint("h", 15_000.0, CPU=80_000.0),
        "s": endpoint("s", 15_000.0, SHARED=30_000.0),
        "n": endpoint("n", 15_000.0),
    }
    held = {"g": {}, "h": {"CPU": 16_000}, "s": {"SHARED": 16_000}}
    hits = {f"ns/{name}": Match(16_000, 64_000, lower) for name, lower in held.items()}
    order = []
    while names:
        [best, *_] = choose(list(names.values()), Demand(17_000, hits), now=0.0)
        order.append(best.endpoint.name)
        del names[best.endpoint.name]

    assert order == ["g", "h", "s", "n"]


def test_a_disk_slower_than_computing_attracts_nothing() -> None:
    """An endpoint whose disk must be skipped costs what one costs that has nothing; one that cannot skip it
    costs the load."""
    hits = {f"ns/{name}": Match(16_000, 64_000, {"STORAGE": 16_000}) for name in ("a", "b")}
    skips = endpoint("a", 15_000.0, "STORAGE", STORAGE=1000.0)
    loads = endpoint("b", 15_000.0, STORAGE=1000.0)
    rows = choose([skips, loads, endpoint("c", 15_000.0)], Demand(17_000, hits), now=0.0)
    costs = {row.endpoint.name: row for row in rows}

    assert costs["a"].cost_seconds == costs["c"].cost_seconds
    assert costs["a"].uncached_tokens == 17_000
    assert costs["b"].terms["load"] == 16.0
    assert rows[-1].endpoint.name == "b"


def test_the_time_to_the_first_token_has_the_load() -> None:
    """A prompt whose blocks are loaded waits for them."""
    hits = {"ns/a": Match(16_000, 64_000, {"CPU": 16_000})}
    [row] = choose([endpoint("a", 15_000.0, CPU=80_000.0)], Demand(17_500, hits), now=0.0)

    assert row.predicted_ttft_seconds == pytest.approx(0.2 + 0.1)
    assert DEFAULT.load_rates["CPU"] == 80_000.0


def test_a_load_waits_for_those_before_it() -> None:
    """A tier reads for one request after the other, so the next load takes what is left of them, too; host
    memory and storage do not wait for each other."""
    load = EndpointLoad("a", rate=1000.0, tier_rates={"CPU": 10_000.0, "STORAGE": 5000.0})
    first = price_tiers(load, 2000, 0, {"STORAGE": 2000}, DEFAULTS, 5.0)
    note_loads(load, first.loads, limited=False, now=5.0)

    assert first.loading == pytest.approx(0.4)
    assert price_tiers(load, 2000, 0, {"STORAGE": 2000}, DEFAULTS, 5.1).loading == pytest.approx(0.3 + 0.4)
    assert price_tiers(load, 2000, 0, {"CPU": 2000}, DEFAULTS, 5.1).loading == pytest.approx(0.2)
    assert price_tiers(load, 2000, 0, {"STORAGE": 2000}, DEFAULTS, 5.5).loading == pytest.approx(0.4)


@pytest.mark.parametrize("limits", [True, False])
def test_behind_other_loads_computing_may_be_quicker(limits: bool) -> None:
    """A load that would be done later than computing is skipped, where the engine can be kept from it."""
    load = EndpointLoad(
        "a", rate=1000.0, tier_rates={"STORAGE": 2000.0, "SHARED": 2000.0}, limits_loads=limits
    )
    load.occupy("SHARED", 10.0, 0.0)
    priced = price_tiers(load, 3000, 0, {"STORAGE": 1000, "SHARED": 1000}, DEFAULTS, 8.9)

    assert [one.skipped for one in priced.loads] == [limits, limits]
    assert priced.tokens == (1000 if limits else 3000)
    assert priced.loading == pytest.approx(0.0 if limits else 1.1 + 1.0)
    assert not price_tiers(load, 3000, 0, {"STORAGE": 1000, "SHARED": 1000}, DEFAULTS, 9.1).loads[0].skipped


@pytest.mark.parametrize(("limited", "skipped", "until"), [(True, {"STORAGE"}, 1.0), (False, set(), 3.0)])
def test_only_what_will_be_loaded_occupies_a_tier(limited: bool, skipped: set[str], until: float) -> None:
    """A request whose body could not be changed loads what another one would compute."""
    load = EndpointLoad("a", rate=1000.0, tier_rates={"STORAGE": 500.0}, skipped_media=frozenset({"STORAGE"}))
    load.occupy("STORAGE", 1.0, 0.0)
    loads = price_tiers(load, 1000, 0, {"STORAGE": 1000}, DEFAULTS, 0.0).loads

    assert note_loads(load, loads, limited=limited, now=0.0) == skipped
    assert load.loading_until == {"STORAGE": until}
