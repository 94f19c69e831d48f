"""A reference implementation of the index for tests: a dictionary of sets, simple and too slow to use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist_epp.index.tree.matches import Hit
from kvist_epp.index.tree.segment import GPU, Root


@dataclass
class _Block:
    """A block that one publisher caches under one hash."""

    chain: tuple[bytes, ...] | None
    """The texts from the root to this block; None: opaque."""
    root: Root = (None, None)
    size: int = 0
    copies: Counter[str] = field(default_factory=Counter)


class NaiveMatches:
    """Hits by publisher."""

    def __init__(self, hits: dict[int, Hit]) -> None:
        self._hits = hits

    def of(self, publisher: int) -> Hit:
        return self._hits.get(publisher, Hit())


class NaiveIndex:
    """Publisher → hash → block; every question is answered by looking at all of it."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._held: dict[int, dict[int, _Block]] = {}

    def publisher(self, name: str) -> int:
        number = self._names.setdefault(name, len(self._held))
        self._held.setdefault(number, {})
        return number

    def stored(
        self,
        publisher: int,
        root: Root,
        parent: int | None,
        hashes: Sequence[int],
        blocks: Sequence[bytes],
        *,
        block_size: int,
        medium: str = GPU,
    ) -> bool:
        held = self._held[publisher]
        above = held.get(parent) if parent is not None else _Block((), root, block_size)
        if above is None:
            return False
        chain = above.chain
        for name, block in zip(hashes, blocks, strict=True):
            chain = None if chain is None else (*chain, block)
            if name not in held or held[name].chain != chain or held[name].root != above.root:
                held[name] = _Block(chain, above.root, above.size)
            held[name].copies[medium.upper()] += 1
        return True

    def opaque(self, publisher: int, parent: int | None, hashes: Sequence[int], *, medium: str = GPU) -> None:
        held = self._held[publisher]
        for name in hashes:
            if name not in held or held[name].chain is not None:
                held[name] = _Block(None)
            held[name].copies[medium.upper()] += 1

    def held(self, publisher: int, hashes: Sequence[int], medium: str) -> int:
        known = [self._held[publisher][name] for name in hashes if name in self._held[publisher]]
        for block in known:
            block.copies[medium.upper()] += 1
        return len(known)

    def removed(self, publisher: int, hashes: Sequence[int], *, medium: str = GPU) -> int:
        held, known = self._held[publisher], 0
        for name in hashes:
            if name in held and held[name].copies[medium.upper()]:
                known += 1
                held[name].copies[medium.upper()] -= 1
                self._tidy(publisher)
        return known

    def cleared(self, publisher: int, *, medium: str | None = GPU) -> None:
        for block in self._held[publisher].values():
            if medium is None:
                block.copies.clear()
            else:
                block.copies.pop(medium.upper(), None)
        self._tidy(publisher)

    def forget(self, publisher: int) -> None:
        self._held[publisher] = {}

    def sweep(self, budget: int) -> int:
        return 0

    def _tidy(self, publisher: int) -> None:
        held = {name: block for name, block in self._held[publisher].items() if block.copies.total()}
        self._held[publisher] = held

    def blocks(self, publisher: int) -> dict[str, int]:
        return dict(Counter(m for b in self._held[publisher].values() for m, n in b.copies.items() if n))

    def depth(self, name: int, publisher: int) -> int | None:
        block = self._held[publisher].get(name)
        return None if block is None or block.chain is None else len(block.chain) * block.size

    def tail(self, name: int, limit: int, publisher: int) -> bytes | None:
        block = self._held[publisher].get(name)
        if block is None or block.chain is None:
            return None
        text = b"".join(block.chain)
        return text[max(0, len(text) - limit) :]

    def adapters(self) -> frozenset[str]:
        held = [block for blocks in self._held.values() for block in blocks.values()]
        return frozenset(b.root[0] for b in held if b.root[0] is not None and b.chain is not None)

    def match(self, root: Root, prompt: bytes) -> NaiveMatches:
        return NaiveMatches({number: self._hit(number, root, prompt[:-1]) for number in self._held})

    def _hit(self, publisher: int, root: Root, prompt: bytes) -> Hit:
        media: dict[tuple[int, tuple[bytes, ...]], set[str]] = {}
        for block in self._held[publisher].values():
            if block.chain is not None and block.root == root:
                media.setdefault((block.size, block.chain), set()).update(
                    m for m, n in block.copies.items() if n
                )
        hits = [Hit()]
        for size, chain in media:
            prefixes = [chain[: count + 1] for count in range(len(chain))]
            if prompt.startswith(b"".join(chain)) and all((size, prefix) in media for prefix in prefixes):
                slow = [min(on) for prefix in prefixes if GPU not in (on := media[size, prefix])]
                lower = {medium: count * size for medium, count in Counter(slow).items()}
                hits.append(Hit(len(chain) * size, len(b"".join(chain)), lower))
        return max(hits, key=lambda hit: (hit.tokens, -sum(hit.lower.values()), hit.bytes))
