"""Parser of vLLM's ``/metrics`` and ``/v1/models``, and rates derived from successive samples. No I/O.

Names and labels are vLLM's (``vllm/v1/metrics/loggers.py``, ``vllm/entrypoints/openai/models``). One regular
expression finds the few lines needed among a thousand; absent or malformed values are skipped. Data-parallel
ranks (label ``engine``) are summed.
"""

import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvist_epp.engines.vllm import tier_metrics, transfer_metrics
from kvist_epp.engines.vllm.tier_metrics import NO_TIERS, TierCounters
from kvist_epp.engines.vllm.transfer_metrics import NO_TRANSFERS, TransferCounters

_LABELS = r'(?:[^"\n}]|"(?:\\.|[^"\\\n])*")*'
_NAMES: Final = (
    r"num_(?:requests_(?:running|waiting)|preemptions_total)|kv_cache_usage_perc|cache_config_info"
    r"|prefix_cache_(?:queries|hits)_total|prompt_tokens_(?:total|by_source_total)|generation_tokens_total"
    r"|request_(?:prefill_(?:time_seconds_(?:sum|count)|kv_computed_tokens_sum)"
    r"|decode_time_seconds_(?:sum|count)|time_per_output_token_seconds_(?:sum|count))"
    rf"|{tier_metrics.NAMES}|{transfer_metrics.NAMES}"
)
_LINE: Final = re.compile(rf"^vllm:({_NAMES})(?:\{{({_LABELS})\}})?[ \t]+(\S+)", re.MULTILINE)
_NEEDED: Final = re.compile(rf"\nvllm:(?:{_NAMES})[{{ \t][^\n]*".encode())
"""Begins with plain bytes, for which a page is searched ten times as fast as for the start of a line."""
_TIER_NAMES: Final = ("kv_offload_", "prompt_tokens_cached_by_source_")
FULL_CACHE: Final = 0.95
"""KV cache usage from which queued requests wait for blocks, not for their turn to prefill."""
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)="((?:\\.|[^"\\\n])*)"')


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Metrics of one scrape. Counters are totals since the engine started; metrics that the engine does not
    export are 0 or None."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    """Requests in the engine's queue."""
    cache_usage: float = 0.0
    """Share of KV cache blocks in use, 0..1, of the fullest rank. Blocks that can be evicted do not count."""
    block_size: int | None = None
    """Tokens per block."""
    blocks: int | None = None
    """KV cache blocks of all ranks."""
    size_tokens: int | None = None
    """Size of all ranks' KV caches in tokens as the engine reports it (label ``kv_cache_size_tokens``). Where
    layers differ, it cannot be computed from the number of blocks."""
    queries: float = 0.0
    """Prompt tokens looked up in the prefix cache."""
    hits: float = 0.0
    """Prompt tokens found there."""
    preemptions: float = 0.0
    """Requests whose blocks were freed, and have to be computed again."""
    prompt_tokens: float = 0.0
    computed_tokens: float = 0.0
    """Prompt tokens computed, not cached, of requests that got their first token; in older engines
    ``prompt_tokens - hits``."""
    generation_tokens: float = 0.0
    prefills: float = 0.0
    """Finished requests that ``prefill_seconds`` and ``prefill_tokens`` sum over."""
    prefill_seconds: float = 0.0
    prefill_tokens: float = 0.0
    decodes: float = 0.0
    decode_seconds: float = 0.0
    token_times: float = 0.0
    """Finished requests whose mean time per output token is in ``token_seconds``."""
    token_seconds: float = 0.0
    tiers: TierCounters = NO_TIERS
    transfers: TransferCounters = NO_TRANSFERS

    @property
    def cache_tokens(self) -> int | None:
        """Size of the KV cache in tokens, computed from its blocks; None when unknown."""
        return None if self.blocks is None or self.block_size is None else self.blocks * self.block_size

    @property
    def reported_tokens(self) -> int | None:
        """Size of the KV cache in tokens as the engine reports it, else ``cache_tokens``."""
        return self.size_tokens or self.cache_tokens

    @property
    def kv_full(self) -> bool:
        """True if requests wait because the KV cache is full."""
        return self.waiting > 0 and self.cache_usage >= FULL_CACHE


