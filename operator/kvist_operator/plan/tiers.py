"""Sizes of the places for KV cache blocks, and how long an idle conversation stays in each. Pure.

vLLM writes a block to the memory and to every file tier as soon as it is computed (``complete_store`` of
``v1/kv_offload/tiering/manager.py``), and each place drops the least recently used ones. A block therefore
stays in a place until as many newer tokens have been written there as it holds.
"""

from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import Pool

from .kv_transfer import engines_per_node
from .latency import decode_seconds, prefill_rate
from .plan import Choice, Hardware, Tier

CLEANED: Final = 0.75
"""Share of a folder that the cleaner always leaves: its low watermark."""
HINTS: Final = "spec.workload.promptTokens, outputTokens and concurrency"
NAMES: Final = {
    "gpu": "GPU memory",
    "host": "memory",
    "disk": "disk, which the cleaner leaves",
    "shared": "the claim, which the cleaner leaves",
    "lmcache": "LMCache's memory",
}


def bytes_per_token(memory: Memory, shape: ModelShape, hardware: Hardware) -> float:
    """Return the bytes of one token in memory or in a file: the parts of all ranks of an engine.

    Ranks of MLA models that only divide heads hold the same, which is kept once (``replicated_layout`` of
    ``offloading/config.py``).
    """
    layout = memory.layout
    once = shape.latent and layout.pipeline == layout.context == 1 and layout.tensor <= hardware.per_node
    return memory.bytes_per_token * (1 if once else layout.tensor * layout.pipeline)


def tiers(pool: Pool, shape: ModelShape, hardware: Hardware, memory: Memory) -> tuple[Tier, ...]:
    """Return all places for blocks of a replica, the fastest first; without ``spec.offload`` none."""
    offload = pool.offload
    if not offload.needs_connector or not memory.caches:
        return ()
    each, layout = bytes_per_token(memory, shape, hardware), memory.layout
    # an engine over several nodes has its parts in the memory of each
    nodes = hardware.nodes(layout) if layout.data > 1 else 1
    sizes = {"host": nodes * offload.cpu_bytes, "disk": nodes * CLEANED * offload.disk_bytes}
    if offload.shared:
        sizes["shared"] = CLEANED * offload.shared.size_bytes
    if offload.lmcache:
        sizes["lmcache"] = nodes * offload.lmcache.memory_bytes
    written = _tokens_per_second(pool, shape, hardware.accelerator, memory)
    busy = _tokens_in_use(pool)
    rate = written[0] if written else None
    found = [
        Tier(
            medium="gpu",
            size_bytes=int(memory.kv * layout.gpus),
            tokens=memory.kv_tokens,
            idle_seconds=_seconds(max(0, memory.kv_tokens - busy), rate),
        )
    ]
    for medium, size in sizes.items():
        if size:
            # a shared volume takes the blocks of all replicas
            writers = max(1, pool.replicas) if medium == "shared" else 1
            rate = written[1] * writers if written else None
            tokens = int(size / each)
            found.append(
                Tier(medium=medium, size_bytes=int(size), tokens=tokens, idle_seconds=_seconds(tokens, rate))
            )
    return tuple(found)


def _tokens_in_use(pool: Pool) -> int:
    """Return the tokens of running requests, whose shared prefix is there once."""
    hints = pool.workload
    shared = hints.shared_prefix_tokens or 0
    return shared + (hints.concurrency or 0) * ((hints.typical_tokens or 0) - shared)


def _seconds(tokens: float, rate: float | None) -> float | None:
    return None if rate is None else tokens / rate


def _tokens_per_second(
    pool: Pool, shape: ModelShape, gpu: Accelerator, memory: Memory
) -> tuple[float, float] | None:
    """Return the new tokens per second of a replica, in its GPUs and in slower places; None if the workload
    does not say enough.

    So many requests at once, each of which takes its turn to be computed and then a step for each token.
    """
    hints, layout = pool.workload, memory.layout
    if hints.prompt_tokens is None or hints.output_tokens is None or hints.concurrency is None:
        return None
    fresh = max(1, hints.prompt_tokens - (hints.shared_prefix_tokens or 0))
    alone = fresh / prefill_rate(shape, gpu, layout)
    length = hints.prompt_tokens + hints.output_tokens
    step = decode_seconds(shape, gpu, memory, hints.concurrency, length)
    requests = hints.concurrency / (_per_rank(hints.concurrency, layout) * alone + hints.output_tokens * step)
    kept = fresh + (hints.output_tokens if pool.offload.generated else 0)
    return requests * (fresh + hints.output_tokens), requests * kept


