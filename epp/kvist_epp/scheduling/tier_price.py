"""The price of what slower tiers hold: seconds of loading, or of computing where that is quicker. Pure.

A block of a tier is loaded by the engine of its own accord. Where loading takes longer than computing, and
the engine can be kept from it, its tokens count as not cached: where the tier was measured to be slower
(``EndpointLoad.skipped_media``), and where loads that were sent before have not come to an end
(``EndpointLoad.loading_until``), since a tier reads for one request after the other.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvist_epp.load.endpoint_load import EndpointLoad, lane


class TierLoad(msgspec.Struct, frozen=True):
    """Tokens of a prompt that one slower medium holds on an endpoint."""

    medium: str
    tokens: int
    seconds: float
    """Of loading them."""
    queue_seconds: float
    """Until the loads that were sent before are done."""
    compute_seconds: float
    """Of computing them instead, undisturbed."""
    skipped: bool
    """They are computed, and the request keeps the engine from loading them."""


class PricedPrefix(msgspec.Struct, frozen=True):
    """The cached part of a prompt on one endpoint, with the price of loading; a ``cost.CachedPrefix``."""

    tokens: int
    """Cached tokens without those that are skipped."""
    bytes: int
    lower: Mapping[str, int]
    loading: float
    """Seconds of loading, and of waiting for other loads."""
    loads: tuple[TierLoad, ...]
    """By medium, the quickest first."""


def price_tiers(
    load: EndpointLoad,
    tokens: int,
    size: int,
    lower: Mapping[str, int],
    defaults: Mapping[str, float],
    now: float,
) -> PricedPrefix:
    """Return the price of a cached prefix of which slower media hold a part.

    ``tokens``, ``size``: of the whole prefix, in tokens and bytes; ``lower``: its tokens by slower medium.
    ``defaults``: tokens/s by medium where the endpoint's own are not measured; a medium that is not named
    has the slowest. What follows a skipped part of a prefix cannot be used, so slower media are skipped, too.

    Example: 1,000 tokens of which host memory holds 600 and a disk 300; loads of 60,000 and 3,000 tokens/s
    take 10 and 100 ms. At a prefill rate of 15,000 tokens/s, the disk's 300 take 20 ms to compute: with the
    disk skipped, 700 tokens count as cached, and 10 ms as loading. Another load that occupies the memory for
    35 ms more makes them 45 ms, since the 600 tokens would also take 40 ms to compute: they are skipped.
    """
    rates, slowest = load.tier_rates, min(defaults.values())
    by_rate = sorted(((rates.get(m) or defaults.get(m, slowest), m) for m in lower), reverse=True)
    own: dict[str, float] = {}  # seconds of loading less those of computing, by lane
    for rate, medium in by_rate:
        own[lane(medium)] = own.get(lane(medium), 0.0) + lower[medium] * (1 / rate - 1 / load.rate)
    found: list[TierLoad] = []
    skipping, loading, waited = False, 0.0, set[str]()
    for rate, medium in by_rate:
        held, way = lower[medium], lane(medium)
        wait = max(0.0, load.loading_until.get(way, now) - now)
        late = load.limits_loads and wait > 0 and wait + own[way] > 0
        skipping = skipping or late or medium in load.skipped_media
        found.append(TierLoad(medium, held, held / rate, wait, held / load.rate, skipping))
        if skipping:
            tokens -= held
            continue
        loading += held / rate + (0.0 if way in waited else wait)
        waited.add(way)
    return PricedPrefix(max(0, tokens), size, lower, loading, tuple(found))


def note_loads(load: EndpointLoad, loads: Sequence[TierLoad], *, limited: bool, now: float) -> frozenset[str]:
    """Note what an endpoint will load of a request that is sent there; return the media from which it must
    not load. ``limited``: the request's body says so; else the engine loads from all."""
    skipped = frozenset([one.medium for one in loads if one.skipped and limited])
    for one in loads:
        if one.medium not in skipped:
            load.occupy(one.medium, one.seconds, now)
    return skipped
