"""Routing history: the prompts that kvist sent to each endpoint, which must be cached there or soon will be.

It has two uses. *Cache credit*: the prompt of a request just sent counts as cached on its endpoint until the
engine's events arrive (``note``, then ``drop``). *Approximate mode*: nothing else is known of the endpoint's
cache; prompts are kept, and the least recent give way when their text exceeds what the cache can hold
(``limit``).

The ``Index`` is cut in blocks because engines announce blocks. Nothing cuts a prompt here, so this is a radix
tree over bytes: it matches to the byte, and a prompt of 450 KB is a handful of nodes. As blocks of 128 bytes
to 1 KiB in the index's segments it would be a thousand, each with a name and a place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec

from kvist_epp.index.tree.segment import Root

END_BYTES: Final = 64
"""What a note costs besides its text: each request ends in a block of its own (16 tokens, 64 bytes)."""


class RoutedPrompt(msgspec.Struct, eq=False):
    """A prompt that was sent to an endpoint; ``drop`` takes it back."""

    _end: _End | None


class _End(msgspec.Struct, eq=False):
    """The notes of one name that end at one node."""

    name: str
    node: _Node | None
    """None: evicted or forgotten."""
    count: int = 0


class _Node(msgspec.Struct, eq=False):
    """A stretch of text between two places where prompts part or end. The root has none."""

    text: bytes
    parent: _Node | None
    children: dict[int, _Node] = {}
    """By the first byte of their text."""
    holders: dict[str, int] = {}
    """Name → its ends here and below: who has the text up to here."""
    ends: dict[str, _End] = {}

    def upwards(self) -> Iterator[_Node]:
        """This node and those above it."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent


class _EndpointPrompts:
    """Prefixes of one endpoint."""

    __slots__ = ("ends", "limit", "size")

    def __init__(self) -> None:
        self.ends: OrderedDict[_End, None] = OrderedDict()
        """Least recent first."""
        self.size = 0
        """Bytes of distinct text, and ``END_BYTES`` for each end."""
        self.limit: int | None = None


