"""The index: which publisher holds which prefix, by its engine's KV events.

Engines announce blocks by hash; here each is a node of a tree over *bytes*, so that a prompt is matched
without being tokenised. One mapping, shared by all publishers, leads from an engine hash to its segment:
engines that run the same software give equal blocks equal hashes. That is checked whenever a block is stored
(same parent, same bytes); a publisher to which a hash means another block has it in a dictionary of its own.
The parts of the tree are in the package ``tree``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from kvist_epp.index.snapshot.capture import Capture, Restore
from kvist_epp.index.tree.eviction import next_evicted
from kvist_epp.index.tree.forest import Forest, Place, held_on, last_bytes, path_up
from kvist_epp.index.tree.holders import ONES, Presence
from kvist_epp.index.tree.matches import Group, Hit, Matches, search, tokens_of
from kvist_epp.index.tree.removing import remove
from kvist_epp.index.tree.segment import GPU, Root, Segment
from kvist_epp.index.tree.storing import Storing
from kvist_epp.index.tree.windows import remove_window, store_window, within_windows

__all__ = ["GPU", "Hit", "Index", "Matches", "Root"]


class Index:
    """The byte tree of all publishers.

    Methods that change it: ``publisher``, ``leave``, ``forget``, ``sweep``, ``stored``, ``append``,
    ``opaque``, ``held``, ``held_as_others``, ``removed``, ``window_stored``, ``window_removed``, ``evicted``,
    ``cleared``. The others only read.

    Hashes are unsigned 64-bit integers. The case of a medium does not matter.
    """

    def __init__(self) -> None:
        self._forest = Forest()
        self._numbers: dict[str, int] = {}
        self._presences: dict[int, Presence] = {}
        self._next_number = 0
        self._bits: dict[int, int] = {}
        """Publisher → its bit; replaced, never changed: ``Matches`` keeps it."""
        self._publishers: dict[int, int] = {}
        """The reverse."""
        self._windowed: dict[int, Presence] = {}
        """Publishers with windows, by bit."""
        self._live = 0
        self._next_bit = 1
        self._free_bits: list[int] = []
        self._retired: list[Presence] = []
        self.tiers_evict = False
        """Some engine has evicted a block from a medium other than its GPU's memory."""

    def __repr__(self) -> str:
        size = self.stats()
        return (
            f"<Index {size['publishers']} publishers, {size['hashes']} hashes, {size['segments']} segments>"
        )

    def stats(self) -> dict[str, int]:
        """Sizes of the index; all but the publishers are 0 when nothing is held and ``sweep`` is done."""
        presences = [*self._presences.values(), *self._retired]
        return {
            "publishers": len(self._presences),
            "trees": sum(map(len, self._forest.trees.values())),
            "segments": self._forest.segments,
            "hashes": len(self._forest.nodes),
            "own_hashes": sum(len(who.own) for who in presences),
            "copies": sum(len(who.copies) for who in presences),
            "opaque": sum(sum(map(len, who.opaque.values())) for who in presences),
            "held_segments": sum(len(who.segments) for who in presences),
            "retired": len(self._retired),
            "windows": sum(len(window.held) for who in presences for window in who.windows.values()),
        }

    # Publishers

    def publisher(self, name: str) -> int:
        """The number of a publisher ("pod-uid/rank"): the same until it leaves. It is made when new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next_number
            self._next_number += 1
            self._presences[number] = Presence(name)
        return number

    def forget(self, publisher: int) -> None:
        """The publisher holds nothing any more: at once for matches; ``sweep`` gives the memory back."""
        who = self._presences[publisher]
        self._presences[publisher] = Presence(who.name, drops=who.drops)
        if who.bit:
            self._live &= ~who.bit
            self._windowed.pop(who.bit, None)
            self._set_bits({number: bit for number, bit in self._bits.items() if number != publisher})
        if who.segments:
            who.retire()
            self._retired.append(who)
        elif who.bit:
            self._free_bits.append(who.bit)

    def leave(self, publisher: int) -> None:
        """``forget``, and its number is never used again: the pod is gone."""
        self.forget(publisher)
        del self._numbers[self._presences.pop(publisher).name]

    def sweep(self, budget: int) -> int:
        """Frees what forgotten publishers held in up to ``budget`` segments; returns how many are left."""
        while self._retired and budget > 0:
            who = self._retired[-1]
            while who.segments and budget > 0:
                self._forest.drop(who, who.segments.pop())
                budget -= 1
            if not who.segments:
                self._free_bits.append(self._retired.pop().bit)
        return sum(len(who.segments) for who in self._retired)

    def blocks(self, publisher: int) -> dict[str, int]:
        """Return the number of distinct blocks that a publisher holds, by medium, opaque ones included."""
        return {medium: count for medium, count in self._presences[publisher].counts.items() if count}

    def _with_bit(self, publisher: int) -> Presence:
        who = self._presences[publisher]
        if not who.bit:
            who.bit = self._free_bits.pop() if self._free_bits else self._next_bit
            self._next_bit = max(self._next_bit, who.bit << 1)
            self._set_bits({**self._bits, publisher: who.bit})
            self._live |= who.bit
        return who

    def _set_bits(self, bits: dict[int, int]) -> None:
        """Replace the bits as a whole: matches keep those of their time."""
        self._bits = bits
        self._publishers = {bit: publisher for publisher, bit in bits.items()}

    # Snapshots

    def capture(self, publisher: int) -> Capture:
        """Capture a publisher's blocks; meanwhile none of its events may be learned."""
        who = self._presences[publisher]
        return Capture(who, lambda: self._presences.get(publisher) is who)

    def restore(self, publisher: int) -> Restore:
        """``forget``, and the publisher's part of a snapshot may come in."""
        if self._presences[publisher].bit:
            self.forget(publisher)
        who = self._with_bit(publisher)
        return Restore(self._forest, who, lambda: self._presences.get(publisher) is who, self._windowed)

    # Looking

    def match(self, root: Root, prompt: bytes) -> Matches:
        """Return how much of the prompt's prefix each publisher holds. Changes nothing."""
        found: list[Group] = []
        for tree in self._forest.trees.get(root, {}).values():
            found += search(tree, prompt, self._live)
        if len(found) > 1:
            found.sort(key=tokens_of, reverse=True)
        if self._windowed:
            found = within_windows(found, self._windowed)
        return Matches(found, self._bits, self._publishers)

    def has_windows(self, publisher: int) -> bool:
        """Return whether its engine has groups with windows, so that a match ends where they allow."""
        return self._presences[publisher].bit in self._windowed

    def drops_last_block(self, publisher: int, drops: bool) -> bool:
        """Set whether a match with windows ends before the last block (``last_block``); return what was."""
        who = self._presences[publisher]
        before, who.drops = who.drops, drops
        return before

    def exclusive(self, publishers: Iterable[int]) -> Iterator[tuple[Segment, int]]:
        """Yield each segment in which these publishers hold blocks, as it is at that moment, with the mask of
        the blocks that no other publisher holds on any medium."""
        presences = [who for number in publishers if (who := self._presences.get(number))]
        own = 0
        for who in presences:
            own |= who.bit
        for segment in set[Segment]().union(*(who.segments for who in presences)):
            yield segment, segment.exclusive(own, self._live & ~own)

    def unshared(self, publisher: int, chain: Sequence[int]) -> int:
        """Return how many blocks of a chain that a publisher holds are nowhere else: on no other publisher,
        and on no slower medium of its own.

        A publisher that holds a block of a chain holds those before it, so the blocks sought are the last.
        """
        who = self._presences[publisher]
        alone = partial(self._forest.is_alone, who, self._live & ~who.bit)
        return len(chain) - bisect_left(chain, True, key=alone)

    def depth(self, name: int, publisher: int | None = None) -> int | None:
        """Tokens from the root to the end of this block; None: unknown (or opaque).

        ``publisher``: what the hash means to it, if it holds the block; else what it means to most.
        """
        place = self._look(name, publisher)
        return place and (place[0].base + place[1] + 1) * place[0].tree.block_size

    def tail(self, name: int, limit: int, publisher: int | None = None) -> bytes | None:
        """Up to ``limit`` last bytes of the text that ends with this block; None: unknown."""
        place = self._look(name, publisher)
        return None if place is None else last_bytes(place, limit)

    def chain(self, name: int, blocks: int) -> list[int]:
        """Return the hashes of up to ``blocks`` blocks that end with this one, the last one first, as most
        publishers call them; empty: unknown."""
        place, found = self._look(name, None), list[int]()
        for segment, count in path_up(place[0], place[1] + 1) if place else ():
            found += segment.hashes[:count][::-1]
            if len(found) >= blocks:
                break
        return found[:blocks]

    def adapters(self) -> frozenset[str]:
        """The LoRA adapters that some block in the tree was computed with."""
        return frozenset(adapter for adapter, _ in self._forest.trees if adapter is not None)

    def _look(self, name: int, publisher: int | None) -> Place | None:
        if publisher is not None:
            return self._forest.locate(self._presences[publisher], name)
        segment = self._forest.nodes.get(name)
        return (segment, segment.hashes.index(name)) if segment else None

    # Storing

    def stored(
        self,
        publisher: int,
        root: Root,
        parent: int | None,
        hashes: Sequence[int],
        blocks: Sequence[bytes],
        *,
        block_size: int,
        medium: str = GPU,
    ) -> bool:
        """A chain of blocks was cached: the first follows ``parent`` (None: it begins a prompt).

        ``blocks`` are the texts of the blocks named by ``hashes``; ``block_size`` is in tokens. Root and
        block size of a chain are its first block's. After an opaque parent all is opaque. A hash that meant
        another block to this publisher (its removal was lost) means the new one from now on.

        Returns False, and changes nothing, when the publisher does not hold the parent on any medium.
        """
        who, forest, medium = self._with_bit(publisher), self._forest, medium.upper()
        place = None if parent is None else forest.locate(who, parent)
        if parent is not None and place is None:
            if known := who.knows_opaque(parent):
                self.opaque(publisher, parent, hashes, medium=medium)
            return known
        if hashes:
            who.forget_opaque(hashes)
            place = place or (forest.tree(root, block_size).root, -1)
            Storing(forest, who, medium, tuple(hashes), blocks, place).run()
        return True

    def append(self, publisher: int, parent: int, name: int, block: bytes, *, block_size: int) -> int | None:
        """Store one block on the GPU that has but to be appended where its parent ends (``append_own``) and
        return its ``depth``. In any other case returns None, and changes nothing: ``stored`` does it all."""
        who = self._presences[publisher]
        place = self._forest.locate(who, parent)
        if place is None or who.opaque or place[0].tree.block_size != block_size:
            return None
        appended = self._forest.append_own(who, *place, name, block)
        return (place[0].base + place[1] + 2) * block_size if appended else None

    def window_stored(
        self, publisher: int, group: int, hashes: Sequence[int], *, needed: int, block_size: int
    ) -> None:
        """A KV cache group with a window cached blocks; they have the hashes of the first group's blocks.

        ``needed``: blocks in a row before the end of a hit. A group that has events of two block sizes is
        followed in the larger one.
        """
        who = self._with_bit(publisher)
        self._windowed[who.bit] = who
        store_window(who, group, hashes, needed, block_size)

    def opaque(
        self,
        publisher: int,
        parent: int | None,  # noqa: ARG002  # part of the verb; what never matches needs no place
        hashes: Sequence[int],
        *,
        medium: str = GPU,
    ) -> None:
        """Blocks that must never match (media, embeddings) but may be parents, of opaque ones again."""
        who, forest, medium = self._presences[publisher], self._forest, medium.upper()
        for name in hashes:
            if place := forest.locate(who, name):
                forest.release(who, *place, name)
            who.add_opaque(medium, name)

    def held(self, publisher: int, hashes: Sequence[int], medium: str, *, counted: bool = True) -> int:
        """Add a medium to cached blocks that an event names by hash alone; return how many it held on any.

        ``counted``: a block that is stored twice is removed twice. Without, a medium holds it or not.
        """
        who, medium = self._presences[publisher], medium.upper()
        known = 0
        for name in hashes:
            if place := self._forest.locate(who, name):
                if counted or not _on(who, place, medium):
                    self._forest.hold(who, *place, (name,), medium)
            elif who.knows_opaque(name):
                if counted or name not in who.opaque.get(medium, ()):
                    who.add_opaque(medium, name)
            else:
                continue
            known += 1
        return known

    def held_as_others(self, publisher: int, name: int, medium: str) -> bool:
        """Add a medium to a block that the publisher does not hold, where others say that the hash belongs.

        Its parents may be missing: the block counts once they are there. Returns False, and changes nothing,
        if the hash means no block of text to others, or if the publisher has another name for that block.
        """
        segment = self._forest.nodes.get(name)
        if segment is None or name not in segment.hashes:
            return False
        at, who = segment.hashes.index(name), self._with_bit(publisher)
        if segment.held(who.bit) >> at & 1 or who.knows_opaque(name) or name in who.own:
            return False
        self._forest.name(who, segment, at, name)
        self._forest.hold(who, segment, at, (name,), medium.upper())
        return True

    def knows_opaque(self, publisher: int, name: int) -> bool:
        """Return whether the publisher holds a block of this hash that can never match."""
        return self._presences[publisher].knows_opaque(name)

    def loaded(self, publisher: int, hashes: Sequence[int]) -> int:
        """Return how many blocks of a chain the publisher holds on slower media only."""
        who = self._presences[publisher]
        if not any(count for medium, count in who.counts.items() if medium != GPU):
            return 0
        places = [place for name in hashes if (place := self._forest.locate(who, name))]
        return sum(not _on(who, place, GPU) for place in places)

    def evicted(self, publisher: int, name: int, medium: str) -> None:
        """Note the block that a publisher's engine has evicted last from a slower medium."""
        self._presences[publisher].evicted[medium.upper()] = name
        self.tiers_evict = True

    def next_evicted(
        self, publisher: int, medium: str, end: tuple[Segment, int], after: int, limit: int
    ) -> int:
        """Return how many of the ``limit`` tokens before ``after`` a publisher's medium evicts next, of the
        prompt that is matched up to ``end``: none unless the block that begins there was evicted last."""
        who = self._presences[publisher]
        name = who.evicted.get(medium)
        place = None if name is None else self._forest.locate(who, name) or self._look(name, None)
        size = 0 if place is None else place[0].tree.block_size
        if place is None or (place[0].base + place[1]) * size != after:
            return 0
        return next_evicted(who, medium, place, end, limit // size) * size

    def names_on(self, publisher: int, medium: str) -> Iterator[int]:
        """Yield the hashes of the blocks that a publisher holds on a slower medium, opaque ones included.

        The index must not change meanwhile.
        """
        who = self._presences[publisher]
        for segment in who.segments:
            if mask := held_on(who, segment, medium):
                names = segment.alias.get(who, segment.hashes) if segment.alias else segment.hashes
                yield from (name for at, name in enumerate(names) if mask >> at & 1 and name is not None)
        yield from who.opaque.get(medium, ())

    # Removing

    def removed(self, publisher: int, hashes: Sequence[int], *, medium: str = GPU) -> int:
        """Blocks were evicted; one stored several times goes with its last copy. Returns how many it held."""
        who, medium = self._presences[publisher], medium.upper()
        return remove(self._forest, who, hashes, medium)

    def window_removed(self, publisher: int, group: int | None, hashes: Sequence[int]) -> bool:
        """A group with a window lost a copy of each of these blocks. Returns False for an unknown group."""
        return remove_window(self._presences[publisher], group, hashes)

    def cleared(self, publisher: int, *, medium: str | None = GPU) -> None:
        """The engine dropped all it had on one medium; None: on all, which is ``forget``."""
        who, medium = self._presences[publisher], medium and medium.upper()
        if medium is None or not any(count for other, count in who.counts.items() if other != medium):
            self.forget(publisher)
            return
        who.clear_medium(medium)
        for segment in list(who.segments):
            self._forest.unhold(who, segment, ONES[len(segment.hashes)], medium)


def _on(who: Presence, place: Place, medium: str) -> bool:
    """Return whether a publisher holds a block on a medium."""
    segment, at = place
    return bool(held_on(who, segment, medium) >> at & 1)
