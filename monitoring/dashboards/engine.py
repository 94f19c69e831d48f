"""Dashboard of the engines: vLLM's own metrics, by engine."""

from typing import Final

from monitoring.panels import Dashboard, Panel, Query, Row


def _quantile(name: str, quantile: float, *by: str) -> str:
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({name}_bucket{{@}}[$__rate_interval])))"


def _rate(name: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({name}{{@}}[$__rate_interval]))"


WORK: Final = Row(
    "Work",
    (
        Panel(
            "Running and waiting",
            "Requests in the batch, and those that wait for it. Waiting requests while others run few: the "
            "KV cache is full.",
            "short",
            (
                Query("sum by (instance) (vllm:num_requests_running{@})", "{{instance}} running"),
                Query("sum by (instance) (vllm:num_requests_waiting{@})", "{{instance}} waiting"),
            ),
        ),
        Panel(
            "Waiting by reason",
            "`capacity`: batch or KV cache is full. `deferred`: waits for a LoRA adapter or a KV transfer.",
            "short",
            (Query("sum by (reason) (vllm:num_requests_waiting_by_reason{@})", "{{reason}}"),),
            kind="stacked",
        ),
        Panel(
            "Tokens",
            "Prompt and output tokens per second of the pool.",
            "short",
            (
                Query("sum(rate(vllm:prompt_tokens_total{@}[$__rate_interval]))", "prompt"),
                Query("sum(rate(vllm:generation_tokens_total{@}[$__rate_interval]))", "output"),
            ),
        ),
        Panel(
            "Ended requests",
            "`abort`: clients went away, or a deadline passed. `error`: look at the engine's log.",
            "reqps",
            (Query(_rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
            kind="stacked",
        ),
    ),
)

CACHE: Final = Row(
    "KV cache",
    (
        Panel(
            "KV cache in use",
            "By running requests; cached prefixes of ended requests count as free. Above 85 %: see the "
            "runbook KvistKvCacheHigh.",
            "percentunit",
            (Query("max by (instance) (vllm:kv_cache_usage_perc{@})", "{{instance}}"),),
            limits=(0.85, 0.95),
            most=1,
        ),
        Panel(
            "Hit rate",
            "Share of prompt tokens that each engine found in its own cache.",
            "percentunit",
            (
                Query(
                    """
                    sum by (instance) (rate(vllm:prefix_cache_hits_total{@}[$__rate_interval]))
                    / (sum by (instance) (rate(vllm:prefix_cache_queries_total{@}[$__rate_interval])) > 0)
                    """,
                    "{{instance}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Prompt tokens by source",
            "Computed, found in the GPU's cache, or loaded by a connector (spec.offload, prefill/decode).",
            "short",
            (Query(_rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            kind="stacked",
        ),
        Panel(
            "Preemptions",
            "Each costs the prefill of a running request again. See the runbook KvistPreemptions.",
            "cps",
            (Query(_rate("vllm:num_preemptions_total", "instance"), "{{instance}}"),),
        ),
    ),
)

LATENCY: Final = Row(
    "Latency",
    (
        Panel(
            "Time to first token, p90",
            "From the arrival at the engine. One engine far above the others: long prompts, or it is slow.",
            "s",
            (Query(_quantile("vllm:time_to_first_token_seconds", 0.9, "instance"), "{{instance}}"),),
        ),
        Panel(
            "Wait and prefill, p90",
            "Time in the engine's queue, and in prefill. A wait that dominates: the batch is full.",
            "s",
            (
                Query(_quantile("vllm:request_queue_time_seconds", 0.9), "wait"),
                Query(_quantile("vllm:request_prefill_time_seconds", 0.9), "prefill"),
            ),
        ),
        Panel(
            "Time between tokens, p90",
            "Peaks while long prompts are computed in between: set spec.workload.tpotMilliseconds.",
            "s",
            (Query(_quantile("vllm:inter_token_latency_seconds", 0.9, "instance"), "{{instance}}"),),
        ),
        Panel(
            "Whole request, p90",
            "From arrival to the last token; it depends on the length of the output.",
            "s",
            (Query(_quantile("vllm:e2e_request_latency_seconds", 0.9), "p90"),),
        ),
    ),
)

ENGINE: Final = Dashboard(
    "engine",
    "Engines",
    "vLLM's own metrics of one pool, by engine.",
    (WORK, CACHE, LATENCY),
    series="vllm:num_requests_running",
)
