"""The cache for weights of the hub, which many pods share, and the Job or container that fills it. Pure.

A claim is filled by a Job before engines start: an indexed one with a part of about 5 GiB for each index, so
that its status says how far it is. A folder of the node is filled by an init container of each engine, since
only pods on a node can write there; the first pod of a node downloads, later ones find the files.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool, WeightsCache

from . import pods
from .object_names import DOWNLOAD, Json, Note, ObjectNames, Site
from .overlays import helper
from .termination_log import POLICY

VOLUME: Final = "weights"
MOUNT: Final = "/weights"
PART: Final = 5 << 30
"""Bytes of one part: the usual size of one file of weights, which is not divided."""
MOST_PARTS: Final = 64
SHARED: Final = "ReadWriteMany"
PARALLEL: Final = 4
"""Parts that are downloaded at the same time."""
RETRIES: Final = 10_000
"""A hub that is away for days is no reason to give up: the kubelet waits up to five minutes between two
tries."""
BYTES: Final = "kvist.dev/bytes"
"""Annotation of the Job: bytes of all files, as planned."""
PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
OF_ENGINES: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN")
"""Variables of the hub's client that the download does not share with the engines."""
RESOURCES: Final[Json] = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}


def environment(pool: Pool) -> dict[str, Json]:
    """Return the variables of engines that read the cache: they never ask the hub."""
    found = {"HF_HUB_CACHE": MOUNT, "HF_HUB_OFFLINE": "1"} if pool.model.cache else {}
    return {name: {"name": name, "value": value} for name, value in found.items()}


def mounted(pool: Pool) -> list[pods.Mounted]:
    """Return the volume and its read-only mount; none without a cache."""
    cache = pool.model.cache
    if cache is None:
        return []
    return [pods.Mounted(_volume(cache), {"name": VOLUME, "mountPath": MOUNT, "readOnly": True})]


def init_containers(pool: Pool, site: Site) -> list[Json]:
    """Return the container that fills a folder of the node; none for a claim, which a Job fills."""
    cache = pool.model.cache
    if cache is None or cache.claim:
        return []
    return [_container(pool, site, 1)]


def jobs(pool: Pool, plan: Plan, site: Site, user: int) -> list[Json]:
    """Return the Job that fills the claim; none for other pools.

    Its name depends on the files, because the pods of a Job cannot be changed.
    """
    cache = pool.model.cache
    if cache is None or not cache.claim:
        return []
    names = ObjectNames.of(pool)
    size = plan.pod.checkpoint_bytes
    parts = min(MOST_PARTS, max(1, math.ceil(size / PART)))
    what = json.dumps([_models(pool), cache.claim, parts])
    name = f"{names.download}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    pod = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": names.engine_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(user, site),
        "containers": [_container(pool, site, parts)],
        "volumes": [_volume(cache), pods.empty("tmp")],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": parts,
        "parallelism": min(parts, PARALLEL),
        "backoffLimit": RETRIES,
        "template": helper(pool, pods.template(names, DOWNLOAD, pod)),
    }
    made = names.child("batch/v1", "Job", name, DOWNLOAD, spec=spec)
    made["metadata"]["annotations"] = {BYTES: str(size)}
    return [made]


def notes(pool: Pool, site: Site) -> list[Note]:
    """Return advice for a claim that pods on several nodes cannot write or mount."""
    claim = pool.model.cache.claim if pool.model.cache else ""
    modes = site.claims.get(claim, frozenset())
    if not modes or SHARED in modes:
        return []
    effect = "downloads and engines run on one node only"
    if modes == {"ReadOnlyMany"}:
        effect = "downloads cannot write to it"
    text = (
        f"spec.model.cache.claim: claim {claim} is {', '.join(sorted(modes))}, so that {effect}: use a claim "
        f"with {SHARED}, or spec.model.cache.hostPath"
    )
    return [Note("", "ClaimNotShared", text)]


def progress(job: Mapping[str, Any]) -> Json:
    """Return ``status.cache`` from the status of the Job."""
    total = int((job["metadata"].get("annotations") or {}).get(BYTES, "0"))
    parts = int(job["spec"].get("completions") or 1)
    succeeded = int((job.get("status") or {}).get("succeeded") or 0)
    phase = "Filled" if is_complete(job) else "Filling" if job.get("status") else "Pending"
    done = total if phase == "Filled" else total * min(succeeded, parts) // parts
    return {"phase": phase, "bytes": done, "totalBytes": total, "parts": parts, "partsFilled": succeeded}


def is_complete(job: Mapping[str, Any]) -> bool:
    """Return whether a Job has succeeded."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Complete" and each.get("status") == "True" for each in conditions)


def _models(pool: Pool) -> list[str]:
    """Return ``repository@revision`` of the model, and the repositories of draft model and adapters."""
    model = pool.model
    found = [f"{model.location}@{model.revision}" if model.revision else model.location]
    if pool.engine.speculative and pool.engine.speculative.model:
        found.append(pool.engine.speculative.model)
    found += [adapter.source for adapter in model.adapters]
    hub = [each.removeprefix("hf://") for each in found if not each.startswith(("/", "pvc:", "oci:"))]
    return list(dict.fromkeys(hub))


def _volume(cache: WeightsCache) -> Json:
    if cache.claim:
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}
    return {"name": VOLUME, "hostPath": {"path": cache.host_path, "type": "Directory"}}


def _network(pool: Pool) -> list[Json]:
    """Return the variables of the engine that say how the hub is reached: mirror, proxy, authorities."""

    def wanted(name: str) -> bool:
        return name.upper() in PROXIES or (name.startswith("HF_") and name not in OF_ENGINES)

    return [dict(each) for each in pool.engine.env if wanted(each["name"])]


def _container(pool: Pool, site: Site, parts: int) -> Json:
    return {
        "name": DOWNLOAD,
        "image": pool.picker.image or site.picker_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "kvist_epp.sidecars.model_download"],
        "args": [MOUNT, *_models(pool), f"--parts={parts}"],
        "env": [{"name": "HOME", "value": "/tmp"}, *_network(pool), *pods.token(pool.model)],
        "resources": RESOURCES,
        "securityContext": pods.read_only(),
        **POLICY,
        "volumeMounts": pods.mounts((VOLUME, MOUNT), ("tmp", "/tmp")),
    }
