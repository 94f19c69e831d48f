"""Dashboard of the operator: whether it works, and what it made of its pools."""

from typing import Final

from monitoring.panels import Dashboard, Panel, Query, Row

WORK: Final = Row(
    "Work",
    (
        Panel(
            "Leader",
            "Replicas that hold the Lease: exactly 1. 0: see the runbook KvistOperatorDown.",
            "short",
            (Query("sum(kvist_operator_leader) or vector(0)"),),
            kind="number",
            width=6,
            limits=(1, 0.5),
        ),
        Panel(
            "Pools",
            "Pools in the managed namespaces.",
            "short",
            (Query("max(kvist_operator_pools)"),),
            kind="number",
            width=6,
        ),
        Panel(
            "Queue",
            "Pools that wait to be reconciled, at once or after a failure. It stays above 0 while the model "
            "of a pool is looked up, or writes are retried.",
            "short",
            (Query("max(kvist_operator_queue_pools)"),),
            kind="number",
            width=6,
        ),
        Panel(
            "Objects",
            "Objects in the operator's cache. Its memory grows with them.",
            "short",
            (Query("max(kvist_operator_objects)"),),
            kind="number",
            width=6,
        ),
        Panel(
            "Reconciliations by result",
            "`ok`, or the reason of the error: see the runbook KvistReconcileErrors. At rest each pool is "
            "looked at every 10 minutes.",
            "cps",
            (
                Query(
                    "sum by (result) (rate(kvist_operator_reconciles_total[$__rate_interval]))", "{{result}}"
                ),
            ),
            kind="stacked",
        ),
        Panel(
            "Duration of a reconciliation",
            "Tens of milliseconds without changes, seconds with many writes. Rising: a slow API server.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({q}, "
                    "sum by (le) (rate(kvist_operator_reconcile_seconds_bucket[$__rate_interval])))",
                    f"p{round(q * 100)}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Requests to the API server",
            "By method and status. 403: a right is missing (docs/guides/operator.md). 409: other writers. "
            "429 and 5xx: a busy API server.",
            "reqps",
            (
                Query(
                    "sum by (method, status) (rate(kvist_operator_api_requests_total[$__rate_interval]))",
                    "{{method}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Restarts of the watch",
            "Times in an hour that the watch of the cluster ended. More than a few: see the runbook "
            "KvistOperatorWatchRestarts.",
            "short",
            (Query("sum by (pod) (increase(kvist_operator_watch_restarts_total[1h]))", "{{pod}}"),),
        ),
    ),
)

POOLS: Final = Row(
    "Pools",
    (
        Panel(
            "Replicas that are missing",
            "Replicas of engines that the spec asks for and that are not ready. For long: kubectl "
            "describe kvp says which pods, and why.",
            "short",
            (
                Query(
                    """
                    max by (namespace, pool) (kvist_operator_pool_replicas{@})
                    - max by (namespace, pool) (kvist_operator_pool_ready_replicas{@})
                    """,
                    "{{namespace}}/{{pool}}",
                ),
            ),
        ),
        Panel(
            "Conditions",
            "Green: the condition is true. A pool that is not Ready: see the runbook KvistPoolNotReady. "
            "Progressing is true while a rollout runs.",
            "short",
            (
                Query(
                    "max by (namespace, pool, type) (kvist_operator_pool_condition{@})",
                    "{{namespace}}/{{pool}} {{type}}",
                ),
            ),
            kind="states",
            texts=(("1", "true", "green"), ("0", "false or unknown", "red")),
        ),
        Panel(
            "Time since the last success",
            "Each pool is reconciled every 10 minutes (--resync). Far above: see the runbook "
            "KvistReconcileErrors.",
            "s",
            (
                Query(
                    "time() - max by (namespace, pool) "
                    "(kvist_operator_reconcile_last_success_timestamp_seconds{@})",
                    "{{namespace}}/{{pool}}",
                ),
            ),
            limits=(900, 1800),
        ),
        Panel(
            "KV cache of a replica",
            "Tokens by the plan, and as engines report. Reported far below planned: memory is used by "
            "something that the plan does not know; kvist compare shows both.",
            "short",
            (
                Query(
                    "max by (namespace, pool) (kvist_operator_pool_planned_cache_tokens{@})",
                    "{{namespace}}/{{pool}} planned",
                ),
                Query(
                    "max by (namespace, pool) (kvist_operator_pool_reported_cache_tokens{@})",
                    "{{namespace}}/{{pool}} reported",
                ),
            ),
        ),
        Panel(
            "Hit rate over what is shared",
            "Cached share of prompt tokens divided by what spec.workload says is shared. Below 0.7: see the "
            "runbook KvistHitRateBelowWorkload.",
            "percentunit",
            (
                Query(
                    """
                    namespace_pool:kvist_prefix_hit:ratio30m{@}
                    / on (namespace, pool)
                    (max by (namespace, pool) (kvist_operator_pool_shared_prefix_ratio{@}) > 0)
                    """,
                    "{{namespace}}/{{pool}}",
                ),
            ),
        ),
        Panel(
            "Certificates of pickers",
            "Days until the certificate in the Secret expires. The operator makes a new one at 120 of 365 "
            "days: lower means that it does not reconcile.",
            "short",
            (
                Query(
                    """
                    (min by (namespace, pool)
                      (kvist_operator_pool_certificate_expiry_timestamp_seconds{@}) - time()) / 86400
                    """,
                    "{{namespace}}/{{pool}}",
                ),
            ),
            limits=(110, 7),
        ),
    ),
)

OPERATOR: Final = Dashboard(
    "operator",
    "Operator",
    "The operator: whether it works, and what it made of its pools.",
    (WORK, POOLS),
    series="kvist_operator_reconcile_failures_total",
    all_pools=True,
)
