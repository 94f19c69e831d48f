"""What a snapshot of the index is made of, as plain data. No transport, no tree.

A snapshot is a row of *sections*, one for each publisher: ``Begin``, then its segments from the roots down
(a ``Content`` where the text was not told before, and a ``Holding``), then ``Extra`` and ``End``. Text that
several publishers hold is told once.
"""

from typing import TypeAlias

import msgspec

from kvist_epp.index.tree.segment import Root
from kvist_epp.kvevents.decode_blocks import DecodeBlock


class Begin(msgspec.Struct, frozen=True):
    """A publisher's section begins; its state is that after batch ``next - 1``."""

    publisher: str
    next: int
    """Sequence number of the first batch that is not in it."""
    mark: bytes
    """The beginning of batch ``next - 1``: tells whether it is the same engine that goes on."""
    group: int | None
    """The one KV cache group that was learned."""


class Content(msgspec.Struct, frozen=True):
    """Consecutive blocks of the tree."""

    number: int
    """From 1 on, in the order they are told."""
    parent: int
    """Number of the content they follow; 0: they begin a prompt."""
    at: int
    """Position in the parent of the block they follow; -1 without a parent."""
    root: Root
    block_size: int
    """Tokens a block."""
    hashes: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each block."""
    text: bytes


class Holding(msgspec.Struct, frozen=True):
    """What the section's publisher holds of one content, or only passes on the way to what it holds."""

    content: int
    reach: int
    """Blocks up to the last that it holds or that something it holds follows."""
    media: tuple[tuple[str, int], ...]
    """(medium, mask of the blocks held there)"""
    names: tuple[int, ...] | None
    """What the publisher calls each block up to ``reach``; None: as the content does."""


class Counted(msgspec.Struct, frozen=True):
    """A block on one medium and a number of copies."""

    medium: str
    name: int
    copies: int


class Extra(msgspec.Struct, frozen=True):
    """What a publisher has besides blocks of text; as many of them as there is to tell."""

    copies: tuple[Counted, ...] = ()
    """Blocks of text stored more than once, with their copies beyond the first."""
    opaque: tuple[Counted, ...] = ()
    """Blocks that never match."""
    pending: tuple[DecodeBlock, ...] = ()
    """Blocks born in decode that are not credited, or not finally."""


class End(msgspec.Struct, frozen=True):
    """The section is complete."""

    blocks: int
    """In its holdings, each medium by itself: what the reader must have counted."""
    extras: int
    """Entries of its ``Extra`` parts."""


Part: TypeAlias = Begin | Content | Holding | Extra | End
