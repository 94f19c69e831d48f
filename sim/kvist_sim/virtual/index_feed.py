"""The byte index of kvist's replicas in virtual time, which takes in the engines' events."""

from typing import Any, Final, Protocol

from kvist_epp.index.byte_index import Index, Root
from kvist_sim.engine.tiers import HOST, SHARED, TierNote
from kvist_sim.virtual.jobs import BLOCK, Call, block_text
from kvist_sim.virtual.loads import LoadNote
from kvist_sim.virtual.policy import Pod

VOLUME: Final = "volume"  # the storage that all engines share, if they share one
ROOT: Final[Root] = (None, None)


class EventRouter(Protocol):
    """A replica, which hears of the progress of requests."""

    def observed(self, pod: Pod, call: Call, tokens: int, depth: int, now: float, *, prompt: bool) -> None:
        """Take in a stored event of one of the engine's requests."""


def publisher_of(pod: Pod) -> str:
    """Return the name of a pod in the index."""
    return f"{pod.name}/0"


class IndexFeed:
    """The byte index of all replicas: they get the same events at the same time."""

    def __init__(self) -> None:
        self.index = Index()
        self.numbers: dict[Pod, int] = {}
        self.routers: list[EventRouter] = []
        self.storages: dict[str, int] = {}
        """Number in the index of the volume that engines share, once it has blocks."""

    def joined(self, pod: Pod) -> None:
        """Add a publisher with an empty cache."""
        self.numbers[pod] = self.index.publisher(publisher_of(pod))

    def left(self, pod: Pod) -> None:
        """Remove it with its blocks."""
        self.index.leave(self.numbers.pop(pod))
        while self.index.sweep(10_000):
            pass

    def told(self, pod: Pod, notes: list[Any], now: float) -> None:
        """Take in events: removals in one call, as the picker joins them; stored blocks with their text."""
        number, removed = self.numbers[pod], list[int]()
        for note in notes:
            if isinstance(note, int):
                removed.append(note)
                continue
            if removed:
                self.index.removed(number, removed)
                removed = []
            if isinstance(note, TierNote):
                self._slower(number, note)
                continue
            job, first, end = note
            self._stored(pod, job, first, end, now, loaded=isinstance(note, LoadNote))
        if removed:
            self.index.removed(number, removed)

    def _slower(self, number: int, note: TierNote) -> None:
        """Take in an event of a slower place; the GPU has announced the block (``kvevents.tier_blocks``)."""
        if not note.stored:
            self.index.removed(number, note.names, medium=note.medium)
            return
        if (medium := note.medium) == SHARED:
            number = self.storages.setdefault(VOLUME, self.index.publisher(VOLUME))
        for name in note.names:
            if not self.index.held(number, (name,), medium, counted=medium == HOST):
                self.index.held_as_others(number, name, medium)

    def _stored(self, pod: Pod, job: Any, first: int, end: int, now: float, *, loaded: bool) -> None:
        call: Call = job.call
        names, texts = job.hashes[first:end], block_text(call, first, end)
        parent = job.hashes[first - 1] if first else None
        self.index.stored(self.numbers[pod], ROOT, parent, names, texts, block_size=BLOCK)
        if loaded:
            return  # nothing was computed
        prompt = first * BLOCK < call.tokens
        tokens = min(end * BLOCK, call.tokens) - first * BLOCK if prompt else (end - first) * BLOCK
        for router in self.routers:
            router.observed(pod, call, tokens, end * BLOCK, now, prompt=prompt)
