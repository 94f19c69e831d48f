"""Blocks for the index's benchmarks: random hashes, 64 random bytes a block (16 tokens of about 4).

Where the sizes of blocks matter, they are spread as those of text are.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvist_epp.index.byte_index import Index, Root

ROOT: Final[Root] = (None, None)
EVENT_BLOCKS: Final = 64
BLOCK_BYTES: Final = 64
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Chain:
    """One prompt as an engine caches it."""

    hashes: list[int]
    blocks: list[bytes]

    @property
    def prompt(self) -> bytes:
        """Return the text of the chain and one byte more, so that the last block counts."""
        return b"".join(self.blocks) + b"."

    def store(self, index: Index, publisher: int) -> None:
        """Store the chain event by event, as prefill announces it."""
        parent = None
        for at in range(0, len(self.hashes), EVENT_BLOCKS):
            names = self.hashes[at : at + EVENT_BLOCKS]
            blocks = self.blocks[at : at + EVENT_BLOCKS]
            index.stored(publisher, ROOT, parent, names, blocks, block_size=BLOCK_SIZE)
            parent = names[-1]


def chain(seed: object, count: int, *, names: object = "") -> Chain:
    """``count`` blocks; the same seed gives the same text, and with the same ``names`` the same hashes."""
    texts, hashes = random.Random(f"text {seed}"), random.Random(f"hashes {seed} {names}")
    return Chain(
        [hashes.getrandbits(64) for _ in range(count)], [texts.randbytes(BLOCK_BYTES) for _ in range(count)]
    )


def uneven_chain(seed: object, count: int) -> Chain:
    """``count`` blocks of 20 to 100 bytes, as 16 tokens of prose, code and templates have them."""
    source = random.Random(f"uneven {seed}")
    return Chain(
        [source.getrandbits(64) for _ in range(count)],
        [source.randbytes(source.randint(20, 100)) for _ in range(count)],
    )


def chains(blocks: int, length: int = EVENT_BLOCKS) -> Iterator[Chain]:
    """Distinct chains of ``length`` blocks, ``blocks`` in all."""
    for number in range(blocks // length):
        yield chain(number, length)
