"""Promises of sizing over the whole catalogue: no GPUs for nothing, no needless refusal."""

import pytest
from tests.operator.sizing_sweep import CLUSTERS, PAGE, page, pairs, wrongly_refused

from kvist_operator.plan.size import WORTH

pytestmark = pytest.mark.timeout(900)
"""Seconds: some 1,200 plans, each of up to a tenth of a second."""


def test_no_pair_takes_twice_the_gpus_for_under_five_per_cent_of_the_wish() -> None:
    """Every plan with several GPUs holds 5 % of the wish more than the best plan with half of them, and every
    plan holds a sequence of its context."""
    wasteful = [
        (pair.model, pair.gpu, pair.gpus, round(pair.held, 3), round(pair.half, 3))
        for pair in pairs()
        if pair.gpus and pair.held - pair.half < WORTH
    ]

    assert wasteful == []
    plans = [pair.plan for pair in pairs() if pair.plan and pair.plan.argv]
    assert all(plan.memory.fits(plan.settings.max_len) for plan in plans)
    assert sum(pair.gpus > 1 and pair.half > 0 for pair in pairs()) > 20


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nothing_is_refused_that_a_kind_of_node_would_hold(cluster: str) -> None:
    """A model that any kind of node of the cluster holds is never refused there."""
    assert wrongly_refused(cluster) == []


def test_the_page_has_the_figures_of_the_planner() -> None:
    """docs/planning-sweep.md is what ``make golden`` writes."""
    assert PAGE.read_text() == page()
