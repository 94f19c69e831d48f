"""Explanations of picks that are not made, for people who ask."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvist_epp.director.request_context import RequestContext, named_subset
from kvist_epp.extproc.pick_request import PickRequest
from kvist_epp.scheduling.pick import ScoredEndpoint, explain
from kvist_epp.scheduling.split_decision import SplitDecision
from kvist_epp.telemetry.counters import Stages

if TYPE_CHECKING:
    from kvist_epp.director.director import Director


class Explanation(NamedTuple):
    """The result of ``explain_request``."""

    mode: str
    """``precise``, ``approximate`` or ``load``."""
    prompt_bytes: int
    rows: list[ScoredEndpoint]
    """Every endpoint: the eligible, best first, then the others."""
    limit: int
    """Endpoints that an answer has at most."""
    split: SplitDecision | None = None
    """The best pair of endpoints, chosen or not; None: there is none, or nothing is disaggregated."""


def explain_request(
    director: "Director", path: str, headers: Mapping[str, str], body: bytes, now: float
) -> Explanation:
    """Return what ``Director.offer`` would decide, without a trace of it. Raises PickError."""
    subset = named_subset(headers)
    ask = PickRequest(method="POST", path=path, headers=headers, body=body, subset=subset)
    context = RequestContext.of(ask, "")
    context.match = match = director.understood(ask, Stages(), on_render_failure=lambda _why: None)
    match.look(director.lookup, learn=False)
    context.restrict(director.partly_served)
    rows = explain(
        director.candidates,
        match.demand(director.recent_uses, now),
        context.subset,
        now=now,
        turn=director.request_count + 1,
        max_backlog=director.max_backlog,
        policy=director.policy,
    )
    split = None
    if director.splitter is not None and rows and not rows[0].refusal:
        found = director.splitter.weigh(director, context, rows[0], now)
        split = found if isinstance(found, SplitDecision) else None
    return Explanation(match.mode, match.prompt_bytes, rows, director.max_endpoints, split)
