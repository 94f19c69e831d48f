"""The parts of a snapshot of the index, as plain data. No transport, no tree.

A snapshot is a row of *sections*, one for each publisher: ``Begin``, then its segments from the roots down (a
``Content`` where the text is not in the snapshot yet, and a ``Holding``), then ``Extra`` and ``End``. Text
that several publishers hold is sent once."""

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
    """From 1 on, in the order in which contents are sent."""
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
    """The blocks of one content that the section's publisher holds, or that lie above what it holds."""

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


class WindowBlocks(msgspec.Struct, frozen=True):
    """Blocks that a publisher holds in a KV cache group with a window; they come in any number of these."""

    group: int
    needed: int
    """Blocks in a row before the end of a hit."""
    block_size: int
    """Tokens."""
    names: tuple[int, ...] = ()
    """A block with two copies is there twice."""


class Extra(msgspec.Struct, frozen=True):
    """A publisher's state besides blocks of text; a section has as many of these as are needed."""

    copies: tuple[Counted, ...] = ()
    """Blocks of text stored more than once, with their copies beyond the first."""
    opaque: tuple[Counted, ...] = ()
    """Blocks that never match."""
    pending: tuple[DecodeBlock, ...] = ()
    """Blocks born in decode that are not credited, or not finally."""
    windows: tuple[WindowBlocks, ...] = ()


class End(msgspec.Struct, frozen=True):
    """The section is complete."""

    blocks: int
    """In its holdings, each medium by itself: what the reader must have counted."""
    extras: int
    """Entries of its ``Extra`` parts, but for windows, of which older replicas know nothing."""


Part: TypeAlias = Begin | Content | Holding | Extra | End
