"""Alerts about pickers: whether they run, what they refuse, and whether they know what they decide by.

Every replica of a picker has its own view. Where one blind replica matters, the alert names its pod; where
the pool's state matters, the view of the best informed replica counts.
"""

from typing import Final

from monitoring.rules import Alert, Case, Group

_POOL: Final = 'namespace="a",pool="p"'
_PICKER: Final = f'{_POOL},pod="p-epp-1"'
_OTHER: Final = f'{_POOL},pod="p-epp-2"'
_LABELS: Final = {"namespace": "a", "pool": "p"}
_POD: Final = {**_LABELS, "pod": "p-epp-1"}
_PLACE: Final = "pool {{ $labels.namespace }}/{{ $labels.pool }}"


def _picks(per_minute: int, minutes: int = 60) -> dict[str, str]:
    return {f'kvist_epp_requests_total{{{_PICKER},outcome="picked"}}': f"0+{per_minute}x{minutes}"}


_KNOWN: Final = "kvist_operator_reconcile_failures_total"
"""A metric of every pool that the operator manages."""

PICKER_DOWN: Final = Alert(
    name="KvistPickerDown",
    severity="critical",
    expr=f"""
    group by (namespace, pool) (max_over_time(kvist_epp_ends_reported[1h]))
    unless group by (namespace, pool) (kvist_epp_ends_reported)
    unless (
      group by (namespace, pool) (max_over_time({_KNOWN}[1h]))
      unless group by (namespace, pool) ({_KNOWN})
      and on () (max(kvist_operator_leader) == 1)
    )
    """,
    wait="3m",
    summary=f"no picker of {_PLACE} answers scrapes",
    description="All replicas have gone, or Prometheus cannot reach them. With failureMode FailOpen the "
    "gateway spreads requests by its own policy, without caches; with FailClose it refuses them.",
    meaning="no picker of a pool answers scrapes that did within the last hour; deleted pools are left out",
    cases=(
        Case(
            "both replicas end",
            {
                f"kvist_epp_ends_reported{{{_PICKER}}}": "1x20 stale",
                f"kvist_epp_ends_reported{{{_OTHER}}}": "1x20 stale",
                'kvist_epp_ends_reported{namespace="a",pool="other"}': "1x60",
            },
            at="30m",
            fires=_LABELS,
            summary="no picker of pool a/p answers scrapes",
        ),
        Case(
            "the picker of a pool that still exists",
            {
                f"kvist_epp_ends_reported{{{_PICKER}}}": "1x20 stale",
                f"{_KNOWN}{{{_POOL}}}": "0x60",
                "kvist_operator_leader": "1x60",
            },
            at="30m",
            fires=_LABELS,
            summary="no picker of pool a/p answers scrapes",
        ),
        Case(
            "one of two replicas ends",
            {
                f"kvist_epp_ends_reported{{{_PICKER}}}": "1x20 stale",
                f"kvist_epp_ends_reported{{{_OTHER}}}": "1x60",
            },
            at="30m",
        ),
        Case(
            "the pool was deleted",
            {
                f"kvist_epp_ends_reported{{{_PICKER}}}": "1x20 stale",
                f"{_KNOWN}{{{_POOL}}}": "0x20 stale",
                f'{_KNOWN}{{namespace="a",pool="other"}}': "0x60",
                "kvist_operator_leader": "1x60",
            },
            at="30m",
        ),
    ),
)

