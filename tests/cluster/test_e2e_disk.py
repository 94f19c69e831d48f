"""The disk tier in a whole cluster: overflow, and what fills it, with kubelets that evict pods.

``KVIST_DISK_SECONDS`` is how long memory, disk and claim are overflowed; ``make bench-disk`` sets 600."""

import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.node.eviction import size_of
from tests.cluster.pooled import condition, installed, pool, until_ready
from tests.cluster.space import Space

SHORT = 15.0
SECONDS = float(os.environ.get("KVIST_DISK_SECONDS", SHORT))
pytestmark = pytest.mark.timeout(285 + SECONDS)
Json = dict[str, Any]
LIMIT = (32 if SECONDS <= SHORT else 256) << 20
"""Size of the folders in bytes. In a long run what is written each second is a smaller part of it: on a real
node a folder takes minutes to fill, and a cleaner may get no time for a second."""
RATE = 0.2 * (32 << 20)
"""Bytes that are written to a folder each second."""
OTHER = f"open('/kv/other', 'wb').write(os.urandom({LIMIT} + (1 << 20))); time.sleep(1e6)"


def blocks(folder: str, seconds: float = SHORT) -> str:
    """Return a program that writes blocks as an engine does."""
    return f"""
size, begun, failed = 64 << 10, time.time(), 0
for n in range(int({seconds} * {RATE} / size)):
    while n * size > (time.time() - begun) * {RATE}:
        time.sleep(0.01)
    folder = f"{folder}/{{n % 4096:03x}}/{{n % 256:02x}}_g0"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{{folder}}/{{n}}.tmp", "wb") as file:
            file.write(bytes(size))
        os.replace(f"{{folder}}/{{n}}.tmp", f"{{folder}}/{{n}}.bin")
    except FileNotFoundError:  # the cleaner has just removed the empty folder; for vLLM a block less
        failed += 1
print(f"written {{(n + 1 - failed) * size}} failed {{failed}}", flush=True)
time.sleep(1e6)
"""


@dataclass
class Folders:
    """The folders of blocks of one pod, as the node sees them."""

    cluster: Cluster
    room: Space
    peak: dict[str, int] = field(default_factory=dict)
    """Largest size of each in bytes on disk."""
    looks: int = 0
    told_at: float = 0.0

    def look(self, pod: Json) -> None:
        """Measure them, and print a line every half minute of a long run."""
        claim = self.cluster.folder / "claims" / self.room.name / "kv" / "kv-blocks"
        disk = self.cluster.folder / "pods" / pod["metadata"]["uid"] / "volumes" / "kv-blocks"
        now = {"disk": size_of(disk), "claim": size_of(claim)}
        self.peak = {name: max(size, self.peak.get(name, 0)) for name, size in now.items()}
        self.looks += 1
        if SECONDS > SHORT and time.monotonic() - self.told_at > 30:
            self.told_at = time.monotonic()
            sys.stdout.write(f"folders of {LIMIT} bytes: {now}, largest so far {self.peak}\n")
            sys.stdout.flush()


def tiered(program: str, *volumes: str, **offload: Any) -> Json:
    """Return a pool with a disk tier and a container beside the engine that writes to it, and to the other
    volumes that are named."""
    writer = {
        "name": "writer",
        "image": "kvist-test/python:1",
        "command": ["python3", "-c", f"import os, time\n{program}"],
        "volumeMounts": [
            {"name": "kv-blocks", "mountPath": "/kv"},
            *({"name": each, "mountPath": f"/{each}"} for each in volumes),
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return pool(
        "twig",
        picker={"mode": "Off"},
        gateway={"mode": "None"},
        offload={"cpu": "1Gi", "disk": str(LIMIT), **offload},
        podTemplate={"spec": {"containers": [writer]}},
    )


async def test_a_pod_that_writes_more_blocks_than_fit_is_not_evicted(cluster: Cluster, room: Space) -> None:
    """Three times the size of the volume is written, and the kubelet never finds it full."""
    await installed(cluster, room.client)
    await room.apply(tiered(blocks("/kv/m_r0")))
    await until_ready(room, "twig")

    async def written() -> Json | None:
        pods = [each for each in await room.pods() if each["metadata"]["name"].startswith("twig-")]
        assert [each["status"].get("reason") for each in pods] == [None], pods
        said = await room.log(pods[0]["metadata"]["name"], container="writer")
        return pods[0] if "written" in said else None

    found = await room.until(written, "all blocks", seconds=120)
    assert found is not None
    assert [each["restartCount"] for each in found["status"]["containerStatuses"]] == [0, 0]
    said = await room.log(found["metadata"]["name"], container="disk-cleaner")
    assert "removed" in said
    assert "more than the volume's" not in said


async def test_an_evicted_engine_is_explained(cluster: Cluster, room: Space) -> None:
    """Files that the cleaner leaves alone fill the volume; the condition has the words of the kubelet, the
    field and where to look."""
    await installed(cluster, room.client)
    await room.apply(tiered(OTHER))

    async def evicted() -> Json | None:
        found = condition(await room.get("InferencePool", "twig"), "Ready")
        return found if found.get("reason") == "Evicted" else None

    found = await room.until(evicted, "the eviction", seconds=120)
    assert found is not None
    assert 'Usage of EmptyDir volume "kv-blocks" exceeds the limit "32Mi"' in found["message"]
    assert "Raise spec.offload.disk, and see the log of container disk-cleaner" in found["message"]


@pytest.fixture
async def claimed(cluster: Cluster, room: Space) -> AsyncIterator[Space]:
    """The operator and a claim for many writers."""
    await installed(cluster, room.client)
    name, size = f"kv-{room.name}", {"storage": "1Gi"}
    shared: Json = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**shared, "capacity": size, "hostPath": {"path": "/nowhere"}}
    claim = {**shared, "volumeName": name, "resources": {"requests": size}}
    await room.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kv"}, "spec": claim},
    )
    yield room
    await room.remove("PersistentVolume", name)


