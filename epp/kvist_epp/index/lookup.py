"""The look-up: how much of a prompt each endpoint has cached. Pure.

On a precise endpoint that is what its own events say, plus the prompts just sent there until their events
arrive (cache credit). On an approximate endpoint it is the routing history alone.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from kvist_epp.index.alike_endpoints import MANY, AlikeEndpoints
from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.cached_part import (
    CachedPart,
    Member,
    best_rank,
    cached_part,
    summed,
    with_moved,
    with_shorter_credit,
    with_storage,
    without_end,
)
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.index.tree.matches import MISS, Hit, Matches
from kvist_epp.index.tree.segment import Segment
from kvist_epp.names import HOST_MEDIUM, LMCACHE_MEDIUM, SHARED_MEDIUM, STORAGE_MEDIUM

RATIO_TOKENS: Final = 64
"""Tokens a match needs for its own bytes per token to count."""
PLACE_BYTES: Final = 64
"""Bytes before the end of a routed prefix that, with their position, tell one prefix from another."""
RATIO_WEIGHT: Final = 0.05
"""How much one such match moves the running mean."""


class Found(msgspec.Struct):
    """Result of a look-up."""

    size: int
    """Bytes of all prompts."""
    tokens: int
    """Their tokens: exact as far as the index has matching blocks, estimated beyond."""
    hits: dict[str, CachedPart]
    """By endpoint key; endpoints that hold nothing are absent."""
    matches: tuple[Matches, ...] = ()
    """Where in the index the hits of each prompt end."""
    place: Hashable = None
    """Where the longest hit of the first prompt ends: equal for requests that begin alike; None: nowhere."""

    def ends(self) -> Iterator[tuple[Segment, int]]:
        """Yield where the longest match of each prompt on any publisher ends: a segment, and a number of its
        blocks."""
        for matches in self.matches:
            if matches.groups:
                _, tokens, _, _, segment = matches.groups[0]
                yield segment, tokens // segment.tree.block_size - segment.base


class Lookup:
    """The look-up of all endpoints; ``members`` follow the set of endpoints."""

    def __init__(self, index: Index, history: RoutingHistory, *, bytes_per_token: float = 4.0) -> None:
        self.members: dict[str, Member] = {}
        """By endpoint key; changed by ``join`` and ``leave``."""
        self.bytes_per_token = bytes_per_token
        """Running mean over matches; the prior until there are any."""
        self.remote_prefixes: Callable[[Root, bytes], Mapping[str, int]] | None = None
        """Returns the bytes of a prompt's prefix that other replicas sent to each endpoint; None: there are
        no other replicas."""
        self.storages: Mapping[str, int] = {}
        """Numbers in the index of the storages that engines share, by name, once they hold blocks."""
        self.chunks: Mapping[str, int] = {}
        """Tokens of the blocks of those storages that are servers of LMCache, by name."""
        self.drops_last_block = False
        """Some endpoint's engine computes the last block of each hit again."""
        self._sharers: dict[str, set[str]] = {}
        """Endpoints by the storage that they share."""
        self._owners: dict[int, str] = {}
        self._alike = AlikeEndpoints()
        self._index = index
        self._history = history

    def join(self, key: str, member: Member) -> None:
        """Add an endpoint to the look-up."""
        self.members[key] = member
        self._owners |= dict.fromkeys(member.publishers, key)
        self._alike.forget()
        self.join_storage(key, member.storage)

    def join_storage(self, key: str, storage: str | None) -> None:
        """Count what shared storage of this name holds for an endpoint; None: none."""
        self.members[key].storage = storage
        if storage is not None:
            self._sharers.setdefault(storage, set()).add(key)

    def set_precise(self, key: str, *, precise: bool) -> None:
        """Set whether an endpoint's events are trusted."""
        if self.members[key].precise != precise:
            self.members[key].precise = precise
            self._alike.forget()

    def leave(self, key: str) -> None:
        """Remove an endpoint from the look-up."""
        self.part_from_storage(key)
        self._alike.forget()
        for publisher in self.members.pop(key).publishers:
            del self._owners[publisher]

    def part_from_storage(self, key: str) -> None:
        """Do not count what shared storage holds for this endpoint any longer."""
        member = self.members[key]
        if member.storage is not None:
            self._sharers[member.storage].discard(key)
            member.storage = None

    def blocks(self, member: Member) -> dict[str, int]:
        """Return the blocks of an endpoint by medium, over all ranks; a shared storage's are each's."""
        held: dict[str, int] = {}
        for publisher in member.publishers:
            for medium, count in self._index.blocks(publisher).items():
                held[medium] = held.get(medium, 0) + count
        if member.storage is not None and (number := self.storages.get(member.storage)) is not None:
            held |= self._index.blocks(number)
        return held

    def usable(self, key: str, matches: Matches, hit: Hit) -> Hit:
        """Return what an endpoint uses of what it holds itself, with what follows it in the storage that it
        shares. Notes how large the blocks of its hits are."""
        member = self.members.get(key)
        if member is None:
            return hit
        for publisher in member.publishers:
            if (end := matches.end(publisher)) is not None:
                member.event_block_size = end[0].tree.block_size
        part = CachedPart(hit.tokens, hit.bytes, hit.lower, hit.tokens)
        if member.storage is not None and (number := self.storages.get(member.storage)) is not None:
            shared, medium = self._shared(member.storage, number, matches)
            if shared.tokens > hit.tokens:
                part = with_storage(part, shared, medium)
        used = without_end(part, member.hit_block_size) if self._drops(member) else part
        return MISS if used is None else Hit(used.tokens, used.bytes, used.lower)

    def other_hit(self, publisher: int, root: Root, prompt: bytes) -> int | None:
        """Return the tokens that a publisher would hold if it had the other habit (``last_block``); None: a
        block less or more."""
        if not self._index.has_windows(publisher):
            return None
        habit = self._index.drops_last_block(publisher, True)
        self._index.drops_last_block(publisher, not habit)
        try:
            return self._index.match(root, prompt).of(publisher).tokens
        finally:
            self._index.drops_last_block(publisher, habit)

    def _drops(self, member: Member) -> bool:
        """Return whether the last block of its hits has to be left out; matches with windows end before
        it."""
        return member.drops_last_block and not any(map(self._index.has_windows, member.publishers))

    def _shared(self, name: str, number: int, matches: Matches) -> tuple[Hit, str]:
        """Return what a storage holds of a prompt, and its medium. LMCache gives whole blocks of its own."""
        hit, chunk = matches.of(number), self.chunks.get(name)
        if chunk is None:
            return hit, SHARED_MEDIUM
        tokens = hit.tokens // chunk * chunk
        size = hit.bytes * tokens // hit.tokens if tokens < hit.tokens else hit.bytes
        return Hit(tokens, size, hit.lower), LMCACHE_MEDIUM

    def look(self, root: Root, prompts: Sequence[bytes], *, learn: bool = True) -> Found:
        """Return the cached part of these prompts of one request on each endpoint; several prompts add up.

        ``learn``: the mean bytes per token follows what is matched.
        """
        before = self.bytes_per_token
        found = self._all(root, prompts)
        if not learn:
            self.bytes_per_token = before
        return found

    def _all(self, root: Root, prompts: Sequence[bytes]) -> Found:
        found = self._of(root, prompts[0])
        for prompt in prompts[1:]:
            _add(found, self._of(root, prompt))
        return found

    def tokens(self, size: int) -> int:
        """Return an estimate of the tokens in ``size`` bytes of a body that cannot be parsed."""
        return round(size / self.bytes_per_token)

    def _of(self, root: Root, prompt: bytes) -> Found:
        size = len(prompt)
        matches = self._index.match(root, prompt)
        routed = self._history.match(root, prompt)
        if self.remote_prefixes is not None:
            for key, sent in self.remote_prefixes(root, prompt).items():
                routed[key] = max(sent, routed.get(key, 0))
        ratio, known_tokens, known = self.bytes_per_token, 0, 0
        if matches.groups:
            _, known_tokens, known, _, _ = matches.groups[0]
            if known_tokens >= RATIO_TOKENS:
                ratio = known / known_tokens
                self.bytes_per_token += RATIO_WEIGHT * (ratio - self.bytes_per_token)
        tokens = known_tokens + (round((size - known) / ratio) or 1)
        found = Found(size, tokens, {}, (matches,), _place(root, prompt, matches, routed))
        if matches.groups or routed:
            self._add_hits(found.hits, matches, routed, size, ratio)
            if self.storages:
                self._add_storage(found.hits, matches)
            if self._index.tiers_evict:
                self._read_again(found.hits, matches)
            if self.drops_last_block:
                self._drop_last_blocks(found.hits)
        return found

    def _add_storage(self, hits: dict[str, CachedPart], matches: Matches) -> None:
        """Add what shared storage holds to all endpoints that share it: there they are equal."""
        for name, number in self.storages.items():
            (shared, medium), keys = self._shared(name, number, matches), self._sharers.get(name, ())
            if not shared.tokens:
                continue
            alone = CachedPart(shared.tokens, shared.bytes, {medium: shared.tokens}, shared.tokens)
            parts: dict[int, tuple[CachedPart, CachedPart]] = {}
            """By identity: of a popular prompt, hundreds of endpoints hold the same."""
            for key in keys:
                part = hits.get(key)
                if not self.members[key].precise:
                    continue
                if part is None:
                    hits[key] = alone
                elif part.tokens < shared.tokens or part.indexed < shared.tokens:
                    if id(part) not in parts:
                        parts[id(part)] = part, with_storage(part, shared, medium)
                    hits[key] = parts[id(part)][1]

    def _read_again(self, hits: dict[str, CachedPart], matches: Matches) -> None:
        """Move what host memory removes to make room for the rest of the prompt, which is read from storage,
        to that storage: it is read from there again."""
        for key, part in hits.items():
            lower = part.indexed_lower
            if lower is None or HOST_MEDIUM not in lower:
                continue
            medium = next((name for name in (SHARED_MEDIUM, STORAGE_MEDIUM) if name in lower), None)
            if medium is None:
                continue
            member = self.members[key]
            publisher = member.publishers[part.rank or 0]
            shared = None if member.storage is None else self.storages.get(member.storage)
            holder = publisher if shared is None or medium == STORAGE_MEDIUM else shared
            if (end := matches.end(holder)) is None:
                continue
            above, limit = part.indexed - lower[medium], lower[HOST_MEDIUM]
            if tokens := self._index.next_evicted(publisher, HOST_MEDIUM, end, above, limit):
                hits[key] = with_moved(part, HOST_MEDIUM, medium, tokens)

    def _drop_last_blocks(self, hits: dict[str, CachedPart]) -> None:
        """Shorten the hits of engines that compute their last blocks again."""
        before: tuple[int, int] | None = None
        shorter: CachedPart | None = None
        for key, part in list(hits.items()):
            member = self.members[key]
            if not member.drops_last_block:
                continue
            if not self._drops(member):
                hits[key] = with_shorter_credit(part, member.hit_block_size)
                continue
            case = (id(part), member.hit_block_size)
            if case != before:  # of a popular prompt, hundreds hold the same
                before, shorter = case, without_end(part, member.hit_block_size)
            if shorter is None:
                del hits[key]
            else:
                hits[key] = shorter

    def _add_hits(
        self,
        hits: dict[str, CachedPart],
        matches: Matches,
        routed: Mapping[str, int],
        size: int,
        ratio: float,
    ) -> None:
        """Add what each endpoint holds."""
        members = self.members
        blocks = _NO_BLOCKS
        if matches.groups:
            alike = self._add_alike(hits, matches) if len(members) >= MANY else 0
            blocks = self._held_blocks(matches, alike, routed)
        if not blocks.keys() <= routed.keys():
            routed = {**dict.fromkeys(blocks, 0), **routed}
        parts: dict[tuple[int, int, int | None, bool, int], CachedPart | None] = {}
        """What follows for endpoints that hold the same: of a popular prompt, hundreds do."""
        before: tuple[object, ...] = ()
        part: CachedPart | None = None
        for key, sent in routed.items():
            member = members.get(key)
            if member is None:
                continue
            hit, rank = blocks.get(key, _NO_BLOCK) if blocks else _NO_BLOCK
            case = (id(hit), sent, rank, member.precise, member.block_size)
            if case != before:
                before = case
                if case in parts:
                    part = parts[case]
                else:
                    part = parts[case] = cached_part(member, matches, hit, rank, sent, size, ratio)
            if part is not None:
                hits[key] = part

    def _add_alike(self, hits: dict[str, CachedPart], matches: Matches) -> int:
        """Add what many endpoints hold alike, as if nothing was on its way there; return their bits."""
        self._alike.update(self._sole_publishers(), matches.bits)
        done = 0
        for holders, hit in self._alike.of(matches.groups):
            part = CachedPart(hit.tokens, hit.bytes, hit.lower, hit.tokens)
            hits |= dict.fromkeys(self._alike.keys(holders), part)
            done |= holders
        return done

    def _sole_publishers(self) -> Iterator[tuple[int, str]]:
        """Yield the publishers of trusted endpoints with one publisher each, and the endpoints."""
        for key, member in self.members.items():
            if member.precise and len(member.publishers) == 1:
                yield member.publishers[0], key

    def _held_blocks(
        self, matches: Matches, alike: int, routed: Mapping[str, int]
    ) -> Mapping[str, tuple[Hit, int | None]]:
        """Return the best hit of each endpoint on which blocks are matched, by key, and the rank that has it;
        of those that are ``alike`` (bits) only where something was routed."""
        owners, members = self._owners, self.members
        keys = dict.fromkeys([owners[p] for p in matches.publishers(alike) if p in owners])
        if alike:
            keys |= dict.fromkeys([key for key in routed if key in members])
        return {key: best_rank(members[key], matches) for key in keys}


_NO_BLOCKS: Final[Mapping[str, tuple[Hit, int | None]]] = MappingProxyType({})
_NO_BLOCK: Final[tuple[Hit, int | None]] = (MISS, None)


def _place(root: Root, prompt: bytes, matches: Matches, routed: Mapping[str, int]) -> Hashable:
    """The end of a block, or of what was routed: the last bytes before it tell it well enough."""
    if matches.groups:
        _, tokens, _, _, segment = matches.groups[0]
        return segment, tokens
    if not routed:
        return None
    end = max(routed.values())
    return (root, end, prompt[max(0, end - PLACE_BYTES) : end]) if end else None


def _add(found: Found, further: Found) -> None:
    found.size += further.size
    found.tokens += further.tokens
    found.matches += further.matches
    for key, holding in further.hits.items():
        found.hits[key] = summed(found.hits[key], holding) if key in found.hits else holding