REPLICAS_APART: Final = Alert(
    name="KvistPickerReplicasApart",
    severity="warning",
    expr="""
    min by (namespace, pool) (kvist_epp_peers{state="heard"})
    < count by (namespace, pool) (kvist_epp_ends_reported) - 1
    """,
    wait="5m",
    summary=f"a picker replica of {_PLACE} hears only {{{{ $value }}}} others",
    description="Replicas that do not hear each other do not know what the others routed: they overload the "
    "same endpoints.",
    meaning="a picker replica hears fewer others than there are",
    cases=(
        Case(
            "one of three is cut off",
            {
                **{f'kvist_epp_ends_reported{{{_POOL},pod="{pod}"}}': "1x30" for pod in "xyz"},
                f'kvist_epp_peers{{{_POOL},pod="x",state="heard"}}': "2x5 0x25",
                f'kvist_epp_peers{{{_POOL},pod="y",state="heard"}}': "2x5 1x25",
                f'kvist_epp_peers{{{_POOL},pod="z",state="heard"}}': "2x5 1x25",
            },
            at="20m",
            fires=_LABELS,
            summary="a picker replica of pool a/p hears only 0 others",
        ),
        Case(
            "both hear each other",
            {
                **{f'kvist_epp_ends_reported{{{_POOL},pod="{pod}"}}': "1x30" for pod in "xy"},
                **{f'kvist_epp_peers{{{_POOL},pod="{pod}",state="heard"}}': "1x30" for pod in "xy"},
            },
            at="20m",
        ),
        Case(
            "two pickers without --replicas",
            {f'kvist_epp_ends_reported{{{_POOL},pod="{pod}"}}': "1x30" for pod in "xy"},
            at="20m",
        ),
    ),
)

_REFUSED: Final = 'outcome=~"rejected-.+|evicted-.+",outcome!="rejected-context-cancelled"'

REQUESTS_REFUSED: Final = Alert(
    name="KvistRequestsRefused",
    severity="warning",
    expr=f"""
    sum by (namespace, pool) (rate(kvist_epp_requests_total{{{_REFUSED}}}[10m]))
    / (sum by (namespace, pool) (rate(kvist_epp_requests_total[10m])) > 0)
    > 0.01 # threshold
    and on (namespace, pool)
    sum by (namespace, pool) (increase(kvist_epp_requests_total{{{_REFUSED}}}[10m])) >= 5
    """,
    wait="5m",
    summary=f"{_PLACE} refuses {{{{ $value | humanizePercentage }}}} of its requests",
    description="Requests are answered with 429 or 503, because the queue is full, a deadline has passed, or "
    "no endpoint is eligible. Requests that are invalid, or that clients cancel, do not count.",
    meaning="more than 1 % of requests refused under load or without endpoints",
    cases=(
        Case(
            "a tenth is shed",
            {
                **_picks(90),
                f'kvist_epp_requests_total{{{_PICKER},outcome="rejected-saturated"}}': "0+10x60",
            },
            at="30m",
            fires=_LABELS,
            summary="pool a/p refuses 10% of its requests",
        ),
        Case(
            "clients cancel, or send no JSON",
            {
                **_picks(90),
                f'kvist_epp_requests_total{{{_PICKER},outcome="rejected-context-cancelled"}}': "0+10x60",
                f'kvist_epp_requests_total{{{_PICKER},outcome="bad-json"}}': "0+10x60",
            },
            at="30m",
        ),
        Case(
            "one request of an idle pool",
            {
                **_picks(0),
                f'kvist_epp_requests_total{{{_PICKER},outcome="rejected-no-endpoints"}}': "0x10 1x50",
            },
            at="15m",
        ),
    ),
)

NO_READY_ENDPOINT: Final = Alert(
    name="KvistNoReadyEndpoint",
    severity="critical",
    expr="""
    max by (namespace, pool) (kvist_epp_endpoints{state="ready"}) == 0
    and on (namespace, pool) (
      sum by (namespace, pool) (kvist_epp_endpoints) > 0
      or max by (namespace, pool) (kvist_epp_queue_requests) > 0
    )
    """,
    wait="2m",
    summary=f"{_PLACE} has no ready endpoint",
    description="The pool has endpoints, or requests that wait for one, but none that is ready.",
    meaning="no endpoint is ready, while there are endpoints or waiting requests",
    cases=(
        Case(
            "the only engine is down",
            {
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "1x5 0x20",
                f'kvist_epp_endpoints{{{_PICKER},state="unreachable"}}': "0x5 1x20",
            },
            at="15m",
            fires=_LABELS,
            summary="pool a/p has no ready endpoint",
        ),
        Case(
            "scaled to zero, and a request waits",
            {
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "0x25",
                f'kvist_epp_queue_requests{{{_PICKER},priority="0"}}': "1x25",
            },
            at="15m",
            fires=_LABELS,
            summary="pool a/p has no ready endpoint",
        ),
        Case(
            "scaled to zero",
            {
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "0x25",
                f'kvist_epp_queue_requests{{{_PICKER},priority="0"}}': "0x25",
            },
            at="15m",
        ),
    ),
)

