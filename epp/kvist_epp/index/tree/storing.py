"""Putting a chain of blocks into the tree: whole segments at once where all is as usual, else one by one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvist_epp.index.tree.forest import Forest, Place
from kvist_epp.index.tree.holders import ONES, SEGMENT_BLOCKS, Presence
from kvist_epp.index.tree.segment import GPU, Segment, child


class Storing:
    """One event's chain on its way into the tree."""

    __slots__ = ("at", "blocks", "done", "forest", "hashes", "medium", "segment", "who")

    def __init__(
        self,
        forest: Forest,
        who: Presence,
        medium: str,
        hashes: tuple[int, ...],
        blocks: Sequence[bytes],
        parent: Place,
    ) -> None:
        self.forest = forest
        self.who = who
        self.medium = medium
        self.hashes = hashes
        self.blocks = blocks
        self.done = 0
        self.segment, self.at = parent

    def run(self) -> None:
        """Place every block."""
        nodes, own, hashes = self.forest.nodes, self.who.own, self.hashes
        if len(hashes) == 1 and self.medium == GPU and self._append():
            return
        while self.done < len(hashes):
            if self._known(self.segment, self.at):
                continue
            there = own.get(hashes[self.done]) or nodes.get(hashes[self.done])
            if there is None:
                if self._new() or self._renamed():
                    continue
            elif there.parent is self.segment and there.at == self.at and self._known(there, -1):
                continue
            self._one()

    def _append(self) -> bool:
        """Takes the only block if it just makes its segment longer, as most generated blocks do."""
        return self.forest.append_own(self.who, self.segment, self.at, self.hashes[0], self.blocks[0])

    def _known(self, segment: Segment, at: int) -> bool:
        """Takes the blocks that are next in this segment already, with the same names and bytes."""
        low, own = at + 1, self.who.own
        take = min(len(segment.hashes) - low, len(self.hashes) - self.done)
        if take <= 0:
            return False
        names = self.hashes[self.done : self.done + take]
        if segment.alias and self.who in segment.alias:
            theirs = tuple(segment.alias[self.who][low : low + take])
        elif segment.shadowed or (own and not own.keys().isdisjoint(names)):
            return False
        else:
            theirs = segment.hashes[low : low + take]
        if names != theirs:
            take = next(n for n, pair in enumerate(zip(names, theirs, strict=True)) if pair[0] != pair[1])
            names = names[:take]
        if not take or not _same_bytes(segment, low, self.blocks[self.done : self.done + take]):
            return False
        self._hold(segment, low, names)
        return True

    def _new(self) -> bool:
        """Takes as many blocks as fit into one segment, if their names and the first one's bytes are new."""
        forest, who = self.forest, self.who
        if next(self._equals(), None):
            return False
        segment, low = forest.place_after(self.segment, self.at)
        names = self.hashes[self.done : self.done + SEGMENT_BLOCKS - low]
        # The segment's own names may be hidden (``shadowed``), so that the mapping does not have them.
        if not self._distinct(names, self.segment.hashes) or not forest.nodes.claim_all(names, segment):
            return False
        forest.append(segment, names, self.blocks[self.done : self.done + len(names)])
        if segment.alias and who in segment.alias:
            segment.alias[who][low:] = names
        self._hold(segment, low, names)
        return True

    def _renamed(self) -> bool:
        """Takes the blocks that are there with the same bytes, under names only this publisher gives them.

        Older vLLM seeds its hashes at random in each process; then no two engines agree on a name.
        """
        segment, low = next(self._equals(), (self.segment, len(self.segment.hashes)))
        take = min(len(segment.hashes) - low, len(self.hashes) - self.done)
        names = self.hashes[self.done : self.done + take]
        free = not segment.held(self.who.bit) & ONES[take] << low
        if not take or not free or not self._unheard(names):
            return False
        if not _same_bytes(segment, low, self.blocks[self.done : self.done + take]):
            return False
        segment.names_of(self.who)[low : low + take] = names
        self.who.own.update(dict.fromkeys(names, segment))
        self._hold(segment, low, names)
        return True

    def _unheard(self, names: tuple[int, ...]) -> bool:
        """Whether no block has one of these names, for the publisher or for the others."""
        return self._distinct(names) and not self.forest.nodes.any_of(names)

    def _distinct(self, names: tuple[int, ...], others: tuple[int, ...] = ()) -> bool:
        """Whether these names differ, also from ``others`` and from those that mean other blocks to this
        publisher alone."""
        own, different = self.who.own, set(names)
        if own and not own.keys().isdisjoint(different):
            return False
        return len(different) == len(names) and different.isdisjoint(others)

    def _one(self) -> None:
        """Takes one block, whatever its hash meant before and to others."""
        forest, who = self.forest, self.who
        name = self.hashes[self.done]
        before = forest.locate(who, name)
        place = self._choose(name, before) or self._single(name)
        forest.name(who, *place, name)
        self._hold(*place, (name,))
        if before and before != place:
            forest.release(who, *before, name)

    def _choose(self, name: int, before: Place | None) -> Place | None:
        """The node of this block: the one that has this name, or one the publisher has no name for yet."""
        free: Place | None = None
        for segment, at in self._equals():
            if (segment, at) == before:
                return before
            if not segment.held(self.who.bit) >> at & 1 and (free is None or segment.hashes[at] == name):
                free = segment, at
        return free

    def _equals(self) -> Iterator[Place]:
        """The blocks that follow the present one with the same bytes as the next to be stored."""
        segment, at, block = self.segment, self.at, self.blocks[self.done]
        if at + 1 < len(segment.hashes) and segment.block(at + 1) == block:
            yield segment, at + 1
        twin = child(segment.children, at, block)
        while twin is not None:
            yield twin, 0
            twin = twin.twin

    def _single(self, name: int) -> Place:
        """A new node for one block."""
        segment, at = self.segment, self.at
        blocks = self.blocks[self.done : self.done + 1]
        if name in segment.hashes:
            return self.forest.add_child(segment, at, (name,), blocks)
        return self.forest.add(segment, at, (name,), blocks)

    def _hold(self, segment: Segment, low: int, names: tuple[int, ...]) -> None:
        self.forest.hold(self.who, segment, low, names, self.medium)
        self.segment = segment
        self.at = low + len(names) - 1
        self.done += len(names)


def _same_bytes(segment: Segment, low: int, blocks: Sequence[bytes]) -> bool:
    high = low + len(blocks)
    if segment.sizes[low:high] != array("I", list(map(len, blocks))):
        return False
    text = segment.text
    if len(blocks) < len(segment.hashes):
        text = text[segment.offset(low) : segment.offset(high)]
    return text == b"".join(blocks)
