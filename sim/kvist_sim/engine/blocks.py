"""Pool of KV cache blocks, and block hashes, with vLLM's semantics. Pure.

Sources: ``vllm/v1/core/block_pool.py``, ``vllm/v1/core/kv_cache_utils.py`` and ``vllm/utils/hashing.py``.

Each hash covers its parent's, its own tokens and its extra keys. ``sha256`` is over a pickle, ``sha256_cbor``
over canonical CBOR; both are the same in every replica because the root is a constant unless PYTHONHASHSEED
is set. BLAKE2b stands in for the two xxhash kinds, because nothing outside can tell.

Only full blocks are cached. A freed block stays cached until it is allocated again (lazy eviction), least
recently freed first; a chain is freed tail first, so that the tail is evicted first. Two blocks may hold the
same hash: nothing is merged. Every change of what is cached is an event.
"""

import pickle
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, Final, Generic, TypeAlias, TypeVar

from kvist_epp.engines.vllm.kv_events import Cleared, Event, Removed, Stored

Digest: TypeAlias = bytes
Keys: TypeAlias = tuple[tuple[str, ...], ...] | None
Hash: TypeAlias = Callable[[Any], Digest]

_SEED: Final = "vllm-none-hash"


def _sha256(value: Any) -> Digest:
    return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _sha256_cbor(value: Any) -> Digest:
    return sha256(cbor(value)).digest()


def _blake(value: Any) -> Digest:
    return blake2b(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), digest_size=16).digest()


_ALGORITHMS: Final[dict[str, Hash]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _blake,
    "xxhash_cbor": _blake,
}


def short(digest: Digest) -> int:
    """Return the 64 bits that events carry: the last eight bytes, big-endian
    (``maybe_convert_block_hash``)."""
    return int.from_bytes(digest[-8:], "big")


@lru_cache(maxsize=65_536)
def _head(major: int, value: int) -> bytes:
    """CBOR's type and length, or an unsigned integer (RFC 8949 section 3), in the shortest form."""
    if value < 24:
        return bytes([major << 5 | value])
    size = next(size for size in (1, 2, 4, 8) if value < 1 << 8 * size)
    return bytes([major << 5 | 23 + size.bit_length()]) + value.to_bytes(size, "big")


def cbor(value: Any) -> bytes:
    """Return the canonical CBOR of None, unsigned ints, texts, bytes and (nested) sequences of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if value and isinstance(value[0], int):  # the tokens of a block: the hot case, without a call each
        return _head(4, len(value)) + b"".join([_head(0, token) for token in value])
    return _head(4, len(value)) + b"".join(map(cbor, value))


class Hasher:
    """Hash function of one engine."""

    __slots__ = ("_hash", "block_size", "root")

    def __init__(self, block_size: int, algorithm: str = "sha256", seed: str | None = None) -> None:
        self._hash = _ALGORITHMS[algorithm]
        self.block_size = block_size
        if seed is None:
            seed = secrets.token_hex(16) if algorithm.startswith("xxhash") else _SEED
        self.root = self._hash(seed)

    def extend(
        self, digests: list[Digest], tokens: Sequence[int], adapter: tuple[str, str] | None, salt: str | None
    ) -> None:
        """Append the digests of the full blocks of ``tokens`` that ``digests`` lacks.

        `adapter` is (name, path): both are hashed, only the name is published. The salt counts in the first
        block.
        """
        size = self.block_size
        lora: Keys = None if adapter is None else (("lora", *adapter),)
        parent = digests[-1] if digests else self.root
        for start in range(len(digests) * size, len(tokens) - size + 1, size):
            keys = (*(lora or ()), ("cache_salt", salt)) if salt and start == 0 else lora
            parent = self._hash((parent, tuple(tokens[start : start + size]), keys))
            digests.append(parent)


Name = TypeVar("Name", bound=Hashable)
"""Key of a cached block: vLLM's digest, or in virtual time a number."""


