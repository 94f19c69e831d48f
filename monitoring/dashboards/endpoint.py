"""Dashboard of a pool's endpoints: what the picker knows of each, and how they differ."""

from typing import Final

from monitoring.panels import Dashboard, Panel, Query, Row

CHOICE: Final = Row(
    "What the picker knows",
    (
        Panel(
            "Endpoints by state",
            "`unreachable`: no answer to scrapes, see the runbook KvistEndpointUnreachable. `new`: not "
            "scraped yet. Other states are those of the pod.",
            "short",
            (Query("max by (state) (kvist_epp_endpoints{@})", "{{state}}"),),
            kind="stacked",
        ),
        Panel(
            "Precise or approximate",
            "Green: prompts are matched with the KV events of the endpoint. Red: it is picked by routing "
            "history, see the runbook KvistIndexInaccurate; /debug/fleet has the reason.",
            "short",
            (Query("max by (endpoint) (kvist_epp_index_trust{@})", "{{endpoint}}"),),
            kind="states",
            texts=(("1", "precise", "green"), ("0", "approximate", "red")),
        ),
        Panel(
            "Backlog",
            "Prompt tokens that each endpoint still has to prefill. Lines that stay apart: the picker "
            "prefers caches there, or gateways do not follow its picks.",
            "short",
            (Query("max by (endpoint) (kvist_epp_backlog_tokens{@})", "{{endpoint}}"),),
        ),
    ),
)

CACHE: Final = Row(
    "Cache",
    (
        Panel(
            "Predicted hit rate",
            "Share of each endpoint's prompt tokens that were expected to be cached there.",
            "percentunit",
            (
                Query(
                    """
                    sum by (endpoint) (rate(kvist_epp_predicted_cached_tokens_total{@}[$__rate_interval]))
                    / (sum by (endpoint) (rate(kvist_epp_prompt_tokens_total{@}[$__rate_interval])) > 0)
                    """,
                    "{{endpoint}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "True hit rate",
            "The same as engines reported it by KV events or usage. Far below the prediction: the index of "
            "this endpoint is wrong, and above 5 % the picker stops using it.",
            "percentunit",
            (
                Query(
                    """
                    sum by (endpoint) (rate(kvist_epp_true_cached_tokens_total{@}[$__rate_interval]))
                    / (sum by (endpoint)
                      (rate(kvist_epp_verified_prompt_tokens_total{@}[$__rate_interval])) > 0)
                    """,
                    "{{endpoint}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Error of the prediction",
            "How much the picker expected more (above 0) or less (below 0) than was cached, as a share of "
            "the prompts of the same requests.",
            "percentunit",
            (
                Query(
                    """
                    (
                      sum by (endpoint) (rate(kvist_epp_verified_predicted_tokens_total{@}[$__rate_interval]))
                      - sum by (endpoint) (rate(kvist_epp_true_cached_tokens_total{@}[$__rate_interval]))
                    )
                    / (sum by (endpoint)
                      (rate(kvist_epp_verified_prompt_tokens_total{@}[$__rate_interval])) > 0)
                    """,
                    "{{endpoint}}",
                ),
            ),
            least=None,
        ),
        Panel(
            "Cached blocks",
            "Blocks of the KV cache that the index knows, by medium. A sudden fall to 0: the engine "
            "restarted, or its events were lost.",
            "short",
            (
                Query(
                    "max by (endpoint, medium) (kvist_epp_index_blocks{@})",
                    "{{endpoint}} {{medium}}",
                ),
            ),
        ),
        Panel(
            "KV events",
            "Events per second by type. `removed` as often as `stored`: the cache is full and turns over.",
            "cps",
            (
                Query(
                    "max by (endpoint, type) (rate(kvist_epp_index_events_total{@}[$__rate_interval]))",
                    "{{endpoint}} {{type}}",
                ),
            ),
        ),
        Panel(
            "Lost and repaired events",
            "Gaps are asked for again and cost nothing. Resets drop the index of the endpoint: more than "
            "three in an hour, see the runbook KvistIndexResets. Undecodable messages: another version of "
            "the engine.",
            "short",
            (
                Query(
                    "sum by (endpoint) (increase(kvist_epp_index_gaps_total{@}[1h]))",
                    "{{endpoint}} gaps",
                ),
                Query(
                    "max by (endpoint) (increase(kvist_epp_index_resets_total{@}[1h]))",
                    "{{endpoint}} resets",
                ),
                Query(
                    "sum by (endpoint) (increase(kvist_epp_index_undecodable_total{@}[1h]))",
                    "{{endpoint}} undecodable",
                ),
            ),
        ),
    ),
)

LOAD: Final = Row(
    "Load",
    (
        Panel(
            "Running requests",
            "In the batch of each engine. At maxNumSeqs the endpoint is full.",
            "short",
            (Query("sum by (instance) (vllm:num_requests_running{@})", "{{instance}}"),),
        ),
        Panel(
            "KV cache in use",
            "By running requests. One engine far above the others: a few long requests, or a gateway that "
            "does not follow the picker.",
            "percentunit",
            (Query("max by (instance) (vllm:kv_cache_usage_perc{@})", "{{instance}}"),),
            limits=(0.85, 0.95),
            most=1,
        ),
        Panel(
            "Served elsewhere",
            "Requests per second that were picked for this endpoint and served by another one: connections "
            "to it fail, or the gateway does not know it. See the runbook KvistPicksNotFollowed.",
            "reqps",
            (
                Query(
                    "sum by (endpoint) (rate(kvist_epp_served_elsewhere_total{@}[$__rate_interval]))",
                    "{{endpoint}}",
                ),
            ),
        ),
    ),
)

ENDPOINT: Final = Dashboard(
    "endpoint",
    "Endpoints",
    "The endpoints of one pool side by side: what the picker knows of each, and how they differ.",
    (CHOICE, CACHE, LOAD),
)
