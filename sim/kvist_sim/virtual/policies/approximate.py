"""The approximate radix tree of SGLang's router and vllm-router. Pure.

``src/tree.rs`` of vllm-project/router, ``src/policies/tree.rs`` of SGLang's: one tree of all prompts
routed, each node with the workers its text was sent to. A look-up follows the text as far as the tree knows
it, for any worker, and answers with one worker of the last node: the one that created it, while it is still
there. Characters are counted per worker; an eviction takes least recently used leaves off those that have
too many.

Here an edge is a run of the prompt's blocks instead of characters: a hash covers all text before it, so that
both trees branch at the same places, to the block.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Found(NamedTuple):
    """Result of a look-up."""

    worker: int | None
    """Worker of the deepest match; None if the tree is empty, or no worker is left at its root."""
    blocks: int
    """Number of blocks of the prompt that the tree contains."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that were always routed together."""

    edge: tuple[int, ...] = ()
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """Count of look-ups and insertions at which each worker last got a prompt that ended here; 0: never."""
    maker: int | None = None
    """The worker whose prompt made the node."""

    def is_leaf(self, worker: int) -> bool:
        """Return whether no child has the worker."""
        return all(worker not in child.used for child in self.children.values())


class Tree:
    """Tree of all routed prompts."""

    def __init__(self) -> None:
        self._root = Node()
        self._epoch = 0
        self.sizes: dict[int, int] = {}
        """Blocks per worker."""

    def add(self, worker: int) -> None:
        """Add a worker that can be chosen."""
        self._root.used.setdefault(worker, 0)
        self.sizes.setdefault(worker, 0)

    def find(self, blocks: Sequence[int]) -> Found:
        """Return the deepest node on the path of these blocks; one reached in part counts."""
        node, known = self._root, 0
        while known < len(blocks) and (child := node.children.get(blocks[known])):
            shared = _shared(child.edge, blocks, known)
            node, known = child, known + shared
            if shared < len(child.edge):
                break
        worker = node.maker if node.maker in node.used else next(iter(node.used), None)
        if worker is not None and node is not self._root:
            self._touch(node, worker)
        return Found(worker, known)

    def insert(self, blocks: Sequence[int], worker: int) -> None:
        """Record that a prompt goes to this worker."""
        self.add(worker)
        node, known = self._root, 0
        while known < len(blocks):
            child = node.children.get(blocks[known])
            if child is None:
                child = node.children[blocks[known]] = Node(tuple(blocks[known:]), node, maker=worker)
            elif (shared := _shared(child.edge, blocks, known)) < len(child.edge):
                child = _split(child, shared)
            if worker not in child.used:
                child.used[worker] = 0
                self.sizes[worker] += len(child.edge)
            node, known = child, known + len(child.edge)
        if node is not self._root:
            self._touch(node, worker)

    def evict(self, limit: int) -> None:
        """Remove least recently used leaves from workers with more than ``limit`` blocks."""
        leaves = [
            (node.used[worker], id(node), worker, node)
            for node in self._nodes()
            for worker in node.used
            if self.sizes[worker] > limit and node.is_leaf(worker)
        ]
        heapify(leaves)
        while leaves:
            _, _, worker, node = heappop(leaves)
            if self.sizes[worker] > limit and (parent := self._take(node, worker)):
                heappush(leaves, (parent.used[worker], id(parent), worker, parent))

    def remove(self, worker: int) -> None:
        """Remove a worker."""
        if worker in self.sizes:
            self.evict_worker(worker)
            del self.sizes[worker], self._root.used[worker]

    def evict_worker(self, worker: int) -> None:
        """Remove all blocks of a worker, but not its place at the root."""
        for node in [node for node in self._nodes() if worker in node.used][::-1]:
            self._take(node, worker)

    def _take(self, node: Node, worker: int) -> Node | None:
        del node.used[worker]
        self.sizes[worker] -= len(node.edge)
        parent = node.parent
        if parent is None:
            return None
        if not node.used and not node.children:
            del parent.children[node.edge[0]]
        return parent if parent is not self._root and parent.is_leaf(worker) else None

    def _nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _touch(self, node: Node, worker: int) -> None:
        self._epoch += 1
        node.used[worker] = self._epoch


def _shared(edge: tuple[int, ...], blocks: Sequence[int], at: int) -> int:
    return bisect_left(range(min(len(edge), len(blocks) - at)), True, key=lambda i: edge[i] != blocks[at + i])


def _split(node: Node, shared: int) -> Node:
    """The new node above it, with the first ``shared`` blocks of its edge."""
    parent = node.parent
    upper = Node(node.edge[:shared], parent, {node.edge[shared]: node}, dict(node.used), node.maker)
    node.edge, node.parent = node.edge[shared:], upper
    if parent is not None:
        parent.children[upper.edge[0]] = upper
    return upper
