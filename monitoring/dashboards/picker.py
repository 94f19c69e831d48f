"""Dashboard of the pickers: cost of a pick, accuracy of predictions, connections, replicas, gateway."""

from typing import Final

from monitoring.panels import Dashboard, Panel, Query, Row


def _quantile(name: str, quantile: float, *by: str) -> str:
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({name}_bucket{{@}}[$__rate_interval])))"


PICKS: Final = Row(
    "Picks",
    (
        Panel(
            "Duration of a pick",
            "CPU time that a request spends in the picker, without waits. Above a few milliseconds: very "
            "long prompts, or a CPU limit that throttles.",
            "s",
            (
                Query(_quantile("kvist_epp_pick_seconds", 0.5), "p50", exemplar=True),
                Query(_quantile("kvist_epp_pick_seconds", 0.99), "p99", exemplar=True),
            ),
        ),
        Panel(
            "Stages of a pick",
            "Mean time of each stage. `render` is the chat template, `match` the walk through the index.",
            "s",
            (
                Query(
                    """
                    sum by (stage) (rate(kvist_epp_stage_seconds_sum{@}[$__rate_interval]))
                    / (sum by (stage) (rate(kvist_epp_stage_seconds_count{@}[$__rate_interval])) > 0)
                    """,
                    "{{stage}}",
                ),
            ),
            kind="stacked",
        ),
        Panel(
            "Wait in the queue",
            "Of requests that had to wait, by outcome. Waits near the limit: refusals come next.",
            "s",
            (Query(_quantile("kvist_epp_queue_seconds", 0.9, "outcome"), "p90 {{outcome}}", exemplar=True),),
        ),
        Panel(
            "Predicted time to first token",
            "What the picker expected of its picks, from the pick on; observed times with "
            "--observe-responses, from the arrival at the picker on.",
            "s",
            (
                Query(_quantile("kvist_epp_predicted_time_to_first_token_seconds", 0.9), "predicted p90"),
                Query(_quantile("kvist_epp_time_to_first_token_seconds", 0.9), "observed p90", exemplar=True),
            ),
        ),
        Panel(
            "Observed over predicted",
            "Median ratio of long prompts is near 1 when the prefill rate is learned. Far above 1: engines "
            "do work that did not pass the picker.",
            "short",
            (Query(_quantile("kvist_epp_time_to_first_token_ratio", 0.5), "median"),),
        ),
        Panel(
            "Ends of requests",
            "By the source that reported the end. `access-log` or `response` should be nearly all; "
            "`estimated`: see the runbook KvistAccessLogMissing.",
            "reqps",
            (
                Query(
                    "sum by (source) (rate(kvist_epp_requests_ended_total{@}[$__rate_interval]))",
                    "{{source}}",
                ),
            ),
            kind="stacked",
        ),
    ),
)

PROCESS: Final = Row(
    "Process",
    (
        Panel(
            "CPU",
            "Cores in use by each replica. A replica uses one core at most: near 1, add a replica.",
            "short",
            (
                Query(
                    'sum by (pod) (rate(process_cpu_seconds_total{@,container="picker"}[$__rate_interval]))',
                    "{{pod}}",
                ),
            ),
            limits=(0.6, 0.9),
        ),
        Panel(
            "Memory",
            "Resident memory of each replica: index, queued bodies, open requests.",
            "bytes",
            (Query('sum by (pod) (process_resident_memory_bytes{@,container="picker"})', "{{pod}}"),),
        ),
        Panel(
            "Open streams",
            "ext_proc streams, access logs and health watches by port. They grow with requests that wait.",
            "short",
            (Query("sum by (port) (kvist_epp_http2_streams{@})", "{{port}}"),),
        ),
        Panel(
            "Errors of gateways",
            "Messages that could not be read, connections that the picker ended, failed TLS handshakes. The "
            "log names the peer and the remedy.",
            "cps",
            (
                Query(
                    "sum by (kind) (rate(kvist_epp_protocol_errors_total{@}[$__rate_interval]))",
                    "protocol {{kind}}",
                ),
                Query(
                    "sum by (reason) (rate(kvist_epp_http2_connections_ended_total{@}[$__rate_interval]))",
                    "connection {{reason}}",
                ),
                Query(
                    "sum by (reason) (rate(kvist_epp_tls_refusals_total{@}[$__rate_interval]))",
                    "TLS {{reason}}",
                ),
            ),
        ),
        Panel(
            "Certificate",
            "Days until the certificate in use expires. Below 7: see the runbook KvistCertificateExpires.",
            "short",
            (
                Query(
                    "(min by (pod) (kvist_epp_certificate_expiry_timestamp_seconds{@}) - time()) / 86400",
                    "{{pod}}",
                ),
            ),
            limits=(30, 7),
        ),
    ),
)

AROUND: Final = Row(
    "Replicas, Kubernetes, gateway",
    (
        Panel(
            "Other replicas",
            "Others that each replica hears, and those that are silent. Fewer than replicas less one: see "
            "the runbook KvistPickerReplicasApart.",
            "short",
            (Query("max by (pod, state) (kvist_epp_peers{@})", "{{pod}} {{state}}"),),
        ),
        Panel(
            "Last message of the Kubernetes API",
            "Bookmarks come every minute. Rising beyond: see the runbook KvistDiscoveryLost.",
            "s",
            (
                Query(
                    "max by (pod, resource) (kvist_epp_discovery_silent_seconds{@})", "{{pod}} {{resource}}"
                ),
            ),
            limits=(120, 300),
        ),
        Panel(
            "Gateway",
            "The pool's own Envoy: requests with a pick, failed picks, and requests routed without "
            "one. Empty with another gateway.",
            "reqps",
            (
                Query("sum(rate(envoy_http_ext_proc_streams_started{@}[$__rate_interval]))", "with a pick"),
                Query("sum(rate(envoy_http_ext_proc_streams_failed{@}[$__rate_interval]))", "failed"),
                Query(
                    "sum(rate(envoy_http_ext_proc_failure_mode_allowed{@}[$__rate_interval]))",
                    "without a pick",
                ),
            ),
        ),
    ),
)

PICKER: Final = Dashboard(
    "picker",
    "Pickers",
    "The replicas of a pool's picker: what a pick costs, how good predictions are, and connections.",
    (PICKS, PROCESS, AROUND),
)
