"""The rows of the table: traffic and fleet together. Sizes follow the pool, so that cases keep their
meaning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Final

from kvist_sim.engine.tiers import DISK, GIB, HOST, NETWORK, NVME, PCIE, SHARED, TierKind
from kvist_sim.engine.timing import KV_BYTES_PER_TOKEN
from kvist_sim.virtual.fleet import Change, Fleet
from kvist_sim.virtual.hardware import H100, Hardware
from kvist_sim.virtual.jobs import BLOCK
from kvist_sim.virtual.traffic import Shape
from kvist_sim.virtual.workloads import dialogues, prefixes


@dataclass(frozen=True, slots=True)
class Case:
    """Name, shape and pool of one workload."""

    name: str
    shape: Callable[[int], Shape]
    """For a pool of so many engines."""
    fleet: Callable[[int], Fleet]
    held_out: bool = False
    """True if the workload was not used while the policy was developed: only its final figures count."""


def even(engines: int) -> Fleet:
    """Return a pool of equal engines."""
    return Fleet((Hardware(),) * engines)


def small_caches(engines: int) -> Fleet:
    """Return a pool of equal engines with a third of the usual cache, which decoding sequences fill."""
    return Fleet((Hardware().scaled(1.0, 1 / 3),) * engines)


def uneven(engines: int) -> Fleet:
    """Every other GPU is half as fast and has a third of the cache: H100 and L40S by their data sheets'
    bandwidth and memory, roughly."""
    kinds = (Hardware(), Hardware().scaled(0.5, 0.35))
    return Fleet(tuple(islice(cycle(kinds), engines)))


def losing(engines: int) -> Fleet:
    """One pod is lost at half time and comes back, empty, when three quarters are over."""
    return replace(even(engines), changes=(Change(0.5, 0, up=False), Change(0.75, 0, up=True)))


def scaling(engines: int) -> Fleet:
    """A quarter of the pods comes at a third of the time, empty, and goes gently at four fifths."""
    extra = tuple(range(engines - max(1, engines // 4), engines))
    up = tuple(Change(1 / 3, one, up=True) for one in extra)
    down = tuple(Change(0.8, one, up=False, gently=True) for one in extra)
    return replace(even(engines), changes=up + down, absent=extra)


def rolling(engines: int) -> Fleet:
    """One pod after the other goes gently and comes back empty, over the middle of the run."""
    span = 0.6 / engines
    down = tuple(Change(0.3 + span * one, one, up=False, gently=True) for one in range(engines))
    up = tuple(Change(0.3 + span * (one + 0.5), one, up=True) for one in range(engines))
    return replace(even(engines), changes=tuple(sorted(down + up, key=lambda change: change.share)))


def memory_and_disk(engines: int) -> Fleet:
    """Each engine has 256 GiB of memory and a local drive for blocks: four times what its GPU holds, and
    thirty times."""
    tiers = (TierKind.of(HOST, 256 * GIB, PCIE, BLOCK), TierKind.of(DISK, 1920 * GIB, NVME, BLOCK))
    return replace(even(engines), tiers=tiers)


def memory_and_volume(engines: int) -> Fleet:
    """Each engine has 64 GiB of memory, as much as its GPU, and all of them one volume behind a network."""
    tiers = (TierKind.of(HOST, 64 * GIB, PCIE, BLOCK), TierKind.of(SHARED, 32 * 1024 * GIB, NETWORK, BLOCK))
    return replace(even(engines), tiers=tiers)


def memory_and_slow_disk(engines: int) -> Fleet:
    """Each engine has 64 GiB of memory and a disk that reads a block in four times the time to compute it."""
    bandwidth = KV_BYTES_PER_TOKEN * H100.prefill_tokens_per_second / 4
    tiers = (TierKind.of(HOST, 64 * GIB, PCIE, BLOCK), TierKind.of(DISK, 1920 * GIB, bandwidth, BLOCK))
    return replace(even(engines), tiers=tiers)


def _pool_tokens(engines: int) -> int:
    hardware = Hardware()
    return engines * hardware.blocks * hardware.block_size


def _system_prompts(engines: int) -> Shape:
    return Shape(
        name="system-prompts",
        summary="system prompts of 2,000-10,000 tokens, six an engine, Zipf 1.0, 800 + 300 tokens each",
        bursts=prefixes.system_prompts(6 * engines, (2_000, 10_000), 1.0),
        requests=1.0,
    )


def _groups(engines: int) -> Shape:
    return Shape(
        name="groups",
        summary="6,000-token prefixes that fill 45 % of all caches, 1,200 + 1,000 tokens each",
        bursts=prefixes.groups(round(0.45 * _pool_tokens(engines) / 6_000), 6_000, 1_200, 1_000),
        requests=1.0,
    )


def _tight(engines: int) -> Shape:
    return Shape(
        name="tight",
        summary="10,000-token prefixes that fill 70 % of all caches, 500 + 250 tokens each",
        bursts=prefixes.groups(round(0.7 * _pool_tokens(engines) / 10_000), 10_000, 500, 250),
        requests=1.0,
    )


def _hot(_engines: int) -> Shape:
    return Shape(
        name="hot-prefix",
        summary="one prefix of 8,000 tokens in 70 % of the requests, the others share nothing",
        bursts=prefixes.hot_prefix(0.7, 8_000),
        requests=1.0,
    )


def _unshared(_engines: int) -> Shape:
    return Shape(
        name="unshared",
        summary="prompts of 2,000 tokens (median) that share nothing",
        bursts=prefixes.unshared(2_000),
        requests=1.0,
    )


def _rollouts(_engines: int) -> Shape:
    return Shape(
        name="rollouts",
        summary="16 times one prompt of 1,500 tokens at once, answers of 600",
        bursts=prefixes.rollouts(16, 1_500, 600),
        requests=16.0,
        ttft=5.0,
    )


def _chat(engines: int) -> Shape:
    return Shape(
        name="chat",
        summary="chats of 3-9 turns, 10 s between, a system prompt of 900 tokens an engine",
        bursts=dialogues.chats(engines, (3, 9), 10.0),
        requests=6.0,
        standing=100.0,
    )


def _agents(engines: int) -> Shape:
    return Shape(
        name="agents",
        summary="6-24 tool calls, 2 s between, from 5,000 tokens to 30,000",
        bursts=dialogues.agents(engines, (6, 24)),
        requests=15.0,
        standing=80.0,
    )


def _documents(engines: int) -> Shape:
    return Shape(
        name="documents",
        summary="2-6 questions about documents of 8,000-32,000 tokens, five an engine, Zipf 0.7",
        bursts=dialogues.documents(5 * engines, (8_000, 32_000), 0.7, (2, 6)),
        requests=4.0,
        standing=70.0,
        ttft=5.0,
    )


def _code(engines: int) -> Shape:
    return Shape(
        name="code",
        summary="editors: 10-40 completions of 34 tokens, 3 s between, 3,500 tokens before the cursor",
        bursts=dialogues.completions(3 * engines, (10, 40)),
        requests=25.0,
        standing=90.0,
        ttft=1.0,
    )


def _reviews(engines: int) -> Shape:
    return Shape(
        name="reviews",
        summary="3,000-token prefixes that fill 25 % of all caches, 2,500 + 400 tokens each",
        bursts=prefixes.groups(round(0.25 * _pool_tokens(engines) / 3_000), 3_000, 2_500, 400),
        requests=1.0,
    )


def _tools(engines: int) -> Shape:
    return Shape(
        name="tools",
        summary="as agents: 3-10 calls, four kinds an engine",
        bursts=dialogues.agents(4 * engines, (3, 10)),
        requests=6.5,
        standing=30.0,
    )


def _returning(engines: int) -> Shape:
    return Shape(
        name="returning",
        summary="chats of 3-9 turns that come back after 90 s, about 6,000 tokens at the start",
        bursts=dialogues.returning(engines, (3, 9), 90.0),
        requests=6.0,
        standing=500.0,
    )


def _library(engines: int) -> Shape:
    return Shape(
        name="library",
        summary="questions about documents of 8,000-32,000 tokens, twice what all GPUs hold, Zipf 0.6",
        bursts=dialogues.documents(round(2 * _pool_tokens(engines) / 20_000), (8_000, 32_000), 0.6, (1, 2)),
        requests=1.5,
        standing=10.0,
        ttft=5.0,
    )


def _archive(engines: int) -> Shape:
    return Shape(
        name="archive",
        summary="as returning, after 180 s, with a disk that is slower than computing",
        bursts=dialogues.returning(engines, (3, 6), 180.0),
        requests=4.5,
        standing=700.0,
    )


def _lengths(name: str, summary: str, *kinds: tuple[float, int, int]) -> Callable[[int], Shape]:
    """Return a workload for disaggregation, with a TPOT that prompts of others on the same engine
    endanger."""

    def shape(_engines: int) -> Shape:
        return Shape(
            name=name, summary=summary, bursts=prefixes.lengths(kinds), requests=1.0, tpot=TIGHT_TPOT
        )

    return shape


def _bursts(_engines: int) -> Shape:
    return Shape(
        name="pd-bursts",
        summary="500 tokens in, 400 out; and one time in 40, 16 prompts of 6,000 tokens at once",
        bursts=prefixes.long_bursts(1 / 40, 16, 6_000, 400),
        requests=1.0 + 15 / 40,
        ttft=3.0,
        tpot=TIGHT_TPOT,
    )


TIGHT_TPOT: Final = 0.040
"""Seconds per token after the first: 25 tokens a second, for agents and speech."""
DISAGGREGATION_CASES: Final = (
    Case("pd-long-short", _lengths("pd-long-short", "6,000 tokens in, 100 out", (1.0, 6_000, 100)), even),
    Case(
        "pd-short-long",
        _lengths("pd-short-long", "1,000 tokens in, 1,000 out, a third of the cache", (1.0, 1_000, 1_000)),
        small_caches,
    ),
    Case(
        "pd-mixed",
        _lengths(
            "pd-mixed", "half as long-short, half as short-long", (0.5, 6_000, 100), (0.5, 1_000, 1_000)
        ),
        even,
    ),
    Case("pd-bursts", _bursts, even),
)
"""Workloads of the table of disaggregation."""

CASES: Final = (
    Case("system-prompts", _system_prompts, even),
    Case("groups", _groups, even),
    Case("hot-prefix", _hot, even),
    Case("chat", _chat, even),
    Case("unshared", _unshared, even),
    Case("uneven", _system_prompts, uneven),
    Case("tight", _tight, even),
    Case("agents", _agents, even),
    Case("documents", _documents, even),
    Case("code", _code, even),
    Case("rollouts", _rollouts, even),
    Case("pod-lost", _system_prompts, losing),
    Case("scaling", _chat, scaling),
    Case("returning", _returning, memory_and_disk),
    Case("library", _library, memory_and_volume),
    Case("archive", _archive, memory_and_slow_disk),
    Case("reviews", _reviews, even, held_out=True),
    Case("tools", _tools, even, held_out=True),
)
"""In the order of tables."""
