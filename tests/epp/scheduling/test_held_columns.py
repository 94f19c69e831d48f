"""The price of what slower tiers hold is the same over columns as at one endpoint after the other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_epp.load.endpoint_load import EndpointLoad, lane
from kvist_epp.scheduling import held_columns
from kvist_epp.scheduling.cost import DEFAULT, Match, pool_cost
from kvist_epp.scheduling.held_columns import HeldColumns, TierColumns
from kvist_epp.scheduling.tier_price import price_tiers

NOW = 50.0
MEDIA = ("CPU", "STORAGE", "SHARED", "CXL")
ENDPOINTS = st.fixed_dictionaries(
    {
        "rate": st.sampled_from([1_000.0, 20_000.0]),
        "rates": st.dictionaries(st.sampled_from(MEDIA), st.sampled_from([500.0, 12_000.0, 80_000.0])),
        "skipped": st.frozensets(st.sampled_from(MEDIA), max_size=2),
        "limits": st.booleans(),
        "loading": st.dictionaries(
            st.sampled_from(MEDIA[:2]), st.sampled_from([NOW - 1, NOW + 0.01, NOW + 2])
        ),
        "gpu": st.sampled_from([0, 0, 160]),
        "lower": st.sampled_from(
            [{}, {"CPU": 320}, {"SHARED": 320}, {"CPU": 320, "SHARED": 640}, dict.fromkeys(MEDIA, 320)]
        ),
    }
)


@settings(max_examples=400)
@given(
    drawn=st.lists(ENDPOINTS, min_size=1, max_size=12),
    later=st.lists(st.tuples(st.integers(0, 11), ENDPOINTS), max_size=4),
    tokens=st.sampled_from([0, 1, 500, 3_000]),
    uses=st.sampled_from([0.0, 4.0]),
    few=st.sampled_from([0, 2, 16]),
)
def test_columns_price_what_each_endpoint_does(
    drawn: list[dict[str, Any]],
    later: list[tuple[int, dict[str, Any]]],
    tokens: int,
    uses: float,
    few: int,
) -> None:
    """Cached tokens, seconds of loading and the terms of the pool are equal, also after loads change."""
    loads = [EndpointLoad(f"e{number}") for number in range(len(drawn))]
    for load, figures in zip(loads, drawn, strict=True):
        set_figures(load, figures)
    tiers = TierColumns(loads)
    compare(loads, drawn, tiers, tokens, uses, few)
    for number, figures in later:
        if number < len(loads):
            set_figures(loads[number], figures)
            tiers.refresh(number)
            compare(loads, drawn, tiers, tokens, uses, few)
    places = np.arange(len(loads))[::2]
    compare(loads[::2], drawn[::2], tiers.take(places), tokens, uses, few)


def set_figures(load: EndpointLoad, figures: dict[str, Any]) -> None:
    """Give a load these figures."""
    load.rate, load.tier_rates = figures["rate"], figures["rates"]
    load.skipped_media, load.limits_loads = figures["skipped"], figures["limits"]
    load.loading_until = {lane(medium): until for medium, until in figures["loading"].items()}


def compare(
    loads: list[EndpointLoad],
    drawn: list[dict[str, Any]],
    tiers: TierColumns,
    tokens: int,
    uses: float,
    few: int,
) -> None:
    """Compare the columns with the price of each endpoint."""
    hits = {}
    for load, figures in zip(loads, drawn, strict=True):
        if held := figures["gpu"] + sum(figures["lower"].values()):
            hits[load.key] = Match(held, 4 * held, figures["lower"])
    place = {load.key: at for at, load in enumerate(loads)}
    seconds = np.array([1.0 / load.rate for load in loads])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_columns, "FEW_HOLDERS", few)
        found = HeldColumns.of({**hits, "left": Match(9)}, place, tiers, seconds, DEFAULT, NOW)
    rates = DEFAULT.load_rates
    priced = [
        price_tiers(loads[place[key]], hit.tokens, hit.bytes, hit.lower, rates, NOW)
        for key, hit in hits.items()
    ]
    assert found.tokens.tolist() == [one.tokens for one in priced]
    loading = np.zeros(len(priced)) if found.loading is None else found.loading
    assert loading.tolist() == pytest.approx([one.loading for one in priced])
    cached = {place[key]: one.tokens for key, one in zip(hits, priced, strict=True)}
    least = min(tokens, 1)
    uncached = [max(tokens - cached.get(at, 0), least) for at in range(len(loads))]
    assert found.uncached(len(loads), tokens).tolist() == uncached
    held = list(cached.values())
    most = max(tokens - max(held, default=0), least)
    assert found.pool_cost(3.0, 0.5, 900.0, tokens, uses, DEFAULT) == pool_cost(
        3.0, 0.5, 900.0, most, held, tokens, uses, DEFAULT
    )
    for key, at in place.items():
        shown = found.priced(at, DEFAULT, NOW)
        assert shown.tokens == (cached[at] if key in hits else 0)
