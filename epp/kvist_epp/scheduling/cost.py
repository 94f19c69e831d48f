"""The cost of sending a request to each endpoint, in seconds, for comparing endpoints. Pure.

The cost is the sum of the ``TERMS`` below, each of which is one function and one number in ``/debug/pick``.
``docs/policy.md`` has the formula in force and what each constant does to goodput. ``wait + slot + load`` and
the unweighted work are also the predicted time to the first token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from kvist_epp.load.endpoint_load import EndpointLoad


@dataclass(frozen=True, slots=True)
class Policy:
    """Every constant of the cost. Figures are goodput in virtual time (``kvist bench route``)."""

    evicted: float = 3.0
    """Mean number of times that a token of an evicted block is computed again, at the pool's mean rate: other
    requests will compute it somewhere, so it costs no more on a slow GPU. 1 lost goodput
    on agents, groups and documents; 7 on uneven GPUs, and where one prefix is hot
    (``docs/decisions/0015``)."""
    price_running: float = 0.08
    """Added to the price per sequence on an endpoint, in the pool's mean (1/sequence). A second of prefill
    delays each of them by a second once, over hundreds of tokens. So a busy pool hardly copies and an idle
    one does. 0.15 lost goodput on system prompts and on uneven GPUs. The endpoint's own number instead of the
    mean splits the pool into endpoints that only prefill and endpoints that only decode."""
    price_kv_full: float = 30.0
    """Added to the price where every endpoint's KV cache is full and lets requests wait, in proportion where
    some are: there a copy takes the place of several requests that share the original. Without it groups at
    capacity lost 11 points of goodput; 10 gave back half of that."""
    running_seconds: float = 0.005
    """Per sequence on the endpoint: each slows every decode step. Without it, endpoints with cheap work
    collect sequences until their cache is full of them; 0.02 outweighs what waits there."""
    copy_seconds: float = 0.050
    """For a whole prompt recomputed although an endpoint holds it: a copy takes cache, and less than this is
    not felt. Without it, requests of a few hundred tokens left their endpoint because three had ended there
    that the access log had not reported yet (``docs/decisions/0003``)."""
    near_seconds: float = 0.001
    """Costs this close are a tie: 16 tokens of prefill, less than a step's jitter."""
    queued_share: float = 0.1
    """Fraction of the tokens queued for the endpoint that are added to a new request's predicted wait; below
    1 because the queue is last in, first out. With 1, prompts left their endpoint for one that had to copy
    them."""
    deferred_seconds: float = 0.2
    """Until an endpoint whose prefill is deferred (TPOT target) takes it up: 0 and 0.8 lost goodput on uneven
    GPUs, where small ones' KV caches stay full."""
    tight: float = 0.8
    """An endpoint is tight if its sequences leave less than this part of the pool's mean share of time for
    prompts (``load.tpot_admission``). With 0, small GPUs among large ones got what they could not take up,
    and requests waited there for a minute; 1 makes something of every difference between equal ones
    (``docs/decisions/0018``)."""
    copy_share: float = 0.9
    """An endpoint that holds this share of the longest match has a copy of the prefix."""
    sharing_power: float = 3.0
    """Exponent of ``share_of_copy``: a soft threshold at one expected use per copy. With the square a few
    endpoints never got a prefix that all others had (``docs/decisions/0015``)."""
    load_rates: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"CPU": 80_000.0, "STORAGE": 12_000.0}), hash=False
    )
    """Tokens/s loaded from a slower tier, by medium, until the endpoint's own are measured: 256 KiB a token
    (Qwen3-32B) over PCIe at 20 GB/s and from a disk at 3 GB/s. A medium that is not named is taken for the
    slowest that is."""


DEFAULT: Final = Policy()
AMONG_REPLICAS: Final = replace(DEFAULT, near_seconds=0.05)
"""Where other replicas route to the same endpoints: what they routed within a gossip interval (0.1 s) is not
known yet, a few prompts of a twentieth of a second each. All of them would follow smaller differences to the
same endpoint."""
TPOT_AMONG_REPLICAS: Final = replace(DEFAULT, near_seconds=0.01)
"""The same under a TPOT target: following costs a wait in the picker, no queue in an engine."""


def policy_among(others: int, *, tpot: bool) -> Policy:
    """Return the policy for ``others`` other replicas that route to the same endpoints; ``tpot``: with a TPOT
    target."""
    if not others:
        return DEFAULT
    return TPOT_AMONG_REPLICAS if tpot else AMONG_REPLICAS


class CachedPrefix(Protocol):
    """The part of a prompt that an endpoint has cached, as ``index.lookup`` finds it."""

    @property
    def tokens(self) -> int:
        """Cached tokens, from the start of the prompt."""

    @property
    def bytes(self) -> int:
        """Bytes of their text."""

    @property
    def lower(self) -> Mapping[str, int]:
        """Part of ``tokens`` that only a slower medium holds, by medium."""


NOTHING_LOWER: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Match:
    """A ``CachedPrefix`` from plain numbers."""

    tokens: int = 0
    bytes: int = 0
    lower: Mapping[str, int] = field(default_factory=lambda: NOTHING_LOWER, hash=False)


