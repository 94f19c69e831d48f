"""State of one publisher: counters, blocks from decode, and events that wait for their parents. Pure."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import inf

from kvist_epp.engines.vllm.kv_events import Stored
from kvist_epp.kvevents.decode_blocks import DecodeBlockTable
from kvist_epp.kvevents.tier_state import Leases, WaitingBlocks

LEASE_SECONDS = 3600.0
"""Default of ``--storage-lease``: files that nothing renews may be removed by then."""


@dataclass(slots=True)
class PublisherStats:
    """Counters of one publisher, for metrics and ``/debug/index``.

    All but the last four only grow. ``warm`` and ``suspect`` decide whether the index is trusted for the
    endpoint, ``messages`` and ``restarts`` are inputs of its accuracy.
    """

    messages: int = 0
    """Live messages received."""
    garbage: int = 0
    """Messages that are no batch of events, or that a bug kept from being applied whole."""
    stored: int = 0
    """BlockStored events."""
    removed: int = 0
    """BlockRemoved events."""
    cleared: int = 0
    """AllBlocksCleared events."""
    unknown: int = 0
    """Events of unknown types."""
    malformed: int = 0
    """Events of known types that could not be decoded."""
    blocks: int = 0
    """Blocks stored, in the groups and tiers that are indexed."""
    gaps: int = 0
    """Gaps in the numbers of live messages."""
    resets: int = 0
    """Times that all blocks of the publisher were forgotten, including at restarts."""
    restarts: int = 0
    """Restarts of the engine."""
    replays: int = 0
    """Replays requested."""
    replay_failures: int = 0
    """Replays that were given up."""
    other_groups: int = 0
    """Events of KV cache groups that are not followed (a second whole prefix, an unknown kind)."""
    missized: int = 0
    """Events whose token ids do not fill their blocks."""
    opaque_blocks: int = 0
    """Blocks that can never match: media, prompt embeddings, token ids that the model's files do not have."""
    unknown_ids: int = 0
    """Events with token ids that the model's files do not have."""
    orphans: int = 0
    """Events that waited because their parent was unknown."""
    orphans_dropped: int = 0
    """Events of these that were dropped because their parent did not come in time."""
    credited: int = 0
    """Blocks from decode that proved canonical."""
    uncredited: int = 0
    """Blocks from decode that were not canonical, or could not be checked."""
    revoked: int = 0
    """Blocks from decode whose credit was revoked because of the text that followed."""
    held_unknown: int = 0
    """Blocks of slower tiers whose hash no event has explained in time."""
    warm: bool = False
    """True after the first replay has ended or failed."""
    suspect: bool = False
    """True while messages are missing and no replay has explained it yet."""
    held: int = 0
    """Live messages that wait for the end of a replay."""
    last_message_at: float | None = None
    """Monotonic seconds of the last live message; None before the first one."""


@dataclass(slots=True)
class _Orphan:
    event: Stored
    since: float
    cut_at: int | None = None
    """Position of the first block that was removed while the event waited: the chain ends before it."""


