"""The part of a prompt that an endpoint has cached, by the index and by what was sent there. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvist_epp.index.tree.matches import MISS, Hit, Matches
from kvist_epp.names import HOST_MEDIUM


@dataclass(slots=True)
class Member:
    """One endpoint as the look-up sees it."""

    publishers: tuple[int, ...]
    """Number of each data-parallel rank in the index; empty: the endpoint publishes no events."""
    precise: bool = True
    """Its events are trusted; changed by ``Lookup.set_precise``."""
    block_size: int = 16
    """Tokens; used where only bytes are known."""
    storage: str | None = None
    """Name of the storage that its engine shares with others; None: it shares none."""
    drops_last_block: bool = False
    """Its engine computes the last block of each hit again (``last_block``)."""
    event_block_size: int = 0
    """Tokens of a block in its engine's events, as the last hit has shown; 0: none has."""

    @property
    def hit_block_size(self) -> int:
        """Tokens of a block of its hits."""
        return self.event_block_size or self.block_size


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


def cached_part(
    member: Member, matches: Matches, hit: Hit, rank: int | None, routed: int, size: int, ratio: float
) -> CachedPart | None:
    """Return what an endpoint holds of a prompt of ``size`` bytes, of which ``routed`` bytes were sent there;
    ``hit``, ``rank``: by the index. None: nothing."""
    if member.precise and routed <= hit.bytes:
        return CachedPart(hit.tokens, hit.bytes, hit.lower, hit.tokens, rank) if hit.tokens else None
    tokens = _estimated(routed, size, member.block_size, ratio, matches if member.precise else None)
    if member.precise and tokens <= hit.tokens:
        return CachedPart(hit.tokens, hit.bytes, hit.lower, hit.tokens, rank) if hit.tokens else None
    # what was sent there just now is on its way to the GPU, whatever tier holds it
    if not (tokens or hit.tokens):
        return None
    return CachedPart(tokens, routed, {}, hit.tokens, rank, hit.lower or None)


def best_rank(member: Member, matches: Matches) -> tuple[Hit, int | None]:
    """Return the best hit among the ranks of an endpoint; a rank is named only where it matters."""
    if len(member.publishers) == 1:
        return matches.of(member.publishers[0]), None
    best, rank = MISS, None
    for number, publisher in enumerate(member.publishers):
        hit = matches.of(publisher)
        if hit.tokens > best.tokens:
            best, rank = hit, number
    return best, rank


def _estimated(routed: int, size: int, block_size: int, ratio: float, matches: Matches | None) -> int:
    """Whole blocks in ``routed`` bytes, never the prompt's last token; exact as far as blocks tell."""
    tokens, known = 0, 0
    if matches is not None and matches.groups and matches.groups[0][2] <= routed:
        tokens, known = matches.groups[0][1:3]
    last = 1 if routed >= size else 0  # the engine computes a prompt's last token whatever it holds
    tokens += int((routed - known) / ratio - last)
    return max(tokens, 0) // block_size * block_size


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
