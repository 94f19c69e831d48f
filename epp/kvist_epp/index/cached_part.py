"""The cached part of a prompt on one endpoint, and what changes it. Pure."""

from collections.abc import Mapping

import msgspec

from kvist_epp.index.tree.matches import Hit
from kvist_epp.names import HOST_MEDIUM


class CachedPart(msgspec.Struct, frozen=True, gc=False):
    """Cached part of one request's prompts on one endpoint; a ``scheduling.cost.CachedPrefix``."""

    tokens: int
    bytes: int
    lower: Mapping[str, int]
    indexed: int
    """Tokens by the index alone, trusted or not: compared with the engine's true cache hits."""
    rank: int | None = None
    """Data-parallel rank that holds them; None: any."""
    elsewhere: Mapping[str, int] | None = None
    """Of ``indexed``: those on slower media, where that differs from ``lower``."""

    @property
    def indexed_lower(self) -> Mapping[str, int] | None:
        """Tokens of ``indexed`` that are on slower media, by medium; None: none are."""
        return (self.lower if self.elsewhere is None else self.elsewhere) or None


def with_storage(part: CachedPart, shared: Hit, medium: str) -> CachedPart:
    """Return what an endpoint holds with what follows it in shared storage."""
    tokens, lower, indexed, elsewhere = part.tokens, part.lower, part.indexed, part.indexed_lower or {}
    if tokens < shared.tokens:
        tokens, lower = shared.tokens, {**lower, medium: shared.tokens - tokens}
    if indexed < shared.tokens:
        indexed, elsewhere = shared.tokens, {**elsewhere, medium: shared.tokens - indexed}
    return CachedPart(tokens, max(part.bytes, shared.bytes), lower, indexed, part.rank, elsewhere)


def with_moved(part: CachedPart, source: str, target: str, tokens: int) -> CachedPart:
    """Return what an endpoint holds with some tokens of one medium counted as another's."""
    lower, elsewhere = _moved(part.lower, source, target, tokens), part.elsewhere
    if elsewhere is not None:
        elsewhere = _moved(elsewhere, source, target, tokens)
    return CachedPart(part.tokens, part.bytes, lower, part.indexed, part.rank, elsewhere)


def without_end(part: CachedPart, tokens: int) -> CachedPart | None:
    """Return what an endpoint holds without its last ``tokens``; None: nothing is left.

    They are taken from the GPU's part as long as it has enough: what follows there is loaded all the same,
    from one block earlier on.
    """
    left, indexed = max(0, part.tokens - tokens), max(0, part.indexed - tokens)
    if not (left or indexed):
        return None
    lower = _limited(part.lower, left)
    elsewhere = None if part.elsewhere is None else _limited(part.elsewhere, indexed)
    if elsewhere is None and part.lower and left != indexed:
        elsewhere = _limited(part.lower, indexed)
    size = part.bytes * left // max(1, part.tokens)
    return CachedPart(left, size, lower, indexed, part.rank, elsewhere)


def with_shorter_credit(part: CachedPart, tokens: int) -> CachedPart:
    """Return what an endpoint holds with the last ``tokens`` less of what was sent there and is not in the
    index yet."""
    left = max(part.indexed, part.tokens - tokens)
    if left >= part.tokens:
        return part
    lower = part.lower if left > part.indexed else part.indexed_lower or {}
    return CachedPart(left, part.bytes * left // part.tokens, lower, part.indexed, part.rank, part.elsewhere)


def summed(one: CachedPart, other: CachedPart) -> CachedPart:
    """Return what an endpoint holds of two prompts of one request."""
    return CachedPart(
        one.tokens + other.tokens,
        one.bytes + other.bytes,
        _joined(one.lower, other.lower),
        one.indexed + other.indexed,
        one.rank,
        _joined(one.indexed_lower or {}, other.indexed_lower or {}),
    )


def _limited(lower: Mapping[str, int], tokens: int) -> Mapping[str, int]:
    """Return the tokens by medium, at most ``tokens`` in all; what is too much is taken from storage first,
    where hits that go through host memory end."""
    excess = sum(lower.values()) - tokens
    if excess <= 0:
        return lower
    kept = dict(lower)
    for medium in sorted(kept, key=HOST_MEDIUM.__eq__):
        taken = min(kept[medium], excess)
        kept[medium] -= taken
        excess -= taken
    return {medium: count for medium, count in kept.items() if count}


def _moved(lower: Mapping[str, int], source: str, target: str, tokens: int) -> Mapping[str, int]:
    """Return the tokens by medium with some of one moved to another; unchanged where there are fewer, since
    what was sent there just now is on its way to the GPU."""
    moved = {**lower, source: lower.get(source, 0) - tokens, target: lower.get(target, 0) + tokens}
    return lower if moved[source] < 0 else {medium: count for medium, count in moved.items() if count}


def _joined(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {medium: one.get(medium, 0) + other.get(medium, 0) for medium in {*one, *other}}
