"""Blocks on a server of LMCache, which several engines share, from their KV events. Pure.

LMCache's connector (0.5.6, ``lmcache/integration/vllm``) stores what an engine computes in blocks of its own,
of 256 tokens by default, and reports each in an event ``BlockStored`` of medium CPU in the engine's stream.
These events have hashes of their own, which cover tokens but neither salt nor adapter, so that they cannot
be joined with other events by hash. Their token ids name blocks that the engine's GPU has announced a moment
before, by the hashes that the index knows: a block of LMCache is a chain of those.

- Events say what is stored (always), and what is evicted or lost with a restart of the server (if the server
  itself is the source: ``--kv-event-log-size`` above 0 and blocks that the server reads from the engine).
- A server whose engines send their blocks (``engine_driven``) and that has an event log reports nothing at
  all. Until an engine of a server has reported something, all that its engines compute is taken for stored;
  the first report ends that.
- What events do not remove is believed for a lease, and while it is among the newest blocks for which there
  is room. Blocks that an engine loads, or computes again, are new.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvist_epp.engines.vllm.kv_events import LMCACHE, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.publisher_state import PublisherState

DEFAULT_CHUNK: Final = 256
"""Tokens of LMCache's blocks (``--chunk-size``) until its events tell."""
KEPT: Final = 0.8
"""Share of its memory that a server fills before it evicts (``--eviction-trigger-watermark``)."""
MAX_TAILS: Final = 1 << 14
"""Ends of blocks that may yet be reported; a second of a busy engine has a thousand."""
MAX_CHUNKS: Final = 1 << 16
"""Blocks of a server whose removal can be understood."""
ALIKE: Final = 8
"""Blocks of equal text that are remembered: they are in different prompts, or have different salts, and the
engines store all of them."""


class LmcacheServer:
    """One server, as far as it is not in the index. ``state``: the server as a publisher."""

    def __init__(self, name: str, state: PublisherState, index: Index) -> None:
        self.name = name
        self.state = state
        self.chunk = DEFAULT_CHUNK
        self.reports = False
        """One of its engines has reported a block."""
        self._index = index
        self._tails: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Hashes of the engines' blocks by a hash of their text."""
        self._chunks: OrderedDict[int, list[int]] = OrderedDict()
        """Hashes of the engines' blocks in each block of the server."""
        self.block_size = 1
        """Tokens of the engines' blocks."""
        self._tokens: int | None = None

    def limit(self, tokens: int | None) -> None:
        """Believe no more than fits a server of so many tokens; None: not known."""
        self._tokens = tokens
        if tokens is not None:
            self.state.leases.limit = max(2, int(KEPT * tokens) // self.block_size)

    def on_computed(self, event: Stored, texts: Sequence[bytes], *, decode: bool) -> None:
        """Note blocks, with their texts, that an engine holds on its GPU now: it stores them, or has loaded
        them."""
        if event.block_size != self.block_size:
            self.block_size = event.block_size
            self.limit(self._tokens)
        for name, text in zip(event.hashes, texts, strict=False):
            key = hash(text)
            known = self._tails.pop(key, ())
            self._tails[key] = known if name in known else (*known[1 - ALIKE :], name)
        while len(self._tails) > MAX_TAILS:
            self._tails.popitem(last=False)
        if not self.reports and not decode:
            self._hold(event.hashes)

    def on_stored(self, event: Stored, texts: Sequence[bytes]) -> int:
        """Note blocks that an engine or the server reports; return how many of the engine's blocks they are.

        ``texts``: of the event, in pieces of the engine's block size.
        """
        if not self.reports:  # what was believed without reports was perhaps not stored
            self.reports = True
            self.state.leases.end(LMCACHE)
        self.chunk = size = event.block_size or self.chunk
        found, blocks = 0, max(1, size // self.block_size)
        for at, name in enumerate(event.hashes):
            own = texts[at * blocks : (at + 1) * blocks]
            ends = self._tails.get(hash(own[-1]), ()) if len(own) == blocks else ()
            held = [block for tail in ends for block in self._chain(tail, b"".join(own))]
            self._hold(held)
            self._chunks[name] = held
            self._chunks.move_to_end(name)
            found += len(held)
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)
        return found

    def on_removed(self, hashes: Sequence[int]) -> bool:
        """Remove blocks of the server; return whether none are left of those that were reported: it has
        restarted, or lost count."""
        known = [name for name in hashes if name in self._chunks]
        blocks = [block for name in known for block in self._chunks.pop(name)]
        self.state.leases.remove(LMCACHE, blocks)
        self._index.removed(self.state.number, blocks, medium=LMCACHE)
        return bool(known) and not self._chunks

    def forget(self) -> None:
        """Forget which blocks are there; what engines store next is new."""
        self._chunks.clear()
        self.state.leases.end(LMCACHE)

    def loaded(self, hashes: Sequence[int]) -> int:
        """Return how many of these blocks the server holds."""
        return self._index.loaded(self.state.number, hashes)

    def _chain(self, tail: int, text: bytes) -> list[int]:
        """Return the blocks of an engine that are in the server's block of this text, if this one is the last
        of them."""
        depth = self._index.depth(tail)
        if depth is None or depth % self.chunk or self._index.tail(tail, len(text)) != text:
            return []
        return self._index.chain(tail, max(1, self.chunk // self.block_size))

    def _hold(self, blocks: Sequence[int]) -> None:
        number, index, kept = self.state.number, self._index, list[int]()
        for name in blocks:
            if index.held(number, [name], LMCACHE, counted=False) or index.held_as_others(
                number, name, LMCACHE
            ):
                kept.append(name)
        self.state.leases.add(LMCACHE, kept)
