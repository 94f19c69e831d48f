"""Reader of ``spec.offload``. Pure."""

import re
from typing import Final

from kvist_operator.errors import SpecError

from .fields import NAME_LENGTH, OBJECT_NAME, Fields
from .offload import LMCACHE_IMAGE, LMCACHE_PORT, SHARED_PATH, LmCache, Offload, SharedVolume

MIN_BYTES: Final = 1 << 20
"""A smaller amount of memory is taken for a number without its unit."""
_PART: Final = r"(?!\.\.?(/|$))[A-Za-z0-9._-]+"
"""One part of a path; neither ``.`` nor ``..``."""
ADDRESS: Final = r"(tcp://)?([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?)(:([0-9]{1,5}))?"


def read_offload(f: Fields) -> Offload:
    """Return the fields of ``spec.offload``. Raises SpecError for what contradicts each other."""
    cpu, disk = f.quantity("cpu", low=MIN_BYTES), f.quantity("disk", low=MIN_BYTES)
    offload = Offload(
        cpu_bytes=cpu,
        disk_bytes=disk,
        storage_class=f.text("storageClassName", pattern=OBJECT_NAME, like="local-nvme", most=NAME_LENGTH),
        host_path=f.text("hostPath", pattern=rf"(/{_PART})+", like="/var/cache/kv-blocks", most=1024),
        eviction=f.text("evictionPolicy", choices=("LRU", "ARC")),
        generated=f.switch("generatedTokens", False),
        shared=_shared(f.optional("shared")),
        lmcache=_lmcache(f.optional("lmcache")),
    )
    _check(offload, f)
    return f.done(offload)


def _check(offload: Offload, f: Fields) -> None:
    if offload.lmcache:
        if offload.cpu_bytes or offload.disk_bytes or offload.shared:
            problem = "excludes cpu, disk and shared, since its server has memory and storage of its own: "
            raise SpecError(f.at("lmcache"), f"{problem}leave one of them out")
        if offload.eviction:
            problem = "is for spec.offload.cpu; LMCache's server evicts the least recently used: leave it out"
            raise SpecError(f.at("evictionPolicy"), problem)
        return
    if offload.disk_bytes and not offload.cpu_bytes:
        raise SpecError(f.at("disk"), "needs spec.offload.cpu too: blocks reach the disk through memory")
    if offload.shared and not offload.cpu_bytes:
        problem = "needs spec.offload.cpu too: blocks reach the volume through memory"
        raise SpecError(f.at("shared"), problem)
    for field, given in (("storageClassName", offload.storage_class), ("hostPath", offload.host_path)):
        if given and not offload.disk_bytes:
            raise SpecError(f.at(field), "needs spec.offload.disk too: the size of the volume")
    if offload.storage_class and offload.host_path:
        problem = "excludes spec.offload.storageClassName: blocks are on one volume; leave one of them out"
        raise SpecError(f.at("hostPath"), problem)
    for field, wanted in (("evictionPolicy", bool(offload.eviction)), ("generatedTokens", offload.generated)):
        if wanted and not offload.cpu_bytes:
            raise SpecError(f.at(field), "needs spec.offload.cpu too: the memory for the blocks")


def _shared(f: Fields | None) -> SharedVolume | None:
    if f is None:
        return None
    size = f.quantity("size", low=MIN_BYTES)
    shared = SharedVolume(
        claim=f.required(
            "claim", "a claim with ReadWriteMany", pattern=OBJECT_NAME, like="kv-blocks", most=NAME_LENGTH
        ),
        path=f.text("path", SHARED_PATH, pattern=rf"{_PART}(/{_PART})*", like="team-a/kv", most=512),
        size_bytes=size,
    )
    if not size:
        problem = "is missing: vLLM never deletes blocks, so that a limit is needed; write it like 10Ti"
        raise SpecError(f.at("size"), problem)
    return f.done(shared)


def _lmcache(f: Fields | None) -> LmCache | None:
    if f is None:
        return None
    memory = f.quantity("memory", low=MIN_BYTES)
    image = f.text("image", pattern=".+", like=LMCACHE_IMAGE, most=512)
    address = f.text("address", pattern=ADDRESS, like=f"tcp://lmcache.infra:{LMCACHE_PORT}", most=300)
    if bool(memory) == bool(address):
        problem = "needs exactly one of memory (of the server on each node) and address (of your own server)"
        raise SpecError(f.path, problem)
    if image and address:
        raise SpecError(f.at("image"), "has no effect beside spec.offload.lmcache.address: leave it out")
    found = re.fullmatch(ADDRESS, address)
    if found:
        address = f"tcp://{found[2]}:{found[5] or LMCACHE_PORT}"
    return f.done(
        LmCache(memory_bytes=memory, image=image or (LMCACHE_IMAGE if memory else ""), address=address)
    )