NO_MATCH: Final = Match()


class EndpointCost(msgspec.Struct, gc=False):
    """One endpoint for one request: what the terms read."""

    load: EndpointLoad
    hit: CachedPrefix
    uncached: int
    """Tokens to prefill there."""
    work: float
    """Seconds of prefill, undisturbed."""
    running: int
    prefill_share: float = 1.0
    """Part of its time that prefill may take (TPOT target)."""
    deferred: bool = False
    """It may not take up this prompt now (TPOT target)."""
    own: float = 0.0
    """Uncached tokens that this request answers for: others will use the rest of a copy."""
    loading: float = 0.0
    """Seconds of loading from slower tiers."""
    tightness: float = 1.0
    """Factor by which prefill takes longer than on the mean endpoint; at least 1."""


class PoolCost(msgspec.Struct, frozen=True, gc=False):
    """All endpoints for one request: what the terms share."""

    price: float
    """Of a second of work: 1 is the request's own time."""
    mean_rate: float
    """Prefill tokens/s."""
    least_uncached: int
    """On the endpoint that holds most of the prompt."""
    copy_seconds: float
    """Per copied token."""


def uncached_tokens(tokens: int, hit: CachedPrefix) -> int:
    """Return the tokens of a prompt left to prefill: one that is wholly cached still computes its last."""
    return max(tokens - hit.tokens, 1 if tokens else 0)


def slot_seconds(running: int, slots: int | None, decode_seconds: float) -> float:
    """Return the seconds until a sequence slot is free for one more request.

    A full batch of ``slots`` sequences that decode ``decode_seconds`` each frees a slot every
    ``decode_seconds / slots``; requests already waiting for one go first. 0 while there is a free slot or
    their number is unknown.
    """
    if slots is None or running < slots:
        return 0.0
    return (running - slots + 1) * decode_seconds / slots


def price_of_work(running: float, kv_full: float = 0.0, policy: Policy = DEFAULT) -> float:
    """Return the price of a second of work; ``running``: mean number of sequences per endpoint, ``kv_full``:
    share of endpoints whose KV cache is full."""
    return 1.0 + policy.price_running * running + policy.price_kv_full * kv_full


def share_of_copy(uses: float, copies: int, policy: Policy = DEFAULT) -> float:
    """Return the part of a copy's work that this request answers for.

    ``uses`` of the same prefix came in the last moments, and will come in the next ones; the new copy gets
    its share of them beside ``copies``. The power is a soft threshold at one expected use per copy: above it
    the cost of a copy is shared and approaches 0; below it the request pays almost all of it.
    """
    return 1.0 / (1.0 + math.pow(uses / (copies + 1), policy.sharing_power))


# Terms: seconds for each endpoint, in the order of ``rows``


def wait_term(rows: Sequence[EndpointCost], _pool: PoolCost, policy: Policy) -> list[float]:
    """Return the backlog at the endpoint's prefill rate, and a part of what is queued for it in the
    picker."""
    loads = [row.load for row in rows]
    seconds = [load.backlog_tokens / load.rate for load in loads]
    if loads[0].tpot is not None:  # of all endpoints, or of none
        share = policy.queued_share
        for at, load in enumerate(loads):
            if load.tpot is not None and load.tpot.queued_tokens:
                seconds[at] += share * load.tpot.queued_tokens / load.rate
    return seconds


def slot_term(rows: Sequence[EndpointCost], _pool: PoolCost, _policy: Policy) -> list[float]:
    """Return the time until a sequence slot is free where the batch is full, as far as the endpoint's mean
    time from first to last token is learned."""
    seconds = [0.0] * len(rows)
    for at, row in enumerate(rows):
        slots = row.load.slots
        if slots is not None and row.running >= slots:
            seconds[at] = slot_seconds(row.running, slots, row.load.decode_seconds or 0.0)
    return seconds


def deferral_term(rows: Sequence[EndpointCost], _pool: PoolCost, policy: Policy) -> list[float]:
    """Return the time until an endpoint under a TPOT target takes the prompt up."""
    return [policy.deferred_seconds * row.tightness if row.deferred else 0.0 for row in rows]


def work_term(rows: Sequence[EndpointCost], pool: PoolCost, _policy: Policy) -> list[float]:
    """Return the work that this request answers for, longer where the endpoint is tight, times its price.

    The price is 1, the request's own time, and more the more sequences run in the pool: each of them waits
    while a prompt is computed; and with the share of its endpoints whose KV cache is full.
    """
    price, least = pool.price, pool.least_uncached
    return [
        price * ((row.work if row.uncached == least else row.work * row.own / row.uncached) * row.tightness)
        for row in rows
    ]


def load_term(rows: Sequence[EndpointCost], _pool: PoolCost, _policy: Policy) -> list[float]:
    """Return the time to load what a slower tier holds (host memory, a disk, shared storage), after the loads
    that were sent before. Sequences that run do not wait for a load, so it has no price."""
    return [row.loading for row in rows]


