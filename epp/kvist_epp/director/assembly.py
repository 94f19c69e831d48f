"""A director with its parts, by the settings: the same for the running picker and for virtual time."""

from collections.abc import Callable

from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.director.director import Director
from kvist_epp.disaggregation.legs import OFF, SIDECAR, Splitter
from kvist_epp.flowcontrol.flow_controller import FlowLimits
from kvist_epp.flowcontrol.priorities import Priorities, named_priorities
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.prefix_stats.hot_prefixes import HotPrefixes
from kvist_epp.scheduling.leg_costs import RULES, DisaggregationPolicy
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import RequestLog
from kvist_epp.tracing.trace_context import PickTracer


def make_director(
    settings: Settings,
    *,
    metrics: PickerMetrics,
    log: RequestLog,
    now: float,
    wake: Callable[[], None],
    index: Index | None = None,
    hot: HotPrefixes | None = None,
    replica: str = "",
    tracer: PickTracer | None = None,
    decisions: DecisionLog | None = None,
    rules: DisaggregationPolicy = RULES,
) -> Director:
    """Return a director without endpoints and without a model.

    ``wake`` is called when ``flow.poll`` should be. ``index`` and ``replica``: its own by default. ``hot``:
    by default there is one if the settings ask for prewarming. ``tracer``: None: traces are not recorded.
    ``decisions``: none are kept by default. ``rules``: which requests are disaggregated.
    """
    index, history = Index() if index is None else index, RoutingHistory()
    splitter = None
    if settings.disaggregation != OFF:
        splitter = Splitter(sidecar=settings.disaggregation == SIDECAR, rules=rules)
    if hot is None and settings.prewarm_tokens:
        hot = HotPrefixes()
    return Director(
        index=index,
        history=history,
        lookup=Lookup(index, history),
        tracker=LoadTracker(
            default_rate=settings.prefill_tokens_per_second,
            expire_seconds=settings.request_seconds,
            tpot_seconds=settings.tpot_target,
            on_capacity=wake,
        ),
        metrics=metrics,
        log=log,
        now=now,
        limits=FlowLimits(
            max_backlog=settings.max_backlog_seconds,
            requests=settings.queue_requests,
            size=settings.queue_bytes,
            capacity_seconds=settings.queue_seconds,
            empty_seconds=settings.empty_pool_seconds,
        ),
        on_due=wake,
        priorities=Priorities(named_priorities(settings.priorities)),
        engine_priorities=settings.scheduling_policy == "priority",
        max_endpoints=settings.endpoints_per_answer,
        hot=hot,
        replica=replica,
        by_prefix=settings.prefix_matching,
        tracer=tracer,
        decisions=decisions,
        splitter=splitter,
    )