def needed_lines(page: bytes) -> bytes:
    """Return the lines of a page that ``parse_metrics`` reads; of an idle engine always the same.

    Raises ``ValueError`` if the page is not vLLM's, since other servers have a /metrics too.
    """
    if b"vllm:num_requests_running" not in page:
        raise ValueError("its /metrics page is not vLLM's")
    lines = b"".join(_NEEDED.findall(b"\n" + page))
    if b"vllm:num_requests_running" not in lines:
        raise ValueError("its /metrics page has no value of vllm:num_requests_running")
    return lines


def page_digest(page: bytes) -> int:
    """Return a number that is the same while nothing of vLLM's own changes, at a quarter of the cost of
    ``needed_lines``. What comes before is the process's, whose CPU time changes in an idle engine, too."""
    return hash(page[max(0, page.find(b"vllm:") - 1) :])


def parse_metrics(text: str) -> EngineSample:
    """Parse Prometheus text. Never raises: a page without any of the metrics gives the empty sample."""
    totals: dict[str, float] = {}
    usage = 0.0
    block_size: int | None = None
    blocks: int | None = None
    size_tokens: int | None = None
    local_compute: float | None = None
    received = 0.0
    tiers: list[tuple[str, str, float]] = []
    for name, labels, raw in _LINE.findall(text):
        value = _number(raw)
        if value is None:
            continue
        if name == "cache_config_info":
            found = dict(_LABEL.findall(labels))
            block_size = _whole(found.get("block_size")) or block_size
            rank_blocks = _whole(found.get("num_gpu_blocks"))
            blocks = blocks if rank_blocks is None else (blocks or 0) + rank_blocks
            rank_tokens = _whole(found.get("kv_cache_size_tokens"))
            size_tokens = size_tokens if rank_tokens is None else (size_tokens or 0) + rank_tokens
        elif name == "kv_cache_usage_perc":
            usage = max(usage, value)
        elif name == "prompt_tokens_by_source_total":
            if 'source="local_compute"' in labels:
                local_compute = (local_compute or 0.0) + value
            elif transfer_metrics.TOKENS_SOURCE in labels:
                received += value
        elif name.startswith(_TIER_NAMES):
            tiers.append((name, labels, value))
        else:
            totals[name] = totals.get(name, 0.0) + value
    get = totals.get
    seconds, size = get("nixl_xfer_time_seconds_sum", 0.0), get("nixl_bytes_transferred_sum", 0.0)
    prompt, hits = get("prompt_tokens_total", 0.0), get("prefix_cache_hits_total", 0.0)
    return EngineSample(
        running=max(0, int(get("num_requests_running", 0.0))),
        waiting=max(0, int(get("num_requests_waiting", 0.0))),
        cache_usage=usage,
        block_size=block_size,
        blocks=blocks,
        size_tokens=size_tokens,
        queries=get("prefix_cache_queries_total", 0.0),
        hits=hits,
        preemptions=get("num_preemptions_total", 0.0),
        prompt_tokens=prompt,
        computed_tokens=max(0.0, prompt - hits) if local_compute is None else local_compute,
        generation_tokens=get("generation_tokens_total", 0.0),
        prefills=get("request_prefill_time_seconds_count", 0.0),
        prefill_seconds=get("request_prefill_time_seconds_sum", 0.0),
        prefill_tokens=get("request_prefill_kv_computed_tokens_sum", 0.0),
        decodes=get("request_decode_time_seconds_count", 0.0),
        decode_seconds=get("request_decode_time_seconds_sum", 0.0),
        token_times=get("request_time_per_output_token_seconds_count", 0.0),
        token_seconds=get("request_time_per_output_token_seconds_sum", 0.0),
        tiers=tier_metrics.tier_counters(tiers) if tiers else NO_TIERS,
        transfers=TransferCounters(seconds, size, received) if seconds else NO_TRANSFERS,
    )


def _number(raw: str) -> float | None:
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(raw: str | None) -> int | None:
    return int(raw) if raw and raw.isascii() and raw.isdigit() and len(raw) < 16 else None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models that an engine lists in ``/v1/models``."""

    models: frozenset[str] = frozenset()
    """Names of the base model."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters: entries with a parent."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and completion together."""


class _Entry(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Entry]


def parse_models(body: bytes) -> ServedModels:
    """Parse the body of ``GET /v1/models``. Raises ``ValueError`` when it is not vLLM's list."""
    try:
        entries = msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a list of models: {error}") from None
    except RecursionError:
        raise ValueError("not a list of models: nested too deeply") from None
    lengths = [e.max_model_len for e in entries if e.max_model_len is not None]
    return ServedModels(
        models=frozenset(e.id for e in entries if e.parent is None),
        adapters=frozenset(e.id for e in entries if e.parent is not None),
        max_model_len=min(lengths, default=None),
    )


