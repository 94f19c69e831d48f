"""The price of what slower tiers hold: seconds of loading, or of computing where that is quicker. Pure.

A block of a tier is loaded by the engine of its own accord. Where loading takes longer than computing, and
the engine can be kept from it (``EndpointLoad.skipped_media``), its tokens count as not cached.
"""

from collections.abc import Mapping

import msgspec

from kvist_epp.load.endpoint_load import EndpointLoad


class TierLoad(msgspec.Struct, frozen=True):
    """Tokens of a prompt that one slower medium holds on an endpoint."""

    medium: str
    tokens: int
    seconds: float
    """Of loading them."""
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
    """Seconds of loading."""
    loads: tuple[TierLoad, ...]
    """By medium, the quickest first."""


def price_tiers(
    load: EndpointLoad, tokens: int, size: int, lower: Mapping[str, int], defaults: Mapping[str, float]
) -> PricedPrefix:
    """Return the price of a cached prefix of which slower media hold a part.

    ``tokens``, ``size``: of the whole prefix, in tokens and bytes; ``lower``: its tokens by slower medium.
    ``defaults``: tokens/s by medium where the endpoint's own are not measured; a medium that is not named
    has the slowest. What follows a skipped part of a prefix cannot be used, so slower media are skipped, too.

    Example: 1,000 tokens of which host memory holds 600 and a disk 300; loads of 60,000 and 3,000 tokens/s
    take 10 and 100 ms. At a prefill rate of 15,000 tokens/s, the disk's 300 take 20 ms to compute: with the
    disk skipped, 700 tokens count as cached, and 10 ms as loading.
    """
    rates, slowest = load.tier_rates, min(defaults.values())
    found: list[TierLoad] = []
    skipping, loading = False, 0.0
    by_rate = sorted(((rates.get(m) or defaults.get(m, slowest), m) for m in lower), reverse=True)
    for rate, medium in by_rate:
        held = lower[medium]
        skipping = skipping or medium in load.skipped_media
        one = TierLoad(medium, held, held / rate, held / load.rate, skipping)
        found.append(one)
        if skipping:
            tokens -= held
        else:
            loading += one.seconds
    return PricedPrefix(max(0, tokens), size, lower, loading, tuple(found))