async def test_memory_disk_and_a_shared_claim_are_bounded(cluster: Cluster, claimed: Space) -> None:
    """A pool with all three is accepted and serves; disk and folder stay below their limits while three times
    as much is written (in ten minutes 15 times), both cleaners remove the oldest, the pod says who shares
    its blocks, and a pool that cannot share knows why."""
    room, folders = claimed, Folders(cluster, claimed)
    disk, claim = blocks("/kv/m_r0", SECONDS), blocks("/kv-shared/kv-blocks/x/m_r0", SECONDS)
    both = f"import threading\ndef disk():\n{_indented(disk)}\nthreading.Thread(target=disk).start()\n{claim}"
    shared = {"claim": "kv", "size": str(LIMIT)}
    await room.apply(tiered(both, "kv-shared", shared=shared))
    found = await until_ready(room, "twig")
    plan = found["status"]["plan"]

    assert condition(found, "Accepted")["status"] == "True"
    assert [tier["medium"] for tier in plan["tiers"]] == ["gpu", "host", "disk", "shared"]

    async def written() -> Json | None:
        pods = await room.pods(**{"kvist.dev/pool": "twig"})
        assert [each["status"].get("reason") for each in pods] == [None], pods
        [pod] = pods
        folders.look(pod)
        said = await room.log(pod["metadata"]["name"], container="writer")
        return pod if said.count("written") == 2 else None

    pod = await room.until(written, "all blocks", seconds=105 + SECONDS)
    assert pod is not None
    said = await room.log(pod["metadata"]["name"], container="writer")
    sys.stdout.write(f"{said}largest sizes {folders.peak} of {LIMIT}, measured {folders.looks} times\n")
    counts = [(int(words[1]), int(words[3])) for words in map(str.split, said.splitlines())]
    assert all(size > 0.95 * RATE * SECONDS for size, _ in counts), said
    assert folders.peak.keys() == {"disk", "claim"}
    assert all(LIMIT // 2 < size <= LIMIT for size in folders.peak.values()), folders.peak
    assert [each["restartCount"] for each in pod["status"]["containerStatuses"]] == [0, 0]
    assert pod["metadata"]["labels"]["kvist.dev/kv-storage-namespace"] == plan["storage"]["namespace"]
    assert pod["metadata"]["annotations"]["kvist.dev/kv-tiers"] == "host,disk,shared"
    [cleaner] = await room.pods(**{"app.kubernetes.io/component": "kv-cleaner"})
    assert cleaner["status"].get("reason") is None, cleaner
    for name, container in ((pod["metadata"]["name"], "disk-cleaner"), (cleaner["metadata"]["name"], "")):
        said = await room.log(name, container=container)
        assert "removed" in said
        assert "more than the volume's" not in said

    other = tiered("", shared=shared)
    other["metadata"]["name"] = "fern"
    other["spec"] |= {"replicas": 0, "engine": {"extraArgs": ["--seed", "7"]}}
    await room.apply(other)

    async def advised() -> list[str]:
        status = (await room.get("InferencePool", "fern")).get("status", {})
        return [line for line in status.get("advice", ()) if "pool twig has the same model" in line]

    [line] = await room.until(advised, "the advice")
    assert "extraArgs is --seed 7 here and empty there" in line


def _indented(program: str) -> str:
    return "".join(f"    {line}\n" for line in program.splitlines())