ENDPOINT_UNREACHABLE: Final = Alert(
    name="KvistEndpointUnreachable",
    severity="warning",
    expr="""
    max by (namespace, pool) (kvist_epp_endpoints{state="unreachable"}) > 0
    """,
    wait="5m",
    summary=f"{{{{ $value }}}} endpoints of {_PLACE} do not answer the picker",
    description="The picker gets no answer from these engines and sends them no requests.",
    meaning="an engine does not answer the picker's scrapes",
    cases=(
        Case(
            "one of two",
            {
                f'kvist_epp_endpoints{{{_PICKER},state="unreachable"}}': "0x5 1x20",
                f'kvist_epp_endpoints{{{_OTHER},state="unreachable"}}': "0x25",
            },
            at="15m",
            fires=_LABELS,
            summary="1 endpoints of pool a/p do not answer the picker",
        ),
        Case(
            "a restart of two minutes",
            {f'kvist_epp_endpoints{{{_PICKER},state="unreachable"}}': "0x5 1x2 0x20"},
            at="8m",
        ),
    ),
)

NO_ROOM: Final = Alert(
    name="KvistNoRoom",
    severity="warning",
    expr="""
    min by (namespace, pool) (kvist_epp_full_endpoints)
    >= on (namespace, pool) (max by (namespace, pool) (kvist_epp_endpoints{state="ready"}) > 0)
    """,
    wait="2m",
    summary=f"all {{{{ $value }}}} ready endpoints of {_PLACE} are full",
    description="Batch, backlog or KV cache of every endpoint is full: new requests wait in the picker, and "
    "are refused when the queue is full or their deadline passes.",
    meaning="every ready endpoint is full",
    cases=(
        Case(
            "both endpoints",
            {
                f"kvist_epp_full_endpoints{{{_PICKER}}}": "0x5 2x20",
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "2x25",
            },
            at="15m",
            fires=_LABELS,
            summary="all 2 ready endpoints of pool a/p are full",
        ),
        Case(
            "one of two endpoints",
            {
                f"kvist_epp_full_endpoints{{{_PICKER}}}": "1x25",
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "2x25",
            },
            at="15m",
        ),
        Case(
            "no endpoint at all",
            {
                f"kvist_epp_full_endpoints{{{_PICKER}}}": "0x25",
                f'kvist_epp_endpoints{{{_PICKER},state="ready"}}': "0x25",
            },
            at="15m",
        ),
    ),
)

DISCOVERY_LOST: Final = Alert(
    name="KvistDiscoveryLost",
    severity="warning",
    expr="""
    min by (namespace, pool, pod, resource) (kvist_epp_discovery_watching) == 0
    """,
    wait="5m",
    summary=f"picker {{{{ $labels.pod }}}} of {_PLACE} does not follow {{{{ $labels.resource }}}}",
    description="The picker has no watch of the Kubernetes API. It routes to the endpoints known last: new "
    "pods get no requests, and pods that have gone fail theirs.",
    meaning="a picker has no watch of a resource of the Kubernetes API",
    cases=(
        Case(
            "no watch of pods",
            {f'kvist_epp_discovery_watching{{{_PICKER},resource="pods"}}': "1x5 0x20"},
            at="15m",
            fires={**_POD, "resource": "pods"},
            summary="picker p-epp-1 of pool a/p does not follow pods",
        ),
        Case(
            "a watch that ends and begins again",
            {f'kvist_epp_discovery_watching{{{_PICKER},resource="pods"}}': "1x5 0 1x3 0 1x20"},
            at="12m",
        ),
    ),
)

PICKERS: Final = Group(
    "kvist-pickers",
    alerts=(
        PICKER_DOWN,
        REPLICAS_APART,
        REQUESTS_REFUSED,
        NO_READY_ENDPOINT,
        ENDPOINT_UNREACHABLE,
        NO_ROOM,
        DISCOVERY_LOST,
    ),
)