class RoutingHistory:
    """Names are endpoint keys. Only ``match`` changes nothing."""

    def __init__(self) -> None:
        self._roots: dict[Root, _Node] = {}
        self._books: dict[str, _EndpointPrompts] = {}

    def __repr__(self) -> str:
        return f"<RoutingHistory {len(self._books)} names, {len(self)} ends>"

    def __len__(self) -> int:
        """Prompts that are kept, each counted once for a name."""
        return sum(len(book.ends) for book in self._books.values())

    def note(self, name: str, root: Root, prompt: bytes) -> RoutedPrompt:
        """The prompt was routed to this name."""
        book = self._books.get(name)
        if book is None:
            book = self._books[name] = _EndpointPrompts()
        node = self._place(root, prompt)
        end = node.ends.get(name) or self._add(book, name, node)
        end.count += 1
        book.ends.move_to_end(end)
        if book.limit is not None and book.size > book.limit:
            self._evict(book, book.limit)
        return RoutedPrompt(end)

    def drop(self, note: RoutedPrompt) -> None:
        """The note no longer counts; dropping it again changes nothing."""
        end, note._end = note._end, None
        if end is not None and end.node is not None:
            end.count -= 1
            if not end.count:
                self._remove(end)

    def moved(self, note: RoutedPrompt, root: Root, name: str) -> RoutedPrompt:
        """The prompt went to this name instead."""
        node = None if note._end is None else note._end.node
        if node is None:
            return note
        texts = [above.text for above in node.upwards()]
        self.drop(note)
        return self.note(name, root, b"".join(reversed(texts)))

    def match(self, root: Root, prompt: bytes) -> dict[str, int]:
        """Return how many bytes of the prompt's prefix each endpoint has; those with none are left out."""
        found: dict[str, int] = {}
        node, at, size = self._roots.get(root), 0, len(prompt)
        while node is not None and at < size:
            node = node.children.get(prompt[at])
            if node is None:
                break
            if prompt.startswith(node.text, at):
                at += len(node.text)
                found.update(dict.fromkeys(node.holders, at))
            else:
                found.update(dict.fromkeys(node.holders, at + shared_size(node.text, prompt, at)))
                break
        return found

    def limit(self, name: str, size: int | None) -> None:
        """The name keeps at most ``size`` bytes of distinct text, the most recent; None: no bound."""
        book = self._books.setdefault(name, _EndpointPrompts())
        book.limit = size
        if size is not None:
            self._evict(book, size)

    def forget(self, name: str) -> None:
        """The name has nothing, and no limit, any more."""
        book = self._books.pop(name, None)
        for end in list(book.ends if book else ()):
            self._remove(end, book)

    def size(self, name: str) -> int:
        """Bytes counted against the name's limit."""
        book = self._books.get(name)
        return book.size if book else 0

    def _place(self, root: Root, prompt: bytes) -> _Node:
        """The node at which this prompt ends, made when absent."""
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = _Node(b"", None)
        at, size = 0, len(prompt)
        while at < size:
            child = node.children.get(prompt[at])
            if child is None:
                child = node.children[prompt[at]] = _Node(prompt[at:], node)
            elif not prompt.startswith(child.text, at):
                child = _split(child, shared_size(child.text, prompt, at))
            at += len(child.text)
            node = child
        return node

    def _add(self, book: _EndpointPrompts, name: str, node: _Node) -> _End:
        end = node.ends[name] = _End(name, node)
        book.ends[end] = None
        book.size += END_BYTES
        above: _Node | None = node
        while above is not None:
            ends = above.holders.get(name, 0)
            above.holders[name] = ends + 1
            if not ends:
                book.size += len(above.text)
            above = above.parent
        return end

    def _remove(self, end: _End, book: _EndpointPrompts | None = None) -> None:
        node, end.node = end.node, None
        if node is None:
            return
        book = book or self._books[end.name]
        del book.ends[end], node.ends[end.name]
        book.size -= END_BYTES
        above: _Node | None = node
        while above is not None:
            left = above.holders[end.name] = above.holders[end.name] - 1
            if not left:
                del above.holders[end.name]
                book.size -= len(above.text)
            above = above.parent
        self._tidy(node)

    def _tidy(self, node: _Node) -> None:
        """Remove nodes without holders; merge one that neither branches nor ends with its child."""
        while node.parent is not None and not node.holders:
            del node.parent.children[node.text[0]]
            node = node.parent
        if node.parent is not None:
            _join(node)
        elif not node.holders:
            self._roots = {root: top for root, top in self._roots.items() if top is not node}

    def _evict(self, book: _EndpointPrompts, limit: int) -> None:
        while book.size > limit and book.ends:
            self._remove(next(iter(book.ends)))


def _split(node: _Node, at: int) -> _Node:
    """Makes a node of the first ``at`` bytes; ``node`` keeps the rest, its ends and its children."""
    upper = _Node(node.text[:at], node.parent)
    node.text = node.text[at:]
    upper.holders = dict(node.holders)
    upper.children = {node.text[0]: node}
    if node.parent is not None:
        node.parent.children[upper.text[0]] = upper
    node.parent = upper
    return upper


def _join(node: _Node) -> None:
    """The reverse of ``_split``, where nothing ends and only one child follows."""
    if node.ends or len(node.children) != 1 or node.parent is None:
        return
    (below,) = node.children.values()
    below.text = node.text + below.text
    below.parent = node.parent
    node.parent.children[below.text[0]] = below


def shared_size(text: bytes, prompt: bytes, start: int) -> int:
    """Return how many first bytes of ``text`` equal ``prompt`` from ``start`` on."""
    low, high = 0, min(len(text), len(prompt) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(text[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low