@dataclass(slots=True)
class EngineRates:
    """Rates of one engine derived from successive samples; None while unknown.

    vLLM sums prefill time over requests that overlap in one batch, and each of them waits for the whole step.
    On a busy engine with a warm cache, tokens divided by that time gave a quarter of the true rate: prompts
    avoided such endpoints and overloaded the others (``kvist bench route``). The prefill rate is therefore
    updated only from windows in which hardly any prefills overlapped, and in which prompts were long enough
    for the fixed cost of a step to be negligible.
    """

    WINDOW_SECONDS = 30.0
    MIN_TOKENS = 4_000.0
    MIN_TOKENS_PER_PREFILL = 2_000.0
    """At 15,928 tokens/s, 2,000 tokens take 126 ms: six times the fixed cost of a step."""
    OVERLAP = 0.2
    """Mean number of prefills in progress (Little's law) above which they overlap too much: at 0.2, one
    prefill in five starts while another runs."""
    STEADY = 1.2
    """Maximum ratio of the tokens computed to those of finished requests. While a batch fills up, more
    requests start than end, and the few that ended do not show how many overlapped."""
    BOUNDS = (50.0, 2_000_000.0)
    """Range of credible prefill tokens/s; counters that give a rate outside of it are wrong."""
    SMOOTHING = 0.3
    """Weight of the new window in the average: the past loses 30 % of its weight with each window."""

    prefill: float | None = None
    """Prefill tokens/s."""
    decode_seconds: float | None = None
    """Mean seconds from the first to the last token."""
    token_seconds: float | None = None
    """Mean seconds per output token."""
    hit_ratio: float | None = None
    """Prefix cache hits per token looked up, over the window."""
    _window: deque[tuple[float, EngineSample]] = field(default_factory=deque)
    _updated_at: float = -math.inf

    def observe(self, sample: EngineSample, now: float) -> None:
        """Add a sample taken at ``now`` seconds of a monotonic clock."""
        if self._window and sample.prompt_tokens < self._window[-1][1].prompt_tokens:
            self._window.clear()  # the engine restarted: its counters start from zero
        while len(self._window) > 1 and now - self._window[1][0] >= self.WINDOW_SECONDS:
            self._window.popleft()
        if self._window:
            since, first = self._window[0]
            self._update(first, sample, now - since, now)
        self._window.append((now, sample))

    def _update(self, first: EngineSample, last: EngineSample, wall: float, now: float) -> None:
        self.decode_seconds = (
            _mean(last.decode_seconds - first.decode_seconds, last.decodes - first.decodes)
            or self.decode_seconds
        )
        self.token_seconds = (
            _mean(last.token_seconds - first.token_seconds, last.token_times - first.token_times)
            or self.token_seconds
        )
        looked_up = last.queries - first.queries
        if looked_up > 0:
            self.hit_ratio = min(1.0, max(0.0, (last.hits - first.hits) / looked_up))
        rate = self._prefill_rate(first, last, wall)
        if rate is None or now - self._updated_at < self.WINDOW_SECONDS / 10:
            return
        self._updated_at = now
        self.prefill = rate if self.prefill is None else self.prefill + self.SMOOTHING * (rate - self.prefill)

    def _prefill_rate(self, first: EngineSample, last: EngineSample, wall: float) -> float | None:
        tokens = last.prefill_tokens - first.prefill_tokens
        prefills = last.prefills - first.prefills
        seconds = last.prefill_seconds - first.prefill_seconds
        few = tokens < self.MIN_TOKENS or tokens < self.MIN_TOKENS_PER_PREFILL * prefills
        filling = last.computed_tokens - first.computed_tokens > self.STEADY * tokens
        if few or filling or not 0 < seconds <= self.OVERLAP * wall:
            return None
        low, high = self.BOUNDS
        rate = tokens / seconds
        return rate if low <= rate <= high else None


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 and total > 0 else None
