"""Text at almost no cost: a passage is its length, its bytes and the hashes of its full blocks.

What is said is random bytes, four to a token, and a block's hash is a random number drawn when the block is
first said: equal hashes mean equal beginnings, as with vLLM's chained hashes, and nothing is ever hashed or
tokenised. Passages never change; what goes on from one shares its blocks with all that do.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

from kvist_sim.virtual.policy import BYTES_PER_TOKEN

BLOCK: Final = 64
"""Tokens a block: what vLLM takes with FlashMLA. Usual are 16, which quadruples the work of a run and changes
no decision by more than 48 tokens."""
BLOCK_BYTES: Final = BLOCK * BYTES_PER_TOKEN
HASH_BITS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Prefix of prompts, a prompt, or a prompt with its answer."""

    tokens: int
    blocks: list[int]
    """Hashes of the full blocks."""
    text: bytes

    def on(self, tokens: int, random: Random) -> "Passage":
        """Return the passage extended by new tokens. The block in which it ended is a new one, too."""
        if tokens <= 0:
            return self
        total = self.tokens + tokens
        fresh = total // BLOCK - len(self.blocks)
        bits = random.getrandbits
        blocks = self.blocks + [bits(HASH_BITS) for _ in range(fresh)]
        return Passage(total, blocks, self.text + random.randbytes(tokens * BYTES_PER_TOKEN))


NOTHING: Final = Passage(0, [], b"")
