"""KV offloading of the simulated engine: vLLM's configuration, blocks in a folder, events as messages.

Sources: ``OffloadingConnector`` of vLLM 0.32 (``kv_connector_extra_config`` in
``v1/kv_offload/{config,tiering/spec}.py``, ``_parse_tier_filter`` of the connector's scheduler) and events
recorded from it (``tests/engine/tiers``). Of the specs, ``TieringOffloadingSpec`` has files; any other has
host memory alone.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvist_epp.engines.vllm.kv_events import Event, Removed, Stored
from kvist_epp.errors import SettingsError
from kvist_sim.engine.blocks import Digest, short
from kvist_sim.engine.sequence import Sequence as Request
from kvist_sim.engine.tiers import DISK, GIB, HOST, SHARED, EngineTiers, TierKind, TierNote, TierStore

CONNECTOR: Final = "OffloadingConnector"
UNBOUNDED: Final = 1 << 62
"""Blocks: engines put no limit to their files."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A file tier."""

    folder: Path
    medium: str
    """``SHARED`` where its locality is REMOTE, else ``STORAGE``."""
    events: bool


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The places to which an engine copies the blocks that it has computed."""

    host_bytes: int
    disks: tuple[Disk, ...] = ()
    self_describing: bool = False
    """Events have the tokens of their block, else its hash alone."""
    prompts_only: bool = True
    host_bandwidth: float = 1.0
    """Bytes per second, also below."""
    disk_bandwidth: float = 1.0


def read_offload(
    config: Mapping[str, Any] | None, size: float | None, *, host_bandwidth: float, disk_bandwidth: float
) -> OffloadSettings | None:
    """Return the settings of ``--kv-transfer-config`` and ``--kv-offloading-size`` (GiB); None: neither.

    Raises SettingsError for a configuration without a size, or with a file tier without a folder.
    """
    found = next((one for one in _connectors(config or {}) if one.get("kv_connector") == CONNECTOR), None)
    if found is None:
        if not size:
            return None
        found = {"kv_connector_extra_config": {"cpu_bytes_to_use": size * GIB}}
    extra = found.get("kv_connector_extra_config") or {}
    if not extra.get("cpu_bytes_to_use"):
        raise SettingsError("cpu_bytes_to_use must be specified in kv_connector_extra_config")
    disks = []
    for one in extra.get("secondary_tiers") or ():
        if one.get("type") != "fs":
            continue
        if not one.get("root_dir"):
            raise SettingsError("a secondary tier of type fs needs root_dir")
        medium = SHARED if one.get("locality") == "REMOTE" else DISK
        disks.append(Disk(Path(one["root_dir"]), medium, bool(one.get("enable_kv_events"))))
    return OffloadSettings(
        int(extra["cpu_bytes_to_use"]),
        tuple(disks),
        bool(extra.get("self_describing_kv_events")),
        extra.get("offload_prompt_only") is not False,
        host_bandwidth,
        disk_bandwidth,
    )


def _connectors(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configuration, or those that a MultiConnector combines."""
    inner = (config.get("kv_connector_extra_config") or {}).get("connectors")
    return [config] if not inner else [one for each in inner for one in _connectors(each)]


def allowed_media(params: Mapping[str, Any] | None) -> frozenset[str] | None:
    """Return the media that ``kv_transfer_params.kv_load_tiers`` of a request allows; None: all.

    A matcher without a locality allows both.
    """
    tiers = None if params is None else params.get("kv_load_tiers")
    if tiers is None:
        return None
    found = set[str]()
    for one in tiers:
        medium, locality = str(one.get("medium", "")).upper(), one.get("locality")
        if medium == HOST:
            found.add(HOST)
        elif medium == DISK:
            found |= {m for m in (DISK, SHARED) if locality in {None, "REMOTE" if m == SHARED else "LOCAL"}}
    return frozenset(found)


class _Files(Container[Digest]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: Digest) -> Path:
        """Return the file of a block."""
        text = name.hex()
        return self.folder / text[:3] / f"{text[3:5]}_g0" / f"{text}.bin"

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and self.path(name).exists()


