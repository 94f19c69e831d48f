"""Alerts about the operator: whether one works, and whether its pools come out right."""

from typing import Final

from monitoring.rules import Alert, Case, Group

_POOL: Final = 'namespace="a",pool="p",pod="o-1"'
_RESYNCED: Final = "0x9 3x9 6x9 9x9 12x9 15x9 18x9 21x9 24x9"
_LABELS: Final = {"namespace": "a", "pool": "p"}

OPERATOR_DOWN: Final = Alert(
    name="KvistOperatorDown",
    severity="critical",
    expr="""
    absent(kvist_operator_leader == 1)
    """,
    wait="5m",
    summary="no operator of kvist works",
    description="No replica answers scrapes and holds the Lease. Pools keep serving, but changes of pools, "
    "failed rollouts and new certificates wait.",
    meaning="no replica of the operator that answers scrapes holds the Lease",
    cases=(
        Case(
            "all replicas are gone",
            {'kvist_operator_leader{pod="o-1"}': "1x5 stale"},
            at="15m",
            fires={},
            summary="no operator of kvist works",
        ),
        Case(
            "no replica gets the Lease",
            {'kvist_operator_leader{pod="o-1"}': "0x20", 'kvist_operator_leader{pod="o-2"}': "0x20"},
            at="15m",
            fires={},
            summary="no operator of kvist works",
        ),
        Case(
            "another replica takes over",
            {'kvist_operator_leader{pod="o-1"}': "1x5 stale", 'kvist_operator_leader{pod="o-2"}': "0x6 1x20"},
            at="15m",
        ),
    ),
)

NOT_RECONCILING: Final = Alert(
    name="KvistOperatorNotReconciling",
    severity="critical",
    expr="""
    max by (namespace, pod) (kvist_operator_pools) > 0
    and on (namespace, pod) max by (namespace, pod) (kvist_operator_leader) == 1
    unless on (namespace, pod) sum by (namespace, pod) (increase(kvist_operator_reconciles_total[30m])) > 0
    """,
    wait="10m",
    summary="operator {{ $labels.pod }} has reconciled none of its {{ $value }} pools for 30 minutes",
    description="The operator holds the Lease, but does nothing, although it looks at every pool every "
    "10 minutes (--resync).",
    meaning="the leading operator has pools, and has reconciled none for 30 minutes",
    cases=(
        Case(
            "it hangs",
            {
                'kvist_operator_pools{namespace="k",pod="o-1"}': "3x90",
                'kvist_operator_leader{namespace="k",pod="o-1"}': "1x90",
                'kvist_operator_reconciles_total{namespace="k",pod="o-1",result="ok"}': "0+1x20 20x70",
            },
            at="75m",
            fires={"namespace": "k", "pod": "o-1"},
            summary="operator o-1 has reconciled none of its 3 pools for 30 minutes",
        ),
        Case(
            "it works at rest",
            {
                'kvist_operator_pools{namespace="k",pod="o-1"}': "3x90",
                'kvist_operator_leader{namespace="k",pod="o-1"}': "1x90",
                'kvist_operator_reconciles_total{namespace="k",pod="o-1",result="ok"}': _RESYNCED,
            },
            at="75m",
        ),
        Case(
            "a replica that waits for the Lease",
            {
                'kvist_operator_pools{namespace="k",pod="o-2"}': "3x90",
                'kvist_operator_leader{namespace="k",pod="o-2"}': "0x90",
            },
            at="75m",
        ),
    ),
)

