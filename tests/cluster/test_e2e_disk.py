"""The disk tier in a whole cluster: overflow, and what fills it, with kubelets that evict pods."""

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
OTHER = f"open('/kv/other', 'wb').write(os.urandom({LIMIT} + (1 << 20))); time.sleep(1e6)"


def tiered(program: str) -> Json:
    """Return a pool with a disk tier and a container beside the engine that writes to it."""
    writer = {
        "name": "writer",
        "image": "kvist-test/python:1",
        "command": ["python3", "-c", f"import os, time\n{program}"],
        "volumeMounts": [{"name": "kv-blocks", "mountPath": "/kv"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return pool(
        "twig",
        picker={"mode": "Off"},
        gateway={"mode": "None"},
        offload={"cpu": "1Gi", "disk": str(LIMIT)},
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
