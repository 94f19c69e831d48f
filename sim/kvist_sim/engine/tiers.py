"""Slower places for blocks: an engine's memory and disk, and a volume that engines share. Pure.

As vLLM's offloading connector (``v1/kv_offload/tiering``, 0.32): blocks of prompts are copied to the memory
and on to every file tier as soon as they are computed. What a request finds neither on the GPU nor missing is
loaded before the request is admitted, while others run; a block on a disk goes through the memory. Each place
reads one block after the other, so that loads wait for each other; writes delay no reads.

Events are those of a real engine with a host tier and a disk tier, as recorded with vLLM 0.32:

- Blocks that are computed: the GPU's event; then, in a later batch, one event of the memory for each block,
  in no order, so that children come before parents; then, later still, the disk's in the same order. Blocks
  that leave the memory for them are in one event before.
- Blocks that are read from a disk: for each block that leaves the memory an event of its own; one event of
  the memory for each block, in their order; later the GPU's, which has no parent if the GPU had nothing.
- Blocks that leave a disk: none.
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from kvist_epp.engines.vllm.tier_metrics import TierCounters
from kvist_sim.engine.blocks import Name
from kvist_sim.engine.timing import KV_BYTES_PER_TOKEN

HOST: Final = "CPU"
DISK: Final = "STORAGE"
SHARED: Final = "SHARED"
"""Media as the picker's index calls them; events say ``STORAGE`` with locality ``REMOTE`` for the last."""
PCIE: Final = 64e9
"""Bytes per second in one direction: PCIe 5 with 16 lanes (data sheet of the H100: 128 GB/s both ways)."""
NVME: Final = 7e9
"""Bytes per second of a drive with four lanes of PCIe 4, of which the link carries 7.9."""
NETWORK: Final = 12.5e9
"""Bytes per second of a volume behind 100 Gbit/s, for all engines together."""
GIB: Final = 1 << 30
Name_co = TypeVar("Name_co", bound=Hashable, covariant=True)


class Chain(Protocol[Name_co]):
    """A prompt, and what follows it, as names of its full blocks."""

    @property
    def hashes(self) -> Sequence[Name_co]:
        """Return the names, which are hashes over all that comes before, too."""


class TierNote(NamedTuple):
    """An event of a slower place."""

    medium: str
    stored: bool
    names: tuple[Any, ...]
    """Hashes: one of a stored block, all of those removed."""
    parent: Any = None
    """Hash of the block before a stored one; None for the first of a prompt."""


