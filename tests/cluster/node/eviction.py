"""Eviction of a pod that uses more of its node's disk than its limits allow, as the kubelet does it.

Order and messages: ``localStorageEviction`` in ``pkg/kubelet/eviction`` of Kubernetes 1.36.3. Not as on a
real node: usage is measured each second instead of each minute, only volumes and logs count for containers
(the layer that a container writes to cannot be seen from outside of it), and nothing is evicted because a
node runs full.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_kube.quantity import parse_bytes

from .follow import Json

REASON: Final = "Evicted"
RESOURCE: Final = "ephemeral-storage"
LOOK_SECONDS: Final = 1.0
STAT_BLOCK: Final = 512


@dataclass(frozen=True)
class DiskUse:
    """Bytes on disk of a pod."""

    volumes: Mapping[str, int]
    """By the name of an emptyDir."""
    logs: Mapping[str, int]
    """By the name of a container."""


def has_limits(spec: Json) -> bool:
    """Return whether there is anything to measure."""
    sizes = any("sizeLimit" in (each.get("emptyDir") or {}) for each in spec.get("volumes", ()))
    return sizes or bool(_limits(spec["containers"]))


def eviction_message(spec: Json, use: DiskUse) -> str:
    """Return why a pod of this spec is evicted; empty if it stays."""
    volumes = {v["name"]: v["emptyDir"] for v in spec.get("volumes", ()) if v.get("emptyDir") is not None}
    for name, volume in volumes.items():
        size = volume.get("sizeLimit")
        if size and use.volumes.get(name, 0) > parse_bytes(size):
            return f'Usage of EmptyDir volume "{name}" exceeds the limit "{size}". '
    limits = _limits(spec["containers"])
    sidecars = _limits(c for c in spec.get("initContainers", ()) if c.get("restartPolicy") == "Always")
    on_disk = sum(used for name, used in use.volumes.items() if volumes[name].get("medium") != "Memory")
    total = sum(parse_bytes(each) for each in (*limits.values(), *sidecars.values()))
    if total and on_disk + sum(use.logs.values()) > total:
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {total}. "
    for name, limit in limits.items():
        if use.logs.get(name, 0) > parse_bytes(limit):
            return f'Container {name} exceeded its local ephemeral storage limit "{limit}". '
    return ""


def disk_use(spec: Json, sources: Mapping[str, Path], logs: Path) -> DiskUse:
    """Measure the volumes of a pod and the logs of its containers."""
    names = [v["name"] for v in spec.get("volumes", ()) if v.get("emptyDir") is not None]
    containers = (*spec.get("initContainers", ()), *spec["containers"])
    return DiskUse(
        {name: size_of(sources[name]) for name in names if name in sources},
        {each["name"]: size_of(logs / str(each["name"])) for each in containers},
    )


def size_of(folder: Path) -> int:
    """Return the bytes on disk below a folder; files may vanish meanwhile."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in (".", *names):
            try:
                total += Path(at, name).lstat().st_blocks * STAT_BLOCK
            except FileNotFoundError:
                continue
    return total


def _limits(containers: Iterable[Json]) -> dict[str, str]:
    found = {c["name"]: c.get("resources", {}).get("limits", {}).get(RESOURCE, "") for c in containers}
    return {name: limit for name, limit in found.items() if limit}
