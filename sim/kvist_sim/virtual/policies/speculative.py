"""llm-d's speculative entries: what was just routed counts as held until the engine's events say so.

``speculativeIndexing`` and ``speculativeTTL`` of the precise prefix cache producer (llm-d-router,
``docs``: "recommended for production"; two seconds by default).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from kvist_sim.virtual.policy import Overlaps, Pod

from .ties import depth

TTL_SECONDS: Final = 2.0


class Speculative:
    """A precise index, and the prompts that this replica has routed within the last ``ttl`` seconds."""

    def __init__(self, overlaps: Overlaps, ttl: float = TTL_SECONDS) -> None:
        self._overlaps = overlaps
        self._ttl = ttl
        self._until: defaultdict[Pod, dict[int, float]] = defaultdict(dict)
        self._entries: deque[tuple[float, Pod, Sequence[int]]] = deque()

    def match(self, blocks: Sequence[int], pods: Sequence[Pod], now: float) -> list[int]:
        """Return the number of leading blocks that each pod holds or will hold."""
        self._forget(now)
        held = self._overlaps.match(blocks, pods)
        return [max(sure, depth(blocks, self._until[pod])) for sure, pod in zip(held, pods, strict=True)]

    def routed(self, blocks: Sequence[int], pod: Pod, now: float) -> None:
        """The pod will hold all of these."""
        until = now + self._ttl
        self._until[pod].update(dict.fromkeys(blocks, until))
        self._entries.append((until, pod, blocks))

    def left(self, pod: Pod) -> None:
        """A pod that is gone holds nothing."""
        self._until.pop(pod, None)

    def _forget(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now:
            _, pod, blocks = self._entries.popleft()
            entries = self._until.get(pod, {})
            for block in blocks:
                if entries.get(block, now + 1) <= now:
                    del entries[block]
