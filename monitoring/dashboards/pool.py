"""Dashboard of one pool: is it healthy, is it fast, what does prefix routing save."""

from typing import Final

from monitoring.panels import Dashboard, Panel, Query, Row

_ENGINES: Final = "vllm:time_to_first_token_seconds_bucket{@}"

STATE: Final = Row(
    "State",
    (
        Panel(
            "Ready endpoints",
            "Endpoints that may be picked. 0: see the runbook KvistNoReadyEndpoint. Fewer than replicas: "
            "look at the conditions of the pool (kubectl describe kvp).",
            "short",
            (Query('max(kvist_epp_endpoints{@,state="ready"})'),),
            kind="number",
            width=5,
            limits=(2, 1),
        ),
        Panel(
            "Refused",
            "Share of requests that were refused under load or without endpoints. Above 1 %: see the runbook "
            "KvistRequestsRefused.",
            "percentunit",
            (
                Query(
                    """
                    (sum(rate(kvist_epp_requests_total{@,outcome=~"rejected-.+|evicted-.+",
                      outcome!="rejected-context-cancelled"}[$__rate_interval])) or vector(0))
                    / (sum(rate(kvist_epp_requests_total{@}[$__rate_interval])) > 0)
                    """
                ),
            ),
            kind="number",
            width=5,
            limits=(0.001, 0.01),
        ),
        Panel(
            "Hit rate",
            "Share of prompt tokens that engines found in their KV cache. Compare it with what your prompts "
            "share; the runbook KvistHitRateBelowWorkload says what lowers it.",
            "percentunit",
            (
                Query(
                    """
                    sum(rate(vllm:prefix_cache_hits_total{@}[$__rate_interval]))
                    / (sum(rate(vllm:prefix_cache_queries_total{@}[$__rate_interval])) > 0)
                    """
                ),
            ),
            kind="number",
            width=5,
        ),
        Panel(
            "Time to first token, p90",
            "Nine of ten requests had their first token at the engine within this time. Rising with the "
            "queue: add replicas.",
            "s",
            (Query(f"histogram_quantile(0.9, sum by (le) (rate({_ENGINES}[$__rate_interval])))"),),
            kind="number",
            width=5,
        ),
        Panel(
            "Alerts",
            "Alerts of this pool that fire now; each has a runbook.",
            "short",
            (Query('sum(ALERTS{@,alertstate="firing",alertname=~"Kvist.+"}) or vector(0)'),),
            kind="number",
            width=4,
            limits=(1, 3),
        ),
    ),
)

SPEED: Final = Row(
    "Speed",
    (
        Panel(
            "Requests by outcome",
            "`picked`, or the reason of a refusal. `rejected-saturated` and `rejected-ttl-expired`: the pool "
            "is too small. `bad-…`: look at the client.",
            "reqps",
            (Query("sum by (outcome) (rate(kvist_epp_requests_total{@}[$__rate_interval]))", "{{outcome}}"),),
            kind="stacked",
        ),
        Panel(
            "Time to first token",
            "At the engines, without the wait in the picker. p99 far above p50: long prompts without a "
            "cached prefix, or queues.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({q}, sum by (le) (rate({_ENGINES}[$__rate_interval])))",
                    f"p{round(q * 100)}",
                )
                for q in (0.5, 0.9, 0.99)
            ),
        ),
        Panel(
            "Time per output token",
            "Mean and p90 at the engines. Above spec.workload.tpotMilliseconds: see the runbook "
            "KvistDecodeOverTarget.",
            "s",
            (
                Query(
                    """
                    sum(rate(vllm:inter_token_latency_seconds_sum{@}[$__rate_interval]))
                    / (sum(rate(vllm:inter_token_latency_seconds_count{@}[$__rate_interval])) > 0)
                    """,
                    "mean",
                ),
                Query(
                    "histogram_quantile(0.9, sum by (le) "
                    "(rate(vllm:inter_token_latency_seconds_bucket{@}[$__rate_interval])))",
                    "p90",
                ),
            ),
        ),
    ),
)

CACHE: Final = Row(
    "Cache",
    (
        Panel(
            "Hit rate by tokens",
            "True: engines' own counters. Predicted: what pickers expected of all prompts that they "
            "understood. Predicted far above true: see the runbook KvistIndexInaccurate. Both low: prompts "
            "share little, or caches are too small.",
            "percentunit",
            (
                Query(
                    """
                    sum(rate(vllm:prefix_cache_hits_total{@}[$__rate_interval]))
                    / (sum(rate(vllm:prefix_cache_queries_total{@}[$__rate_interval])) > 0)
                    """,
                    "true",
                ),
                Query(
                    """
                    sum(rate(kvist_epp_predicted_cached_tokens_total{@}[$__rate_interval]))
                    / (sum(rate(kvist_epp_prompt_tokens_total{@}[$__rate_interval])) > 0)
                    """,
                    "predicted",
                ),
            ),
            most=1,
        ),
        Panel(
            "Prefill saved",
            "Seconds of prefill per second that engines did not have to compute because prompts were "
            "cached: 1 is one engine that is busy with prefill all the time.",
            "short",
            (
                Query(
                    "sum(rate(kvist_epp_saved_prefill_seconds_total{@}[$__rate_interval]))",
                    "engines saved",
                ),
            ),
        ),
        Panel(
            "Evicted and computed again",
            "Prompt tokens per second that were in a cache, were evicted, and had to be computed again. "
            "Compare with the tokens saved: a large share means that more KV cache, or spec.offload, pays.",
            "short",
            (
                Query(
                    "max(rate(kvist_epp_evicted_requested_tokens_total{@}[$__rate_interval]))",
                    "computed again",
                ),
                Query("sum(rate(kvist_epp_saved_prefill_tokens_total{@}[$__rate_interval]))", "saved"),
            ),
        ),
    ),
)

LOAD: Final = Row(
    "Load",
    (
        Panel(
            "Waiting requests",
            "In the pickers by priority, and in the engines. Waiting in the pickers: every endpoint is full; "
            "add replicas, or lower the load.",
            "short",
            (
                Query("sum by (priority) (kvist_epp_queue_requests{@})", "picker, priority {{priority}}"),
                Query("sum(vllm:num_requests_waiting{@})", "engines"),
            ),
            kind="stacked",
        ),
        Panel(
            "Backlog",
            "Mean time that an endpoint needs for the prompts that it has. It rises before requests wait, so "
            "it is the signal to scale by.",
            "s",
            (Query("avg(kvist_epp_backlog_seconds{@})", "backlog"),),
        ),
        Panel(
            "KV cache in use",
            "By running requests, of the fullest and the mean engine. Above 85 % caches lose prefixes early, "
            "above 95 % engines preempt requests.",
            "percentunit",
            (
                Query("max(vllm:kv_cache_usage_perc{@})", "fullest"),
                Query("avg(vllm:kv_cache_usage_perc{@})", "mean"),
            ),
            limits=(0.85, 0.95),
            most=1,
        ),
    ),
)

POOL: Final = Dashboard(
    "pool",
    "Pool",
    "One pool: is it healthy, is it fast, and what does prefix routing save?",
    (STATE, SPEED, CACHE, LOAD),
)