def _per_rank(concurrency: int, layout: Layout) -> int:
    return -(-concurrency // layout.data)


def describe_tiers(
    pool: Pool, shape: ModelShape, hardware: Hardware, memory: Memory, found: tuple[Tier, ...]
) -> list[Choice]:
    """Return what each place holds and for how long, and from which speed on it is of use, with reasons."""
    offload, layout = pool.offload, memory.layout
    if not found:
        return []
    choices = [Choice("offload", _summary(pool), _reason(pool), "spec.offload")]
    choices += [
        Choice(f"{tier.medium}Tier", f"{tier.tokens:,} tokens", _held(tier), _source(tier.medium))
        for tier in found
    ]
    rate = prefill_rate(shape, hardware.accelerator, layout)
    speed = rate * bytes_per_token(memory, shape, hardware) / 1e9
    reason = f"an engine computes about {rate:,.0f} tokens per second: a place that is slower delays requests"
    choices.append(Choice("loadingPaysFrom", f"{speed:.1f} GB/s", reason, "estimate of prefill"))
    if offload.lmcache and not offload.lmcache.memory_bytes:
        reason = "the server is not the operator's, so that its size is not known"
        choices.append(Choice("lmcacheTier", offload.lmcache.address, reason, _source("lmcache")))
    engines = engines_per_node(hardware, layout)
    if engines > 1 and offload.cpu_bytes:
        reason = f"spec.offload.cpu is divided among the {engines} data-parallel ranks of a pod"
        choices.append(Choice("cpuBytesToUse", offload.cpu_bytes // engines, reason, "spec.offload.cpu"))
    return choices


def _source(medium: str) -> str:
    return {"gpu": "memory", "host": "spec.offload.cpu"}.get(medium, f"spec.offload.{medium}")


def _summary(pool: Pool) -> str:
    offload = pool.offload
    parts = []
    if offload.cpu_bytes:
        parts.append(f"{offload.cpu_bytes / GIB:g} GiB of memory")
    if offload.disk_bytes:
        parts.append(f"{offload.disk_bytes / GIB:g} GiB of disk")
    if offload.shared:
        parts.append(f"{offload.shared.size_bytes / GIB:g} GiB of claim {offload.shared.claim}")
    if offload.lmcache:
        own = f"{offload.lmcache.memory_bytes / GIB:g} GiB of memory in LMCache's server on each node"
        parts.append(own if offload.lmcache.memory_bytes else f"LMCache at {offload.lmcache.address}")
    return ", then ".join(parts)


def _reason(pool: Pool) -> str:
    offload = pool.offload
    if offload.lmcache:
        return "blocks of prompts are sent to LMCache as they are computed, and loaded from there"
    reason = "blocks evicted from the GPU go to /dev/shm; its size and the memory limit are raised for them"
    if offload.disk_bytes:
        reason += "; the least recently used blocks on disk are removed before the volume is full"
    if offload.shared:
        reason += (
            "; replicas load what others have written to the claim, of which spec.offload.shared.size is used"
        )
    return reason


def _held(tier: Tier) -> str:
    held = f"{tier.size_bytes / GIB:,.1f} GiB of {NAMES[tier.medium]}"
    if tier.idle_seconds is None:
        return f"{held}; how long an idle conversation stays is not known: set {HINTS}"
    return f"{held}; an idle conversation stays about {duration(tier.idle_seconds)} at the workload's rate"


def duration(seconds: float) -> str:
    """Return a duration in words, rounded to two digits at most."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            number = seconds / size
            return f"{number:.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}".replace(".0", "")
    return f"{seconds:.0f} seconds"
