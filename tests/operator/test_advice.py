"""Promises about advice: it names figures and a field, comes only with reason, and does not flicker."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crd.cases import planned
from tests.operator.manifested import resource

from kvist_operator.plan import Plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.status.advice import Figures, advice


def pool(**workload: int) -> Pool:
    """The minimal pool, with hints."""
    found = resource("minimal")
    found["spec"]["workload"] = workload
    return read_pool(found)


POOL = pool(promptTokens=4000, sharedPrefixTokens=3000, outputTokens=200)
PLAN: Plan = planned(resource("minimal"))
PLANNED = PLAN.memory.kv_tokens
SEQUENCES = PLAN.settings.sequences
WELL = Figures(
    requests=1000,
    preemptions=0,
    prompt_tokens=4e6,
    cached_tokens=2.9e6,
    running=20,
    waiting=0,
    kv_usage=0.4,
    kv_tokens=PLANNED,
)


def said(**figures: Any) -> tuple[str, ...]:
    """Return the advice for figures that are fine except for these."""
    return advice(POOL, PLAN, replace(WELL, **figures))


def test_there_is_no_advice_when_all_is_well() -> None:
    """There is no advice when all is well, nor before any figures exist."""
    assert said() == ()
    assert advice(POOL, PLAN, Figures()) == ()


def test_preemptions_name_how_many_fit() -> None:
    """The advice is the number of sequences that fit at the observed size, less a tenth, or the gain of more
    memory."""
    [line] = said(preemptions=50, running=100, kv_usage=1.0)

    assert line.startswith("Preemptions: 5 % of requests")
    assert f"Set spec.engine.maxNumSeqs to 88 (it is {SEQUENCES})" in line
    assert (
        f"spec.engine.gpuMemoryUtilizationPercent above {PLAN.settings.share}: each percent is about" in line
    )


def test_preemptions_advise_fewer_sequences_whatever_the_last_scrape_shows() -> None:
    """While engines preempt, three quarters of the present number is the most that is advised, so that the
    advice does not come and go with the use of the cache at one moment."""
    [line] = said(preemptions=50, running=SEQUENCES, kv_usage=0.5)

    assert f"Set spec.engine.maxNumSeqs to {int(0.75 * SEQUENCES) // 8 * 8} (it is {SEQUENCES})" in line


def test_a_share_that_cannot_grow_is_not_advised() -> None:
    """A memory share of 97 percent is not advised to be raised."""
    full = replace(PLAN, settings=replace(PLAN.settings, share=97))
    [line] = advice(POOL, full, replace(WELL, preemptions=50, running=100, kv_usage=1.0))

    assert "gpuMemoryUtilizationPercent" not in line
    assert "more replicas" in line


@pytest.mark.parametrize("requests", [0, 10, 49])
def test_few_requests_prove_nothing(requests: int) -> None:
    """A rate over too few requests gives no advice."""
    assert said(requests=requests, preemptions=requests, cached_tokens=0) == ()


def test_a_hit_rate_below_the_hints_leads_to_where_prompts_part() -> None:
    """The advice names both rates and the hint."""
    [line] = said(cached_tokens=0.4e6)

    assert line.startswith("Hit rate: 10 % of prompt tokens")
    assert "spec.workload.sharedPrefixTokens (3000 of 4000) promises 75 %" in line
    assert "Where prompts diverge" in line
    assert advice(pool(promptTokens=4000), PLAN, replace(WELL, cached_tokens=0)) == ()


@pytest.mark.parametrize(
    ("share", "part"),
    [(0.5, "Another process uses"), (2.0, "cautious"), (0.93, None), (1.1, None)],
)
def test_reported_and_planned_tokens_are_compared(share: float, part: str | None) -> None:
    """The advice names both figures and the likely cause; a difference within a tenth gives none."""
    found = said(kv_tokens=int(PLANNED * share))

    assert len(found) == (part is not None)
    if part:
        assert f"{int(PLANNED * share)} tokens of cache, {PLANNED} were planned" in found[0]
        assert part in found[0]


def test_an_unverified_plan_is_the_likely_cause() -> None:
    """The doubt of an unverified plan is repeated as the likely cause."""
    doubtful = replace(PLAN, doubts=("this card is unknown",))

    [line] = advice(POOL, doubtful, replace(WELL, kv_tokens=PLANNED // 2))
    assert "this card is unknown" in line


@pytest.mark.parametrize(
    ("figures", "part"),
    [
        ({"waiting": 12.0, "kv_usage": 0.2, "running": float(SEQUENCES)}, f"maxNumSeqs to {2 * SEQUENCES}"),
        ({"waiting": 12.0, "kv_usage": 0.2, "running": 10.0}, "spec.engine.maxNumBatchedTokens"),
        ({"waiting": 12.0, "kv_usage": 0.95, "running": 100.0}, "more replicas"),
        ({"waiting": 12.0, "kv_usage": 0.7, "running": 100.0}, None),
        ({"waiting": 0.5, "kv_usage": 0.2, "running": float(SEQUENCES)}, None),
    ],
)
def test_a_queue_has_a_cause(figures: dict[str, float], part: str | None) -> None:
    """The advice tells a full batch, prefill and a full cache apart as causes of a queue; a half-full cache
    gives none."""
    found = said(**figures)

    assert len(found) == (part is not None)
    if part:
        assert "12 requests wait" in found[0]
        assert part in found[0]


GATEWAYS: dict[str, dict[str, Any]] = {
    "Envoy": {"mode": "Envoy"},
    "None": {"mode": "None"},
    "Route": {"mode": "Route", "flavor": "InferencePool", "parentRefs": [{"name": "edge"}]},
}


def behind(name: str) -> Pool:
    """Return the pool behind one of these gateways."""
    found = resource("minimal")
    found["metadata"]["name"], found["spec"]["gateway"] = "minimal", GATEWAYS[name]
    return read_pool(found)


RATES = st.floats(0, 1)
FIGURES = st.builds(
    Figures,
    requests=st.floats(0, 1e6),
    preemptions=st.floats(0, 1e6),
    prompt_tokens=st.floats(0, 1e9),
    cached_tokens=st.floats(0, 1e9),
    running=st.floats(0, 1e4),
    waiting=st.floats(0, 1e4),
    kv_usage=RATES,
    kv_tokens=st.none() | st.integers(0, 10**8),
    picked=st.none() | st.integers(0, 3),
    tls_refusals=st.integers(0, 50),
)


@given(FIGURES)
@pytest.mark.parametrize("gateway", GATEWAYS)
def test_any_figures_give_bounded_advice_that_stands(gateway: str, figures: Figures) -> None:
    """Any figures give lines within the API's bounds, each with a field, and that about the pickers with a
    guide or a Service; the same figures give the same lines."""
    asked = behind(gateway)
    found = advice(asked, PLAN, figures)

    about_pickers = [line for line in found if line.startswith("Pickers: ")]
    others = [line for line in found if line not in about_pickers]
    assert len(about_pickers) <= 1
    assert len(others) <= 4
    assert max(map(len, found), default=0) <= 1024
    for line in others:
        assert "spec." in line
    for line in about_pickers:
        assert "docs/guides/" in line or "the Service minimal-envoy" in line
    assert advice(asked, PLAN, figures, found) == found


@given(st.lists(st.floats(0.8, 1.25), min_size=2, max_size=20))
def test_a_wobble_writes_nothing(factors: list[float]) -> None:
    """Figures that move by a quarter leave the text as it is, around thresholds too."""
    base = replace(
        WELL,
        preemptions=15,
        running=100,
        kv_usage=0.95,
        waiting=2,
        cached_tokens=1.5e6,
        kv_tokens=PLANNED // 2,
        picked=0,
        tls_refusals=30,
    )
    first = before = advice(POOL, PLAN, base)
    for factor in factors:
        refusals = round(30 * factor)
        moved = replace(
            base, preemptions=15 * factor, running=100 * factor, waiting=2 * factor, tls_refusals=refusals
        )
        before = advice(POOL, PLAN, moved, before)

    assert len(first) == 5
    assert before == first


@pytest.mark.parametrize(
    ("gateway", "part"),
    [
        ("Envoy", "the Service minimal-envoy"),
        (
            "None",
            "docs/guides/attach-envoy.md or docs/guides/attach-gateway.md, or set spec.picker.mode to Off",
        ),
        ("Route", "see in docs/guides/attach-gateway.md"),
    ],
)
def test_pickers_that_no_gateway_asks_are_advice(gateway: str, part: str) -> None:
    """Engines that answer while nothing is picked are advice with a remedy for each kind of gateway; with a
    single pick or few requests there is none, and while picks are unknown it stays as it is."""
    asked = behind(gateway)

    def lines(*before: str, **figures: Any) -> tuple[str, ...]:
        return advice(asked, PLAN, replace(WELL, **figures), before)

    [line] = lines(picked=0)
    assert line.startswith("Pickers: engines answered 1000 requests, and the pickers picked for none")
    assert part in line
    assert lines(picked=1) == lines(picked=None) == lines(picked=0, requests=40) == ()
    assert lines(line, picked=None) == (line,)
    assert lines(line, picked=0, requests=40)
    assert lines(line, picked=1) == ()
    [line] = lines(picked=0, requests=0, tls_refusals=27)
    assert line.startswith("Pickers: no request was picked, and 27 connections to the pickers failed")
    assert lines(picked=3, tls_refusals=27) == lines(picked=0, requests=0, tls_refusals=15) == ()
    assert lines(line, picked=0, requests=0, tls_refusals=15) == (line,)
    assert lines(line, picked=0, requests=0, tls_refusals=9) == ()


ROLES = resource("roles")
OF_ROLES: tuple[Pool, Plan] = read_pool(ROLES), planned(ROLES)


def ratio(decode: dict[str, Any], prefill: dict[str, Any], before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the advice on the ratio of a pool with roles, for figures that are fine except for these."""
    well = replace(WELL, kv_tokens=OF_ROLES[1].memory.kv_tokens)
    found = advice(*OF_ROLES, replace(well, **decode), before, prefill=replace(well, kv_usage=0.2, **prefill))
    return tuple(line for line in found if line.startswith("Ratio"))


def test_the_ratio_of_roles_names_the_role_that_lacks_engines() -> None:
    """Requests that wait in one role while the other has room are advice to move engines; a queue in both is
    not, nor is one in a pool without roles."""
    [line] = ratio({"kv_usage": 0.3}, {"waiting": 6})
    assert "6 requests wait in each engine for prefill, and 30 % of the cache" in line
    assert "raise spec.disaggregation.prefill.replicas" in line

    [line] = ratio({"waiting": 5, "kv_usage": 0.95}, {"waiting": 0})
    assert "5 requests wait in each engine for decode" in line
    assert "raise spec.disaggregation.decode.replicas (spec.replicas)" in line

    assert ratio({"waiting": 5, "kv_usage": 0.95}, {"waiting": 5}) == ()
    assert ratio({}, {}) == ()
    assert not [each for each in said(waiting=5, kv_usage=0.95) if each.startswith("Ratio")]
    assert ratio({"kv_usage": 0.3}, {"waiting": 0.6}, (line,))  # the advice stays until it is clearly over