@dataclass(frozen=True, slots=True)
class TierKind:
    """Size and speed of one place."""

    medium: str
    blocks: int
    block_seconds: float
    """Seconds to read one block."""

    @classmethod
    def of(cls, medium: str, size: float, bandwidth: float, tokens: int) -> "TierKind":
        """Return a place of ``size`` bytes that reads ``bandwidth`` bytes per second, for blocks of so many
        tokens."""
        each = KV_BYTES_PER_TOKEN * tokens
        return cls(medium, int(size // each), each / bandwidth)


class TierStore(Generic[Name]):
    """The blocks in one place, the least recently used first."""

    def __init__(self, kind: TierKind, same: "TierStore[Name] | None" = None) -> None:
        """``same``: a store with the same blocks, which is read by its own way (of the ideal pool)."""
        self.kind = kind
        self._names: OrderedDict[Name, None] = OrderedDict() if same is None else same._names
        self._free_at = 0.0
        """Time at which all reads that have begun are over."""

    @property
    def names(self) -> Container[Name]:
        """Return the blocks that are there, as a container that is quick to ask."""
        return self._names

    def __contains__(self, name: Name) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self._names)

    def touch(self, names: Iterable[Name]) -> None:
        """Mark blocks as just used."""
        for name in names:
            if name in self._names:
                self._names.move_to_end(name)

    def add(self, name: Name) -> bool:
        """Store a block, or mark it as just used; return whether it is new."""
        new = name not in self._names
        self._names[name] = None
        self._names.move_to_end(name)
        return new

    def shrink(self) -> list[Name]:
        """Drop the least recently used blocks beyond the size, and return them."""
        return [self._names.popitem(last=False)[0] for _ in range(len(self) - self.kind.blocks)]

    def read_seconds(self, blocks: int, now: float) -> float:
        """Return the seconds that an engine would count for the transfer of so many blocks: its own, and of a
        shared volume also those of others that come before."""
        own = blocks * self.kind.block_seconds
        return own + max(0.0, self._free_at - now) if self.kind.medium == SHARED else own

    def read(self, blocks: int, now: float) -> float:
        """Return the time at which so many more blocks have been read."""
        self._free_at = max(now, self._free_at) + blocks * self.kind.block_seconds
        return self._free_at


class EngineTiers(Generic[Name]):
    """The places of one engine: memory first, then disks; a shared volume is a store of several engines."""

    def __init__(
        self,
        host: TierStore[Name],
        disks: Sequence[TierStore[Name]] = (),
        *,
        tokens: int,
        seed: int = 0,
        noting: bool = True,
    ) -> None:
        """``tokens``: of a block; ``noting``: there is a router that takes the events."""
        self.host = host
        self.disks = tuple(disks)
        self.tokens = tokens
        self.written = {store.kind.medium: 0 for store in (host, *disks)}
        """Blocks that were copied there from the GPU."""
        self._noting = noting
        self.loaded = dict.fromkeys((HOST, DISK, SHARED), 0)
        """Blocks that were loaded, by the place in which they were found."""
        self.load_seconds = self.read_seconds = 0.0
        """Seconds of transfers to the GPU, and from disks to memory."""
        self._random = Random(f"order of events {seed}")
        self._loads: list[TierNote] = []
        self._offloads: list[TierNote] = []

    def find(self, names: Sequence[Name], allowed: frozenset[str] | None = None) -> list[TierStore[Name]]:
        """Return where each of the first blocks is that can be loaded, up to one that is nowhere.

        ``allowed``: media that may be read (``kv_load_tiers`` of a request); None = all.
        """
        stores = [s for s in (self.host, *self.disks) if allowed is None or s.kind.medium in allowed]
        found: list[TierStore[Name]] = []
        if not stores:
            return found
        first, *others = stores
        near = first.names
        for name in names:
            if name in near:
                found.append(first)
                continue
            for store in others:
                if name in store.names:
                    found.append(store)
                    break
            else:
                break
        return found

    def load(self, job: Chain[Name], first: int, found: Sequence[TierStore[Name]], now: float) -> float:
        """Begin to load blocks of a job from ``first`` on; return the time at which they are on the GPU."""
        there = now
        for disk in self.disks:
            at = [first + n for n, store in enumerate(found) if store is disk]
            if at:
                self.read_seconds += disk.read_seconds(len(at), now)
                there = max(there, disk.read(len(at), now))
                disk.touch(job.hashes[n] for n in at)
                self._promote(job, at)
        self.host.touch(reversed(job.hashes[: first + len(found)]))  # the tail leaves first
        for store in found:
            self.loaded[store.kind.medium] += 1
        self.load_seconds += self.host.read_seconds(len(found), there)
        return self.host.read(len(found), there)

    def counters(self, on_gpu: int) -> TierCounters:
        """Return the totals that ``/metrics`` would have; ``on_gpu``: prompt tokens found on the GPU."""
        each, size, tokens = KV_BYTES_PER_TOKEN * self.tokens, self.loaded, self.tokens
        from_disk = size[DISK] + size[SHARED]
        return TierCounters(
            {"device": on_gpu, "host": size[HOST] * tokens, "disk": from_disk * tokens},
            load_bytes=(size[HOST] + from_disk) * each,
            load_seconds=self.load_seconds,
            read_bytes=from_disk * each,
            read_seconds=self.read_seconds,
        )

    def totals(self) -> dict[str, float]:
        """Return the totals of vLLM's ``kv_offload_*`` counters by name; writes cost no time of a request."""
        each, host = KV_BYTES_PER_TOKEN * self.tokens, self.host.kind
        disks = [store.kind for store in self.disks]
        from_disk = self.loaded[DISK] + self.loaded[SHARED]
        return {
            "kv_offload_load_bytes": (self.loaded[HOST] + from_disk) * each,
            "kv_offload_load_time": self.load_seconds,
            "kv_offload_store_bytes": self.written[HOST] * each,
            "kv_offload_store_time": self.written[HOST] * host.block_seconds,
            "kv_offload_tiering_read_bytes": from_disk * each,
            "kv_offload_tiering_read_time": self.read_seconds,
            "kv_offload_tiering_write_bytes": sum(self.written[kind.medium] for kind in disks) * each,
            "kv_offload_tiering_write_time": sum(self.written[k.medium] * k.block_seconds for k in disks),
        }

    def offload(self, job: Chain[Name], first: int, end: int) -> None:
        """Copy computed blocks of a job to every place."""
        order = list(range(first, end))
        self._random.shuffle(order)
        for store in (self.host, *self.disks):
            added = {
                at for at in reversed(range(first, end)) if store.add(job.hashes[at])
            }  # the tail leaves first
            new = [at for at in order if at in added]
            self.written[store.kind.medium] += len(new)
            gone = tuple(store.shrink())
            if not self._noting:
                continue
            if gone and store is self.host:
                self._offloads.append(TierNote(HOST, False, gone))
            self._offloads += [self.stored_note(store.kind.medium, job, at) for at in new]

    def _promote(self, job: Chain[Name], positions: Sequence[int]) -> None:
        """Put blocks that are read from a disk into memory."""
        stored = [self.stored_note(HOST, job, at) for at in positions if self.host.add(job.hashes[at])]
        gone = self.host.shrink()
        if self._noting:
            self._loads += [TierNote(HOST, False, (name,)) for name in gone]
            self._loads += stored

    def take_loads(self) -> list[TierNote]:
        """Return the events of loads since the last call; the GPU announces these blocks later."""
        taken, self._loads = self._loads, []
        return taken

    def take_offloads(self) -> list[TierNote]:
        """Return the events of blocks that the GPU has announced before."""
        taken, self._offloads = self._offloads, []
        return taken

    def stored_note(self, medium: str, job: Chain[Name], at: int) -> TierNote:
        """Return the event of a block of a job that was stored."""
        return TierNote(medium, True, (job.hashes[at],), job.hashes[at - 1] if at else None)