class Blocks(Generic[Name]):
    """Pool of ``blocks`` blocks, the first of which is vLLM's placeholder and never allocated.

    A block is an int. It is *held* while its reference count is positive, else free; independent of that it
    is *cached* while it has a digest.
    """

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.block_size = block_size
        self.caching = caching
        self._digests: list[Name | None] = [None] * blocks
        self._held = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._cached: dict[Name, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        name, free = type(self).__name__, len(self._free)
        return f"<{name} {free} of {self.capacity} free, {len(self._cached)} hashes cached>"

    @property
    def capacity(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._held) - 1

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences, 0 to 1; cached blocks that no sequence holds count as free."""
        return 1.0 - len(self._free) / self.capacity if self.capacity else 0.0

    def hit(self, digests: Sequence[Name], tokens: int) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence of ``tokens`` tokens.

        The last token is always computed again, so that a hit ends before it.
        """
        cached = self._cached
        found = list(map(cached.get, digests[: max(0, tokens - 1) // self.block_size]))
        if None in found:
            del found[found.index(None) :]
        return [blocks[0] for blocks in found if blocks]

    def evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` count as free, and would not after ``hold``."""
        held = self._held
        return [held[block] for block in blocks].count(0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block."""
        held, free = self._held, self._free
        for block in blocks:
            if not held[block]:
                del free[block]
            held[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks held once, evicting their content. Raises KeyError when fewer are free."""
        take, held, digests = self._free.popitem, self._held, self._digests
        blocks = [take(last=False)[0] for _ in range(count)]
        for block in blocks:
            held[block] = 1
            digest = digests[block]
            if digest is not None:
                self._evict(block, digest)
        return blocks

    def cache(self, blocks: Sequence[int], digests: Sequence[Name]) -> None:
        """Register full blocks under their digests."""
        known, cached = self._digests, self._cached
        for block, digest in zip(blocks, digests, strict=True):
            known[block] = digest
            others = cached.get(digest)
            cached[digest] = (block,) if others is None else (*others, block)

    def _evict(self, block: int, digest: Name) -> None:
        others = tuple([other for other in self._cached[digest] if other != block])
        if others:
            self._cached[digest] = others
        else:
            del self._cached[digest]
        self._digests[block] = None
        self._evicted(digest)

    def _evicted(self, digest: Name) -> None:
        """Handle the loss of a cached block."""
        raise NotImplementedError

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block, in the order in which they should be evicted.

        What is cached joins the end of the queue; what is not can never be hit and is reused first.
        """
        held, free, digests = self._held, self._free, self._digests
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                free[block] = None
                if digests[block] is None:
                    free.move_to_end(block, last=False)


class BlockPool(Blocks[Digest]):
    """Pool of an engine that publishes events."""

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True) -> None:
        super().__init__(blocks, block_size, caching=caching)
        self._events: list[Event] = []

    def cached(self) -> dict[int, int]:
        """Number of blocks by published hash."""
        return {short(digest): len(blocks) for digest, blocks in self._cached.items()}

    def _evicted(self, digest: Digest) -> None:
        self._events.append(Removed(hashes=[short(digest)], group=0))

    def store(
        self,
        blocks: Sequence[int],
        digests: Sequence[Digest],
        tokens: list[int],
        *,
        parent: Digest | None,
        lora: str | None = None,
        salt: str | None = None,
        session: str | None = None,
    ) -> None:
        """Cache full blocks, in chain order after ``parent``; ``tokens`` are those of the blocks alone."""
        if not self.caching or not blocks:
            return
        self.cache(blocks, digests)
        self.announce(digests, tokens, parent=parent, lora=lora, salt=salt, session=session)

    def announce(
        self,
        digests: Sequence[Digest],
        tokens: list[int],
        *,
        parent: Digest | None,
        lora: str | None = None,
        salt: str | None = None,
        session: str | None = None,
    ) -> None:
        """Publish the event of ``store`` without storing (vLLM's report mode "full" repeats cache hits)."""
        self._events.append(
            Stored(
                hashes=list(map(short, digests)),
                parent=None if parent is None else short(parent),
                token_ids=tokens,
                block_size=self.block_size,
                lora=lora,
                group=0,
                kind="full_attention",
                salt=salt if parent is None else None,
                session=session,
            )
        )

    def reset(self) -> bool:
        """Drop everything cached; return False, and change nothing, while any block is held."""
        if len(self._free) != self.capacity:
            return False
        self._cached.clear()
        self._digests = [None] * len(self._digests)
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken
