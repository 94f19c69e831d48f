"""Engines that compute the last block of each hit again, recognised by what they had cached. Pure.

vLLM shortens a hit by its last block if it drafts tokens with EAGLE or MTP: the draft model needs the hidden
states before the first new token (``FullAttentionManager.find_longest_cache_hit``, "eagle"). By its source,
0.33 does so only with a KV connector. Neither events nor metrics say that an engine is one of them, but its
hits do: requests are short of what the index holds by exactly one block. Where engines are restarted without
drafts, hits are longer than predicted by exactly one block.
"""

from collections import deque
from typing import Final

WINDOW: Final = 16
"""Requests with a hit that are remembered."""
LEAST: Final = 5
"""Of them, the fewest that decide: far fewer than make the index of an endpoint distrusted."""
SHARE: Final = 0.8
"""Share of the remembered requests that have to be off by exactly one block."""


class LastBlock:
    """What one engine does with the last block of its hits."""

    def __init__(self) -> None:
        self.dropped = False
        """Whether the engine computes it again."""
        self._off: deque[int] = deque(maxlen=WINDOW)
        """Predicted minus true tokens."""

    def __str__(self) -> str:
        how = "computes" if self.dropped else "no longer computes"
        return f"{how} the last block of each hit again, as engines with EAGLE or MTP drafts do"

    def on_cache_truth(self, predicted: int, true: int, block_size: int) -> bool:
        """Note the tokens that were predicted to be on the GPU, with what is known of the engine, and those
        that it had; return whether something else is known of it now."""
        if not (predicted or true):
            return False  # no hit, no last block
        off = self._off
        off.append(predicted - true)
        short = -block_size if self.dropped else block_size
        if len(off) < LEAST or off.count(short) < SHARE * len(off):
            return False
        self.dropped = not self.dropped
        off.clear()
        return True
