"""The disk tier in a whole cluster: overflow, and what fills it, with kubelets that evict pods."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import condition, installed, pool, until_ready
from tests.cluster.space import Space

pytestmark = pytest.mark.timeout(300)
Json = dict[str, Any]
LIMIT = 32 << 20
BLOCKS = f"""
import os, time
size, limit, begun = 32 << 10, {LIMIT}, time.time()
for n in range(3 * limit // size):
    while n * size > (time.time() - begun) * 0.2 * limit:
        time.sleep(0.01)
    folder = f"/kv/m_r0/{{n % 4096:03x}}/{{n % 256:02x}}_g0"
    os.makedirs(folder, exist_ok=True)
    with open(f"{{folder}}/{{n}}.tmp", "wb") as file:
        file.write(bytes(size))
    os.replace(f"{{folder}}/{{n}}.tmp", f"{{folder}}/{{n}}.bin")
print("written", flush=True)
time.sleep(1e6)
"""
"""Writes three times the limit, a fifth of it each second, as an engine does."""
SHARED = BLOCKS.replace("/kv/m_r0", "/kv-shared/kv-blocks/x/m_r0")
"""The same on the shared claim."""
OTHER = f"open('/kv/other', 'wb').write(os.urandom({LIMIT} + (1 << 20))); time.sleep(1e6)"


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
    await room.apply(tiered(BLOCKS))
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


async def test_memory_disk_and_a_shared_claim_are_bounded(claimed: Space) -> None:
    """A pool with all three is accepted and serves; three times the size of disk and folder is written, both
    cleaners remove the oldest, the pod says who shares its blocks, and a pool that cannot share knows why."""
    room = claimed
    both = (
        f"import threading\ndef disk():\n{_indented(BLOCKS)}\nthreading.Thread(target=disk).start()\n{SHARED}"
    )
    shared = {"claim": "kv", "size": str(LIMIT)}
    await room.apply(tiered(both, "kv-shared", shared=shared))
    found = await until_ready(room, "twig")
    plan = found["status"]["plan"]

    assert condition(found, "Accepted")["status"] == "True"
    assert [tier["medium"] for tier in plan["tiers"]] == ["gpu", "host", "disk", "shared"]

    async def written() -> Json | None:
        [pod] = await room.pods(**{"kvist.dev/pool": "twig"})
        assert pod["status"].get("reason") is None, pod
        said = await room.log(pod["metadata"]["name"], container="writer")
        return pod if said.count("written") == 2 else None

    pod = await room.until(written, "all blocks", seconds=120)
    assert pod is not None
    assert [each["restartCount"] for each in pod["status"]["containerStatuses"]] == [0, 0]
    assert pod["metadata"]["labels"]["kvist.dev/kv-storage-namespace"] == plan["storage"]["namespace"]
    assert pod["metadata"]["annotations"]["kvist.dev/kv-tiers"] == "host,disk,shared"
    [cleaner] = await room.pods(**{"app.kubernetes.io/component": "kv-cleaner"})
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
