"""Alerts about the engines' KV cache: its use, preemptions, hit rate.

The series are vLLM's own, with the labels ``namespace`` and ``pool`` that the PodMonitors of a pool add
(docs/guides/metrics.md has the relabelling for a Prometheus without them). Engines of no pool are left out.
"""

from typing import Final

from monitoring.rules import Alert, Case, Group, Record

_POOL: Final = 'namespace="a",pool="p"'
_ENGINE: Final = f'{_POOL},pod="p-1",instance="10.0.0.1:8000"'
_LABELS: Final = {"namespace": "a", "pool": "p"}
_POD: Final = {**_LABELS, "pod": "p-1", "instance": "10.0.0.1:8000"}

REQUESTS: Final = "namespace_pool:kvist_engine_requests:increase30m"
HIT_RATIO: Final = "namespace_pool:kvist_prefix_hit:ratio30m"

RECORDS: Final = (
    Record(
        REQUESTS,
        'sum by (namespace, pool) (increase(vllm:request_success_total{pool!=""}[30m]))',
        "requests that the engines of a pool ended in 30 minutes",
    ),
    Record(
        HIT_RATIO,
        f"""
        sum by (namespace, pool) (rate(vllm:prefix_cache_hits_total{{pool!=""}}[30m]))
        / (sum by (namespace, pool) (rate(vllm:prefix_cache_queries_total{{pool!=""}}[30m])) > 0)
        and on (namespace, pool) {REQUESTS} >= 50
        """,
        "share of prompt tokens that the engines of a pool found in their KV cache, with 50 requests or more",
    ),
)


def _requests(each_step: int, steps: int = 120) -> dict[str, str]:
    series = f'vllm:request_success_total{{{_ENGINE},finished_reason="stop"}}'
    return {series: f"0+{each_step}x{steps}"}


def _hits(share: float, steps: int = 120) -> dict[str, str]:
    """Return 50 requests of 20 tokens in each step, of which a share is found in the cache."""
    return {
        **_requests(50, steps),
        f"vllm:prefix_cache_queries_total{{{_ENGINE}}}": f"0+1000x{steps}",
        f"vllm:prefix_cache_hits_total{{{_ENGINE}}}": f"0+{1000 * share:g}x{steps}",
    }