RECONCILE_ERRORS: Final = Alert(
    name="KvistReconcileErrors",
    severity="warning",
    expr="""
    sum by (namespace, pool) (increase(kvist_operator_reconcile_failures_total[30m])) >= 3 # threshold
    unless on (namespace, pool)
    max by (namespace, pool) (changes(kvist_operator_reconcile_last_success_timestamp_seconds[15m])) > 0
    """,
    wait="10m",
    summary="pool {{ $labels.namespace }}/{{ $labels.pool }} could not be reconciled "
    '{{ $value | printf "%.0f" }} times in 30 minutes',
    description="The operator cannot write what the pool needs, and tries again with growing pauses. The "
    "pool's conditions and the operator's log have the reason.",
    meaning="three or more reconciliations of a pool failed in 30 minutes, and none succeeded for 15 minutes",
    cases=(
        Case(
            "a right is missing",
            {
                f"kvist_operator_reconcile_failures_total{{{_POOL}}}": "0x10 0+1x60",
                f"kvist_operator_reconcile_last_success_timestamp_seconds{{{_POOL}}}": "600x70",
            },
            at="60m",
            fires=_LABELS,
            summary="pool a/p could not be reconciled 30 times in 30 minutes",
        ),
        Case(
            "a new pool that never was",
            {f"kvist_operator_reconcile_failures_total{{{_POOL}}}": "0x10 0+1x60"},
            at="60m",
            fires=_LABELS,
            summary="pool a/p could not be reconciled 30 times in 30 minutes",
        ),
        Case(
            "conflicts with other writers, between successes",
            {
                f"kvist_operator_reconcile_failures_total{{{_POOL}}}": "0+1x70",
                f"kvist_operator_reconcile_last_success_timestamp_seconds{{{_POOL}}}": "0+60x70",
            },
            at="60m",
        ),
        Case(
            "one failure",
            {
                f"kvist_operator_reconcile_failures_total{{{_POOL}}}": "0x20 1x50",
                f"kvist_operator_reconcile_last_success_timestamp_seconds{{{_POOL}}}": "0x70",
            },
            at="40m",
        ),
    ),
)

POOL_NOT_READY: Final = Alert(
    name="KvistPoolNotReady",
    severity="warning",
    expr="""
    max by (namespace, pool) (kvist_operator_pool_condition{type="Ready"}) == 0
    """,
    wait="30m",
    summary="pool {{ $labels.namespace }}/{{ $labels.pool }} is not as its spec asks",
    description="The plan was refused, a rollout does not end, or pods do not become ready. The conditions "
    "say which, and what to change.",
    meaning="the condition `Ready` of a pool is not true",
    cases=(
        Case(
            "a rollout that does not end",
            {f'kvist_operator_pool_condition{{{_POOL},type="Ready"}}': "1x5 0x60"},
            at="50m",
            fires=_LABELS,
            summary="pool a/p is not as its spec asks",
        ),
        Case(
            "a rollout of ten minutes",
            {
                f'kvist_operator_pool_condition{{{_POOL},type="Ready"}}': "1x5 0x10 1x60",
                f'kvist_operator_pool_condition{{{_POOL},type="Progressing"}}': "0x5 1x10 0x60",
            },
            at="50m",
        ),
    ),
)

WATCH_RESTARTS: Final = Alert(
    name="KvistOperatorWatchRestarts",
    severity="warning",
    expr="""
    sum by (namespace, pod) (round(increase(kvist_operator_watch_restarts_total[30m]))) > 3 # threshold
    """,
    wait="0m",
    summary='the operator\'s watch of the cluster ended {{ $value | printf "%.0f" }} times in 30 minutes',
    description="Between two watches the operator sees no changes of pools and pods.",
    meaning="the operator's watch of the cluster was restarted more than three times in 30 minutes",
    cases=(
        Case(
            "again and again",
            {'kvist_operator_watch_restarts_total{namespace="k",pod="o-1"}': "0+1x60"},
            at="45m",
            fires={"namespace": "k", "pod": "o-1"},
            summary="the operator's watch of the cluster ended 30 times in 30 minutes",
        ),
        Case(
            "three times, which the increase overstates a little",
            {'kvist_operator_watch_restarts_total{namespace="k",pod="o-1"}': "0x20 1 2 3x40"},
            at="45m",
        ),
    ),
)

OPERATORS: Final = Group(
    "kvist-operator",
    alerts=(OPERATOR_DOWN, NOT_RECONCILING, RECONCILE_ERRORS, POOL_NOT_READY, WATCH_RESTARTS),
)
