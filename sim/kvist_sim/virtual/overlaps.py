"""Precise index that routers with KV events share: which pods hold which block hashes.

As llm-d's and Dynamo's: hash → pods, walked from the first block on. Kinder than both: a block that an engine
cached twice stays until both copies are gone.
"""

from collections.abc import Sequence
from typing import Any

from kvist_sim.engine.tiers import DISK, HOST, SHARED, TierNote
from kvist_sim.virtual.policy import Pod

MEDIA = (HOST, DISK, SHARED)
"""Slower places, the fastest first."""


class BlockOverlaps:
    """``policy.Overlaps`` and ``policy.Feed``."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Bits of the holding pods by hash."""
        self._copies: dict[tuple[int, int], int] = {}
        """Copies beyond the first by (bit, hash)."""
        self._lower: dict[tuple[str, int], int] = {}
        """Bits of the pods that hold a hash in a slower place, by (medium, hash)."""
        self._live = 0

    def joined(self, pod: Pod) -> None:
        """Add a pod with an empty cache."""
        self._live |= 1 << pod.number

    def left(self, pod: Pod) -> None:
        """Retire the pod's bit; its blocks disappear when other pods evict them."""
        self._live &= ~(1 << pod.number)

    def told(self, pod: Pod, notes: list[Any], now: float) -> None:  # noqa: ARG002  # part of the protocol
        """Apply the changes of one step."""
        bit = 1 << pod.number
        if not self._live & bit:
            return
        for note in notes:
            if isinstance(note, int):
                self._removed(bit, note)
            elif isinstance(note, TierNote):
                self._slower(bit, note)
            else:  # what is loaded is announced as what is computed
                job, first, end = note
                self._stored(bit, job.hashes[first:end])

    def match(self, blocks: Sequence[int], pods: Sequence[Pod]) -> list[int]:
        """Return the number of leading blocks that each pod holds."""
        get, reached = self._holders.get, self._live
        depth: list[tuple[int, int]] = []
        for number, name in enumerate(blocks):
            further = reached & get(name, 0)
            if further != reached:
                depth.append((reached & ~further, number))
                reached = further
                if not further:
                    break
        depth.append((reached, len(blocks)))
        return [next((n for bits, n in depth if bits >> pod.number & 1), 0) for pod in pods]

    def lower(self, blocks: Sequence[int], pods: Sequence[Pod], held: Sequence[int]) -> list[dict[str, int]]:
        """Return the blocks of each pod by medium that follow those on its GPU, of which there are ``held``.

        A shared volume has the blocks of all pods.
        """
        if not self._lower:
            return [{} for _ in pods]
        return [self._lower_of(blocks, 1 << pod.number, there) for pod, there in zip(pods, held, strict=True)]

    def _lower_of(self, blocks: Sequence[int], bit: int, held: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in blocks[held:]:
            place = next(
                (m for m in MEDIA if self._lower.get((m, name), 0) & (~0 if m == SHARED else bit)), ""
            )
            if not place:
                break
            found[place] = found.get(place, 0) + 1
        return found

    def _slower(self, bit: int, note: TierNote) -> None:
        for name in note.names:
            key = note.medium, name
            holders = self._lower.get(key, 0)
            holders = holders | bit if note.stored else holders & ~bit
            if holders:
                self._lower[key] = holders
            else:
                self._lower.pop(key, None)

    def _stored(self, bit: int, names: Sequence[int]) -> None:
        holders, get = self._holders, self._holders.get
        for name in names:
            before = get(name, 0)
            if before & bit:
                self._copies[bit, name] = self._copies.get((bit, name), 0) + 1
            else:
                holders[name] = before | bit

    def _removed(self, bit: int, name: int) -> None:
        extra = self._copies.pop((bit, name), 0)
        if extra > 1:
            self._copies[bit, name] = extra - 1
        elif not extra:
            left = self._holders.get(name, 0) & ~bit & self._live
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)


class NoOverlaps:
    """No events are followed."""

    def match(self, blocks: Sequence[int], pods: Sequence[Pod]) -> list[int]:  # noqa: ARG002
        """Refuse. Raises LookupError."""
        raise LookupError("this policy's Spec.events is False")

    def lower(self, blocks: Sequence[int], pods: Sequence[Pod], held: Sequence[int]) -> list[dict[str, int]]:  # noqa: ARG002
        """Refuse. Raises LookupError."""
        raise LookupError("this policy's Spec.events is False")
