"""``/metrics`` with vLLM's names, labels and buckets (``vllm/v1/metrics/loggers.py``, ``buckets.py``).

Names that vLLM no longer has (``gpu_cache_usage_perc``, ``time_per_output_token_seconds``, …) are absent
here, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvist_epp.engines.vllm.tier_metrics import source_of
from kvist_sim.engine import scheduler
from kvist_sim.engine import sequence as sequences

LATENCY: Final = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
INTER_TOKEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL: Final = (1, 2, 5, 10, 20)
PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)

_GAUGES: Final = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_COUNTERS: Final = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": "External prefix cache queries, in tokens.",
    "external_prefix_cache_hits": "External prefix cache hits, in tokens.",
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
_SECONDS: Final = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "request_time_per_output_token_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "iteration_tokens_total": STEP_TOKENS,
    "request_params_n": SMALL,
    "request_num_preemptions": PREEMPTIONS,
}
_TOKENS: Final = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_BY_LABEL: Final = {
    "prompt_tokens_by_source": ("source", _SOURCES, "Number of prompt tokens by source."),
    "prompt_tokens_cached_by_source": (
        *("source", ("device", "host", "p2p", "disk", "external_unspecified")),
        "Number of cached prompt tokens by where they were.",
    ),
    "request_success": ("finished_reason", _REASONS, "Count of successfully processed requests."),
}


_OFFLOAD: Final = {
    "kv_offload_load_bytes": "Bytes loaded to the GPU.",
    "kv_offload_load_time": "Seconds of loads to the GPU.",
    "kv_offload_store_bytes": "Bytes stored from the GPU.",
    "kv_offload_store_time": "Seconds of stores from the GPU.",
}
_TIERING: Final = {
    "kv_offload_tiering_read_bytes": "Bytes read from a secondary tier.",
    "kv_offload_tiering_read_time": "Seconds of reads from a secondary tier.",
    "kv_offload_tiering_write_bytes": "Bytes written to a secondary tier.",
    "kv_offload_tiering_write_time": "Seconds of writes to a secondary tier.",
}
FILES: Final = "1:fs"
"""Label ``tier`` of the file tiers."""


class Metrics:
    """Metrics of one process; the label ``engine`` distinguishes ranks."""

    def __init__(
        self, model: str, max_model_len: int, cache_info: Mapping[str, str], *, tiers: bool = False
    ) -> None:
        """Use ``cache_info`` as the labels of ``vllm:cache_config_info``, equal for all ranks; ``tiers``:
        there is an offloading connector."""
        self._registry = CollectorRegistry()
        self._model = model
        self._cache_info = dict(cache_info)
        self._info = Gauge(
            *("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", (*cache_info, "engine")),
            registry=self._registry,
        )
        common = ("model_name", "engine")
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, common, registry=self._registry)
            for name, text in _GAUGES.items()
        }
        self._waiting = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            (*common, "reason"),
            registry=self._registry,
        )
        self._sleep = Gauge(
            "vllm:engine_sleep_state",
            "Engine sleep state.",
            (*common, "sleep_state"),
            registry=self._registry,
        )
        self._counters = {
            name: Counter(f"vllm:{name}", text, common, registry=self._registry)
            for name, text in _COUNTERS.items()
        }
        self._labelled = {
            name: Counter(f"vllm:{name}", text, (*common, label), registry=self._registry)
            for name, (label, _, text) in _BY_LABEL.items()
        }
        self._offload = {
            name: Counter(f"vllm:{name}", text, (*common, *labels), registry=self._registry)
            for texts, labels in ((_OFFLOAD, ()), (_TIERING, ("tier",)))
            for name, text in texts.items()
            if tiers
        }
        self._rejections = Counter(
            *(
                "vllm:admission_rejections",
                "Requests refused because the queue is full.",
                ("model_name", "reason"),
            ),
            registry=self._registry,
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.labels(model, reason)
        buckets = _SECONDS | dict.fromkeys(_TOKENS, tuple(_one_two_five(max_model_len)))
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", f"Histogram of {name}.", common, registry=self._registry, buckets=bounds
            )
            for name, bounds in buckets.items()
        }

    def rank(self, number: int) -> "RankMetrics":
        """Return the metrics of one rank, with every series at zero as vLLM has it from the start."""
        self._info.labels(**self._cache_info, engine=str(number)).set(1)
        at = (self._model, str(number))
        for state in ("awake", "weights_offloaded", "discard_all"):
            self._sleep.labels(*at, state).set(state == "awake")
        return RankMetrics(
            gauges={name: gauge.labels(*at) for name, gauge in self._gauges.items()},
            waiting={reason: self._waiting.labels(*at, reason) for reason in ("capacity", "deferred")},
            counters={name: counter.labels(*at) for name, counter in self._counters.items()},
            labelled={
                name: {value: self._labelled[name].labels(*at, value) for value in values}
                for name, (_, values, _) in _BY_LABEL.items()
            },
            histograms={name: one.labels(*at) for name, one in self._histograms.items()},
            offload={
                name: one.labels(*at, FILES) if name in _TIERING else one.labels(*at)
                for name, one in self._offload.items()
            },
        )

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before it was queued."""
        self._rejections.labels(self._model, reason).inc()

    def page(self) -> bytes:
        """Return the page in Prometheus text format."""
        return generate_latest(self._registry)