def decode_term(rows: Sequence[EndpointCost], _pool: PoolCost, policy: Policy) -> list[float]:
    """Return a little per running sequence: each slows every decode step."""
    seconds = policy.running_seconds
    return [seconds * row.running for row in rows]


def eviction_term(rows: Sequence[EndpointCost], pool: PoolCost, policy: Policy) -> list[float]:
    """Return what others will have to compute again because the new blocks evict theirs."""
    evicted, rate = policy.evicted, pool.mean_rate
    return [evicted * row.own / rate for row in rows]


def copy_term(rows: Sequence[EndpointCost], pool: PoolCost, _policy: Policy) -> list[float]:
    """Return a little for the share of the prompt that another endpoint holds."""
    seconds, least = pool.copy_seconds, pool.least_uncached
    return [seconds * (row.uncached - least) for row in rows]


Term = Callable[[Sequence[EndpointCost], PoolCost, Policy], list[float]]

TERMS: Final[Mapping[str, Term]] = MappingProxyType(
    {
        "wait": wait_term,
        "slot": slot_term,
        "deferral": deferral_term,
        "work": work_term,
        "load": load_term,
        "decode": decode_term,
        "eviction": eviction_term,
        "copy": copy_term,
    }
)
"""In the order in which they are added."""
_TERMS: Final = tuple(TERMS.values())
TTFT_TERMS: Final = ("wait", "slot", "load")
"""Terms that, with the undisturbed work, predict the time to the first token."""


def terms(
    rows: Sequence[EndpointCost], tokens: int, uses: float, policy: Policy = DEFAULT
) -> list[list[float]]:
    """Return, for each of the ``TERMS``, the seconds of each endpoint. There must be an endpoint.

    ``tokens``: of the prompt. ``uses``: how often its prefix was asked for in the last moments. Sets ``own``
    and ``tightness`` of the rows.
    """
    return terms_in(_pool_cost(rows, tokens, uses, policy), rows, policy)


def terms_in(pool: PoolCost, rows: Sequence[EndpointCost], policy: Policy = DEFAULT) -> list[list[float]]:
    """Return the same for some endpoints of a pool, whose ``own`` and ``tightness`` are set."""
    return [term(rows, pool, policy) for term in _TERMS]


def terms_of_one(
    pool: PoolCost, row: EndpointCost, slot: float, policy: Policy = DEFAULT
) -> tuple[float, float, float, float, float, float, float, float]:
    """Return what ``terms_in`` returns of one endpoint without a TPOT target, at a third of its time.

    ``slot``: its ``slot_seconds``. The picked endpoint of each request is shown with its terms.
    """
    load, own = row.load, row.own
    work = row.work if row.uncached == pool.least_uncached else row.work * own / row.uncached
    return (
        load.backlog_tokens / load.rate,
        slot,
        0.0,
        pool.price * work,
        row.loading,
        policy.running_seconds * row.running,
        policy.evicted * own / pool.mean_rate,
        pool.copy_seconds * (row.uncached - pool.least_uncached),
    )


def _pool_cost(rows: Sequence[EndpointCost], tokens: int, uses: float, policy: Policy) -> PoolCost:
    running = kv_full = 0
    rate = share = 0.0
    for row in rows:
        load = row.load
        running += row.running
        rate += load.rate
        share += row.prefill_share
        if load.kv_full_at is not None:
            kv_full += 1
    count = len(rows)
    held = [row.hit.tokens for row in rows]
    least = min([row.uncached for row in rows])
    pool, part = pool_cost(running / count, kv_full / count, rate / count, least, held, tokens, uses, policy)
    complete(rows, pool, part, policy.tight * (share / count))
    return pool


def pool_cost(
    running: float,
    kv_full: float,
    mean_rate: float,
    least_uncached: int,
    held: Sequence[int],
    tokens: int,
    uses: float,
    policy: Policy = DEFAULT,
) -> tuple[PoolCost, float]:
    """Return what the terms share, and the part of a copy's work that this request answers for.

    ``running``: mean number of sequences per endpoint, ``kv_full``: share of endpoints whose KV cache is
    full, ``mean_rate``: prefill tokens/s, ``held``: tokens that endpoints hold of the prompt of ``tokens``,
    ``least_uncached``: on the one that holds most. ``uses``: how often its prefix was asked for lately.
    """
    most = max(held) if held else 0
    part = 1.0
    if uses and most:
        copied = policy.copy_share * most
        part = share_of_copy(uses, len([1 for each in held if each >= copied]), policy)
    price = price_of_work(running, kv_full, policy)
    return PoolCost(price, mean_rate, least_uncached, policy.copy_seconds / max(tokens, 1)), part


def complete(rows: Sequence[EndpointCost], pool: PoolCost, part: float, lean: float) -> None:
    """Set ``own`` and ``tightness`` of rows of a pool; ``lean``: the part of its time for prompts below which
    an endpoint is tight."""
    least = pool.least_uncached
    for row in rows:
        row.own = least + part * (row.uncached - least)
        if row.prefill_share < lean:
            row.tightness = lean / row.prefill_share