_KV_CASES: Final = (
    Case(
        "one of two engines is nearly full",
        {
            f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.9x20",
            f'vllm:kv_cache_usage_perc{{{_POOL},pod="p-2",instance="10.0.0.2:8000"}}': "0.3x20",
        },
        at="15m",
        fires=_POD,
        summary="KV cache of p-1 (pool a/p) is 90% in use",
    ),
    Case("a short peak", {f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.5x5 0.9x5 0.5x20"}, at="12m"),
    Case(
        "an engine of no pool",
        {'vllm:kv_cache_usage_perc{namespace="a",instance="10.0.0.1:8000"}': "0.99x20"},
        at="15m",
    ),
)

KV_CACHE_HIGH: Final = Alert(
    name="KvistKvCacheHigh",
    severity="warning",
    expr="""
    max by (namespace, pool, pod, instance) (avg_over_time(vllm:kv_cache_usage_perc{pool!=""}[10m]))
    > 0.85 # threshold
    """,
    wait="5m",
    summary="KV cache of {{ $labels.pod }} (pool {{ $labels.namespace }}/{{ $labels.pool }}) is "
    "{{ $value | humanizePercentage }} in use",
    description="Blocks of running requests fill the KV cache. Cached prefixes are evicted early, and above "
    "95 % the engine preempts requests. Add replicas, or bound what each engine runs at once.",
    meaning="KV cache of an engine more than 85 % in use by running requests, on average over 10 minutes",
    cases=_KV_CASES,
)

KV_CACHE_CRITICAL: Final = Alert(
    name="KvistKvCacheCritical",
    severity="critical",
    expr="""
    max by (namespace, pool, pod, instance) (max_over_time(vllm:kv_cache_usage_perc{pool!=""}[2m]))
    > 0.95 # threshold
    """,
    wait="5m",
    summary="KV cache of {{ $labels.pod }} (pool {{ $labels.namespace }}/{{ $labels.pool }}) is "
    "{{ $value | humanizePercentage }} in use",
    description="The engine has no room for more: it preempts requests and computes them again, so that "
    "latency grows without bound. Add replicas now.",
    meaning="KV cache of an engine more than 95 % in use at some moment of every 2 minutes",
    cases=(
        Case(
            "an engine is full",
            {f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.97x20"},
            at="8m",
            fires=_POD,
            summary="KV cache of p-1 (pool a/p) is 97% in use",
        ),
        Case(
            "a full engine, whose preemptions give back some blocks now and then",
            {f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.97 0.8 0.97 0.8 0.97 0.8 0.97 0.8 0.97 0.8 0.97"},
            at="8m",
            fires=_POD,
            summary="KV cache of p-1 (pool a/p) is 97% in use",
        ),
        Case("one peak", {f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.5x3 0.99 0.5x20"}, at="8m"),
        Case("a nearly full engine", {f"vllm:kv_cache_usage_perc{{{_ENGINE}}}": "0.9x20"}, at="8m"),
    ),
)

PREEMPTIONS: Final = Alert(
    name="KvistPreemptions",
    severity="warning",
    expr=f"""
    sum by (namespace, pool) (increase(vllm:num_preemptions_total{{pool!=""}}[30m]))
    / ({REQUESTS} >= 100)
    > 0.01 # threshold
    """,
    wait="10m",
    summary="{{ $value | humanizePercentage }} preemptions per request in pool "
    "{{ $labels.namespace }}/{{ $labels.pool }}",
    description="Engines run out of KV cache blocks and compute the prompts of running requests again. "
    "Lower spec.engine.maxNumSeqs or add replicas.",
    meaning="more than one preemption per 100 requests in 30 minutes",
    cases=(
        Case(
            "one in twenty requests",
            {**_requests(20), f"vllm:num_preemptions_total{{{_ENGINE}}}": "0+1x120"},
            at="60m",
            fires=_LABELS,
            summary="5% preemptions per request in pool a/p",
        ),
        Case(
            "one in a thousand requests",
            {**_requests(1000), f"vllm:num_preemptions_total{{{_ENGINE}}}": "0+1x120"},
            at="60m",
        ),
        Case(
            "an idle pool with one preemption",
            {
                **_requests(0),
                f"vllm:num_preemptions_total{{{_ENGINE}}}": "0x40 1x80",
            },
            at="60m",
        ),
    ),
)

_SHARED: Final = f"kvist_operator_pool_shared_prefix_ratio{{{_POOL}}}"

HIT_RATE_BELOW_WORKLOAD: Final = Alert(
    name="KvistHitRateBelowWorkload",
    severity="warning",
    expr=f"""
    {HIT_RATIO}
    / on (namespace, pool) (max by (namespace, pool) (kvist_operator_pool_shared_prefix_ratio) > 0)
    < 0.7 # threshold
    """,
    wait="30m",
    summary="engines of pool {{ $labels.namespace }}/{{ $labels.pool }} reuse only "
    "{{ $value | humanizePercentage }} of what spec.workload says is shared",
    description="Prompts share less than spec.workload.sharedPrefixTokens says, or shared prefixes are "
    "evicted before they are used again, or requests do not follow the picker.",
    meaning="cached share of prompt tokens below 70 % of `sharedPrefixTokens / promptTokens`",
    cases=(
        Case(
            "a third of what is shared",
            {**_hits(0.2), _SHARED: "0.6x120"},
            at="90m",
            fires=_LABELS,
            summary="engines of pool a/p reuse only 33.33% of what spec.workload says is shared",
        ),
        Case("what was promised", {**_hits(0.55), _SHARED: "0.6x120"}, at="90m"),
        Case("nothing was promised", {**_hits(0.0), _SHARED: "0x120"}, at="90m"),
        Case(
            "an idle pool",
            {
                **_requests(1),
                **{name: "0x120" for name in _hits(0.1) if "success" not in name},
                _SHARED: "0.6x120",
            },
            at="90m",
        ),
    ),
)

_DAY: Final = 144
"""Samples of a day, one each 10 minutes."""

HIT_RATE_FELL: Final = Alert(
    name="KvistHitRateFell",
    severity="warning",
    expr=f"""
    {HIT_RATIO} / ({HIT_RATIO} offset 1d > 0.1)
    < 0.7 # threshold
    """,
    wait="30m",
    summary="hit rate of pool {{ $labels.namespace }}/{{ $labels.pool }} is only "
    "{{ $value | humanizePercentage }} of that at this time yesterday",
    description="Prompts, the number of engines, or routing have changed since yesterday: a new template "
    "at the client, a restart that emptied caches, engines in approximate mode.",
    meaning="cached share of prompt tokens below 70 % of its value one day ago",
    cases=(
        Case(
            "half of yesterday's",
            {
                **_requests(100, 2 * _DAY),
                f"vllm:prefix_cache_queries_total{{{_ENGINE}}}": f"0+10000x{2 * _DAY}",
                f"vllm:prefix_cache_hits_total{{{_ENGINE}}}": f"0+6000x{_DAY} {6003 * _DAY}+3000x{_DAY}",
            },
            at="26h",
            fires=_LABELS,
            summary="hit rate of pool a/p is only 50% of that at this time yesterday",
            step="10m",
        ),
        Case("as yesterday", _hits(0.6, 2 * _DAY), at="26h", step="10m"),
        Case("a pool without a yesterday", _hits(0.05), at="90m"),
    ),
)

CACHE: Final = Group(
    "kvist-cache",
    RECORDS,
    (
        KV_CACHE_HIGH,
        KV_CACHE_CRITICAL,
        PREEMPTIONS,
        HIT_RATE_BELOW_WORKLOAD,
        HIT_RATE_FELL,
    ),
)