class Quarantine:
    """Stored events of one publisher whose parent is unknown.

    They are never stored as a root, because their text would match at the wrong place, and not dropped at
    once, because the parent may be on its way: a replay or a later event may bring it. At most ``limit``
    events wait, each for at most ``age`` seconds.
    """

    def __init__(self, limit: int = 4096, age: float = 30.0) -> None:
        self._limit = limit
        self._age = age
        self._numbers = count()
        self._orphans: OrderedDict[int, _Orphan] = OrderedDict()
        self._by_parent: dict[int, list[int]] = {}
        self._by_hash: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of events that wait."""
        return len(self._orphans)

    def add(self, event: Stored, now: float) -> int:
        """Add an event; return the number of older events that were dropped to make room."""
        number = next(self._numbers)
        self._orphans[number] = _Orphan(event, now)
        self._by_parent.setdefault(event.parent or 0, []).append(number)
        for position, block in enumerate(event.hashes):
            self._by_hash[block] = (number, position)
        dropped = 0
        while len(self._orphans) > self._limit:
            self._remove(next(iter(self._orphans)))
            dropped += 1
        return dropped

    def take_children(self, hashes: list[int]) -> list[Stored]:
        """Remove and return the events whose parent is one of ``hashes``, which may repeat, oldest first."""
        numbers = dict.fromkeys(number for parent in hashes for number in self._by_parent.get(parent, ()))
        return [event for number in numbers if (event := self._remove(number)) is not None]

    def parents(self) -> list[int]:
        """Return the hashes that events wait for."""
        return list(self._by_parent)

    def on_removed(self, block: int) -> None:
        """Note that the engine removed a block: neither it nor what follows it may be stored later."""
        place = self._by_hash.pop(block, None)
        if place is None:
            return
        orphan = self._orphans[place[0]]
        orphan.cut_at = place[1] if orphan.cut_at is None else min(orphan.cut_at, place[1])

    def expire(self, now: float) -> int:
        """Drop events that waited too long; return how many."""
        dropped = 0
        while self._orphans:
            number, orphan = next(iter(self._orphans.items()))
            if now - orphan.since < self._age:
                break
            self._remove(number)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Remove all events."""
        self._orphans.clear()
        self._by_parent.clear()
        self._by_hash.clear()

    def _remove(self, number: int) -> Stored | None:
        orphan = self._orphans.pop(number)
        event = orphan.event
        for block in event.hashes:
            if self._by_hash.get(block, (None,))[0] == number:
                del self._by_hash[block]
        siblings = self._by_parent[event.parent or 0]
        siblings.remove(number)
        if not siblings:
            del self._by_parent[event.parent or 0]
        if orphan.cut_at is None:
            return event
        return event.slice(0, orphan.cut_at) if orphan.cut_at else None


class PublisherState:
    """State of one publisher (a data-parallel rank of an endpoint) apart from the index."""

    __slots__ = (
        "cleaned_at",
        "decode_blocks",
        "endpoint",
        "events_at",
        "group",
        "leases",
        "name",
        "number",
        "quarantine",
        "shared_media",
        "stats",
        "storage_name",
        "tiered",
        "waiting",
    )

    def __init__(self, name: str, number: int, lease_seconds: float = LEASE_SECONDS) -> None:
        """``name`` is "namespace/name/rank", ``number`` the publisher's number in the index,
        ``lease_seconds`` how long blocks are believed that no event removes."""
        self.name = name
        self.number = number
        self.endpoint = name.rpartition("/")[0]
        self.group: int | None = None
        """The one KV cache group that is indexed; None until it is known."""
        self.decode_blocks = DecodeBlockTable()
        self.quarantine = Quarantine()
        self.tiered = False
        """An event of a slower tier was seen."""
        self.storage_name: str | None = None
        """Name of the storage that its engine shares with others; None: it shares none."""
        self.shared_media: frozenset[str] = frozenset()
        """Media of its events that are this storage."""
        self.waiting = WaitingBlocks()
        self.leases = Leases(lease_seconds)
        self.events_at = -inf
        """Time of the newest batch that was applied, by the engine's clock."""
        self.cleaned_at: Mapping[str, float] = {}
        """Of storage whose files were found missing: ``events_at`` of each publisher that shared it then, and
        under "" of the one that found it out. What events of before have stored is not expected again."""
        self.stats = PublisherStats()

    def clear(self) -> None:
        """Forget every block."""
        self.clear_gpu()
        self.waiting.clear()
        self.leases.clear()

    def cleaned_since(self, source: "PublisherState") -> bool:
        """Return whether files of this storage were found missing after the batch that is applied now: it is
        replayed, since live ones are newer."""
        at = self.cleaned_at
        return bool(at) and source.events_at <= at.get(source.name, at[""])

    def clear_gpu(self) -> None:
        """Forget what the engine computed and had not moved to a slower tier."""
        self.decode_blocks.clear()
        self.quarantine.clear()
