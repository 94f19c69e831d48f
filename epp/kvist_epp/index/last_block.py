"""Engines that compute the last block of each hit again, recognised by what they had cached. Pure.

vLLM shortens a hit by its last block if it drafts tokens with EAGLE or MTP: the draft model needs the hidden
states before the first new token (``FullAttentionManager.find_longest_cache_hit``, "eagle"). By its source,
0.33 does so with a KV connector or ``disable_lookahead_block_hashes``. Neither events nor metrics say that an
engine is one of them, but its hits do: requests are short of what the index holds by exactly one block. Where
an engine is restarted without drafts, hits are longer than predicted by exactly one block.
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
    """Knows whether one engine computes the last block of its hits again."""

    def __init__(self) -> None:
        self.dropped = False
        """Whether the engine computes it again."""
        self.changes = 0
        """How often that has changed."""
        self._seen: deque[tuple[bool, int]] = deque(maxlen=WINDOW)
        """Whether the other habit explains the hit, and the tokens of it."""

    def __str__(self) -> str:
        how = "computes" if self.dropped else "no longer computes"
        return f"{how} the last block of each hit again, as engines with EAGLE or MTP drafts do"

    def otherwise(self, predicted: int, block_size: int) -> int:
        """Return what is predicted of an engine with the other habit, if nothing else ends its hits."""
        return predicted + block_size if self.dropped else predicted - block_size

    def on_cache_truth(self, predicted: int, true: int, otherwise: int) -> bool:
        """Note the tokens that were predicted to be on the GPU, with what is known of the engine, those that
        it had, and those that ``otherwise`` were predicted, if it had the other habit; return whether
        something else is known of it now."""
        if not (predicted or true) or otherwise == predicted:
            return False  # no hit, no last block
        seen = self._seen
        seen.append((true == otherwise, true))
        off = [true for explained, true in seen if explained]
        # An engine that never has anything is wrong by one block, too, where prompts share no more than that.
        if len(seen) < LEAST or len(off) < SHARE * len(seen) or not any(off):
            return False
        self.dropped = not self.dropped
        self.changes += 1
        seen.clear()
        return True