class RankMetrics:
    """Metrics of one rank, updated after each step."""

    def __init__(
        self,
        gauges: Mapping[str, Gauge],
        waiting: Mapping[str, Gauge],
        counters: Mapping[str, Counter],
        labelled: Mapping[str, Mapping[str, Counter]],
        histograms: Mapping[str, Histogram],
        offload: Mapping[str, Counter],
    ) -> None:
        self._gauges = gauges
        self._waiting = waiting
        self._counters = counters
        self._labelled = labelled
        self._histograms = histograms
        self._offload = offload
        self._moved = dict.fromkeys(offload, 0.0)
        self._seen = scheduler.Counters()

    def state(self, engine: scheduler.Scheduler) -> None:
        """Set gauges and the scheduler's totals."""
        self._gauges["num_requests_running"].set(len(engine.running))
        self._gauges["num_requests_waiting"].set(len(engine.waiting))
        self._gauges["kv_cache_usage_perc"].set(engine.pool.usage)
        self._waiting["capacity"].set(len(engine.waiting))
        now = engine.counters
        self._counters["prefix_cache_queries"].inc(now.queries - self._seen.queries)
        self._counters["prefix_cache_hits"].inc(now.hits - self._seen.hits)
        self._counters["num_preemptions"].inc(now.preemptions - self._seen.preemptions)
        for name, counter in (("queries", now.external_queries), ("hits", now.external_hits)):
            self._counters[f"external_prefix_cache_{name}"].inc(
                counter - getattr(self._seen, f"external_{name}")
            )
        self._seen = replace(now)
        if engine.tiers is not None:
            for name, total in engine.tiers.totals().items():
                self._offload[name].inc(total - self._moved[name])
                self._moved[name] = total

    def step(
        self, plan: scheduler.Plan, advanced: Sequence[sequences.Sequence], gaps: Iterable[float]
    ) -> None:
        """Record a step: ``gaps`` are the seconds between two tokens of the sequences that had one before."""
        self._histograms["iteration_tokens_total"].observe(plan.tokens)
        self._counters["generation_tokens"].inc(len(advanced))
        observe = self._histograms["inter_token_latency_seconds"].observe
        for gap in gaps:
            observe(gap)

    def first_token(self, sequence: sequences.Sequence) -> None:
        """Record that the prefill of a sequence is done."""
        cached, total = sequence.cached or 0, len(sequence.prompt)
        self._counters["prompt_tokens"].inc(total)
        self._counters["prompt_tokens_cached"].inc(cached)
        self._labelled["prompt_tokens_by_source"]["local_compute"].inc(total - cached)
        loaded = sum(sequence.loaded.values())
        self._labelled["prompt_tokens_by_source"]["local_cache_hit"].inc(cached - loaded)
        self._labelled["prompt_tokens_by_source"]["external_kv_transfer"].inc(loaded)
        self._labelled["prompt_tokens_cached_by_source"]["device"].inc(cached - loaded)
        for medium, tokens in sequence.loaded.items():
            self._labelled["prompt_tokens_cached_by_source"][source_of(medium)].inc(tokens)
        self._observe("time_to_first_token_seconds", (sequence.first_token or 0.0) - sequence.arrived)

    def finished(self, sequence: sequences.Sequence, now: float) -> None:
        """Record the end of a sequence, whether complete or aborted."""
        self._labelled["request_success"][sequence.finish or "error"].inc()
        self._observe("e2e_request_latency_seconds", now - sequence.arrived)
        self._observe("request_prompt_tokens", len(sequence.prompt))
        self._observe("request_generation_tokens", sequence.generated)
        self._observe("request_max_num_generation_tokens", sequence.generated)
        self._observe("request_params_n", 1)
        self._observe("request_params_max_tokens", sequence.max_tokens)
        self._observe("request_num_preemptions", sequence.preemptions)
        self._observe("request_prefill_kv_computed_tokens", len(sequence.prompt) - (sequence.cached or 0))
        if sequence.scheduled is not None and sequence.first_token is not None:
            self._phases(sequence, sequence.scheduled, sequence.first_token, sequence.last_token or now)

    def _phases(self, sequence: sequences.Sequence, scheduled: float, first: float, last: float) -> None:
        self._observe("request_queue_time_seconds", scheduled - sequence.arrived)
        self._observe("request_prefill_time_seconds", first - scheduled)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("request_inference_time_seconds", last - scheduled)
        more = sequence.generated - 1
        self._observe("request_time_per_output_token_seconds", (last - first) / more if more > 0 else 0.0)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


def _one_two_five(limit: int) -> Iterable[int]:
    """1, 2, 5, 10, 20, … up to `limit`."""
    return (
        digit * 10**power
        for power in range(len(str(limit)))
        for digit in (1, 2, 5)
        if digit * 10**power <= limit
    )
