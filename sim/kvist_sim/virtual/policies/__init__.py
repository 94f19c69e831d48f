"""Routing policies by name, as others publish them, at their defaults.

- ``load_balancing``: random, round robin and least requests.
- ``hashing``: session hash, and consistent hashing with bounded loads.
- ``counters``: base classes that count the work a router has sent and not yet seen completed.
- ``least_cost``: policies that minimise one predicted cost: Mooncake's greedy TTFT, and LMetric.
- ``llmd``: weighted scorers and the affinity filter of llm-d's endpoint picker.
- ``dynamo``: NVIDIA Dynamo's KV router.
- ``disaggregated``: llm-d's threshold and Dynamo's conditional disaggregation, with fixed roles.
- ``cache_aware``: the policy of that name of SGLang's router and vllm-router.
- ``approximate``: their approximate radix tree.
"""

from typing import Final

from kvist_sim.virtual.policy import RATIOS, Spec

from .cache_aware import CacheAware
from .disaggregated import ConditionalDisaggregation, ThresholdDecider
from .dynamo import Dynamo
from .hashing import BoundedLoads, SessionHash
from .least_cost import Greedy, LMetric
from .llmd import SCRAPE_SECONDS, Sticky, Weighted
from .load_balancing import ByLot, LeastRequests, RoundRobin

POLICIES: Final = (
    Spec("random", "each pod alike; Envoy's RANDOM", ByLot),
    Spec("round-robin", "each pod in turn; Envoy's ROUND_ROBIN", RoundRobin),
    Spec("least-requests", "fewest in flight; Envoy's LEAST_REQUEST, full scan", LeastRequests),
    Spec("session-hash", "ring hash of the session; Envoy's RING_HASH", SessionHash),
    Spec("bounded-loads", "consistent hash of the first 100 characters, loads bounded; KubeAI", BoundedLoads),
    Spec("greedy-ttft", "least predicted time to first token; Mooncake, algorithm 1", Greedy, events=True),
    Spec(
        "llm-d-weighted",
        "prefix 3, KV usage 2, queue 2, no-hit LRU 2; llm-d's guide until July 2026",
        Weighted,
        events=True,
        scrape_seconds=SCRAPE_SECONDS,
    ),
    Spec("llm-d-affinity", "affinity filter, then token load; llm-d since July 2026", Sticky, events=True),
    Spec("dynamo", "prefill and decode blocks; NVIDIA Dynamo 1.6", Dynamo, events=True),
    Spec("cache-aware", "approximate radix tree, balance thresholds; SGLang, vllm-router", CacheAware),
    Spec("lmetric", "prefill tokens x batch; LMetric, OSDI 2026", LMetric, events=True),
)
"""In the order of tables."""

DISAGGREGATED: Final = tuple(
    spec
    for ratio, share in RATIOS.items()
    for spec in (
        Spec(
            f"llm-d-pd-{ratio}",
            f"prefix-based-pd-decider, prefill to decode {ratio}; llm-d's guide",
            ThresholdDecider,
            events=True,
            scrape_seconds=SCRAPE_SECONDS,
            prefill_share=share,
        ),
        Spec(
            f"dynamo-pd-{ratio}",
            f"conditional disaggregation, prefill to decode {ratio}; NVIDIA Dynamo 1.6",
            ConditionalDisaggregation,
            events=True,
            prefill_share=share,
        ),
    )
)
"""Policies with fixed roles."""
