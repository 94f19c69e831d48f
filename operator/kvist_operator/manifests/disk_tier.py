"""The volume for KV cache blocks on disk, and the container that keeps it from filling up. Pure.

vLLM's file-system tier never deletes (vllm#54779), and the kubelet evicts a pod whose emptyDir exceeds its
size. The cleaner (``kvist_epp.sidecars.disk_cleaner``) removes the least recently used blocks before that. It
is a sidecar: an init container that is always restarted starts before the engine and ends after it. On a
folder of the node the cleaners of all its pods look after the same files, with the same limit.
"""

from typing import Final

from kvist_operator.plan import Plan
from kvist_operator.plan.resources import DISK_MOUNT
from kvist_operator.spec.pool import Pool

from . import pods
from .object_names import Json, Site
from .termination_log import POLICY

VOLUME: Final = "kv-blocks"
CLEANER: Final = "disk-cleaner"
HIGH_PERCENT: Final = 85
"""The cleaner begins at this part of the volume: what is left holds the blocks that are written until a pass
through the folder has ended."""
LOW_PERCENT: Final = 75
RESOURCES: Final[Json] = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
"""A pass remembers at most 65,536 files, and the process takes 40 MiB."""


def mounted(pool: Pool, plan: Plan) -> list[pods.Mounted]:
    """Return the volume and its mount; none without ``spec.offload.disk``."""
    size = plan.pod.disk_bytes
    if not size:
        return []
    volume = pods.empty(VOLUME, sizeLimit=pods.quantity(size))
    if pool.offload.host_path:
        volume = {"name": VOLUME, "hostPath": {"path": pool.offload.host_path, "type": "Directory"}}
    if pool.offload.storage_class:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": pool.offload.storage_class,
            "resources": {"requests": {"storage": pods.quantity(size)}},
        }
        volume = {"name": VOLUME, "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    return [pods.Mounted(volume, {"name": VOLUME, "mountPath": DISK_MOUNT})]


def cleaner(pool: Pool, plan: Plan, site: Site) -> list[Json]:
    """Return the cleaner; none without ``spec.offload.disk``. It runs as the engine's user, who owns the
    files."""
    if not plan.pod.disk_bytes:
        return []
    sidecar = {"restartPolicy": "Always"}
    return [container(pool, site, CLEANER, VOLUME, (DISK_MOUNT, DISK_MOUNT), plan.pod.disk_bytes, sidecar)]


def container(
    pool: Pool, site: Site, name: str, volume: str, paths: tuple[str, str], limit: int, more: Json
) -> Json:
    """Return a container that keeps a folder below ``limit`` bytes.

    ``paths``: where the volume is mounted, and the folder in it.
    """
    mount, folder = paths
    options = {"limit": limit, "high": HIGH_PERCENT, "low": LOW_PERCENT}
    return {
        "name": name,
        "image": pool.picker.image or site.picker_image,
        "imagePullPolicy": "IfNotPresent",
        **more,
        "command": ["python", "-m", "kvist_epp.sidecars.disk_cleaner"],
        "args": [folder, *(f"--{key}={value}" for key, value in options.items())],
        "resources": RESOURCES,
        "securityContext": pods.read_only(),
        **POLICY,
        "volumeMounts": pods.mounts((volume, mount)),
    }