class FolderStore(TierStore[Digest]):
    """Blocks as empty files, so that engines in other processes find them, and removing a
    file removes the block. The files lie as those of vLLM (``v1/kv_offload/file_mapper.py``)."""

    def __init__(self, kind: TierKind, folder: Path) -> None:
        super().__init__(kind)
        self._files = _Files(folder)

    @property
    def names(self) -> Container[Digest]:
        """Return the files."""
        return self._files

    def add(self, name: Digest) -> bool:
        """Write a file; return whether it is new."""
        path = self._files.path(name)
        if path.exists():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return True

    def shrink(self) -> list[Digest]:
        """Return nothing: there is no limit."""
        return []

    def touch(self, names: Iterable[Digest]) -> None:
        """Do nothing: nothing is dropped."""


@dataclass(frozen=True, slots=True)
class _BlockNote:
    """A ``TierNote`` of a stored block, with what a self-describing event has."""

    medium: str
    names: tuple[Digest, ...]
    parent: Digest | None
    tokens: list[int]
    lora: str | None
    stored: bool = True


class OffloadTiers(EngineTiers[Digest]):
    """The places of one engine, and their events as messages."""

    def __init__(self, settings: OffloadSettings, block: int, *, seed: int = 0) -> None:
        """``block``: tokens of a block."""
        host = TierKind.of(HOST, settings.host_bytes, settings.host_bandwidth, block)
        disks = [
            FolderStore(TierKind(one.medium, UNBOUNDED, _seconds(settings, block)), one.folder)
            for one in settings.disks
        ]
        super().__init__(TierStore(host), disks, tokens=block, seed=seed)
        self.settings = settings
        self._silent = {one.medium for one in settings.disks if not one.events}

    def stored_note(self, medium: str, job: Any, at: int) -> Any:
        """Return the event of a stored block of a request."""
        request: Request = job
        size, adapter = self.tokens, request.adapter
        return _BlockNote(
            medium,
            (request.digests[at],),
            request.digests[at - 1] if at else None,
            request.tokens[at * size : (at + 1) * size],
            None if adapter is None else adapter[0],
        )

    def batches(self, gpu: Sequence[Event]) -> list[list[Event]]:
        """Return the messages of a step, in the order of a real engine; ``gpu``: the events of its GPU.

        Blocks that leave the memory for those read from a disk come before the GPU's events, and the blocks
        that are read after them. What is computed is copied in later steps: memory first, then each disk;
        blocks that leave the memory for it are at the end of the GPU's message.
        """
        loads, copies = self.take_loads(), self.take_offloads()
        stored = [one for one in copies if one.stored]
        media = dict.fromkeys(one.medium for one in stored)
        messages: list[list[Any]] = [
            [note for note in loads if not note.stored],
            [*gpu, *[note for note in loads if note.stored], *[one for one in copies if not one.stored]],
            *[[one for one in stored if one.medium == medium] for medium in media],
        ]
        wired = [[self._event(one) for one in message if self._published(one)] for message in messages]
        return [message for message in wired if message]

    def _published(self, one: Any) -> bool:
        return getattr(one, "medium", HOST) not in self._silent

    def _event(self, note: Any) -> Event:
        if isinstance(note, TierNote):
            return Removed(hashes=list(map(short, note.names)), medium=note.medium, group=0)
        if not isinstance(note, _BlockNote):
            return note  # type: ignore[no-any-return]
        told = self.settings.self_describing
        return Stored(
            hashes=list(map(short, note.names)),
            parent=short(note.parent) if told and note.parent is not None else None,
            token_ids=note.tokens if told else [],
            block_size=self.tokens if told else 0,
            medium=note.medium,
            lora=note.lora if told else None,
            group=0,
            kind="full_attention" if told else None,
        )


def _seconds(settings: OffloadSettings, block: int) -> float:
    return TierKind.of(DISK, 0, settings.disk_bandwidth, block).block_seconds
