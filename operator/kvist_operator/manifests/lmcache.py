"""A server of LMCache on each node, which keeps the KV cache blocks of all engines there. Pure.

Engines reach the server of their own node through a Service that never leaves it. They send their blocks
(``engine_driven``): the other way, by which the server reads the GPU's memory, needs the host's IPC namespace
and a GPU in the server's pod, which Pod Security *restricted* forbids.
"""

from typing import Final

from kvist_epp.names import LABEL_KV_STORAGE
from kvist_operator.plan import Plan
from kvist_operator.plan.kv_transfer import ENGINE_DRIVEN, HASH_SEED, lmcache_service
from kvist_operator.spec.offload import LMCACHE_PORT
from kvist_operator.spec.pool import Pool

from . import pods
from .object_names import LMCACHE, Json, ObjectNames, Site
from .overlays import server
from .termination_log import POLICY

GIB: Final = 1 << 30
BESIDE: Final = 4 * GIB
"""Memory of the server besides its blocks: an allowance, not measured."""
STARTING: Final = 60
"""Probes until a server has to listen: it imports torch and takes all of its memory before."""
HOME: Final = "/tmp"


def servers(pool: Pool, plan: Plan, site: Site, user: int) -> list[Json]:
    """Return the DaemonSet and its Service; none unless ``spec.offload.lmcache.memory`` is set."""
    lmcache = pool.offload.lmcache
    if lmcache is None or not lmcache.memory_bytes:
        return []
    names = ObjectNames.of(pool)
    shared = {LABEL_KV_STORAGE: plan.storage.name} if plan.storage else {}
    name = lmcache_service(pool.name, plan.storage.name if plan.storage else "")
    selector = {**names.selector(LMCACHE), **shared}
    service = pods.service(names, name, LMCACHE, selector, pods.port("lmcache", LMCACHE_PORT))
    service["spec"]["internalTrafficPolicy"] = "Local"
    pod: Json = {
        "serviceAccountName": names.engine_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(user, site),
        **pods.placing(plan, site),
        "containers": [_container(lmcache.image, lmcache.memory_bytes)],
        "volumes": [pods.empty("tmp")],
    }
    made = {"metadata": {"labels": {**names.labels(LMCACHE), **shared}}, "spec": pod}
    spec = {
        "revisionHistoryLimit": 5,
        "selector": {"matchLabels": selector},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": server(pool, made),
    }
    return [service, names.child("apps/v1", "DaemonSet", name, LMCACHE, spec=spec)]


def _container(image: str, size: int) -> Json:
    options = {
        "host": "0.0.0.0",
        "port": LMCACHE_PORT,
        "l1-size-gb": f"{size / GIB:g}",
        "eviction-policy": "LRU",
        "supported-transfer-mode": ENGINE_DRIVEN,
        # With a log of its own the server would report nothing of what engines send, and engines leave it to
        # the server; without one they report what they store.
        "kv-event-log-size": "0",
    }
    variables = {"HOME": HOME, "USER": "lmcache", HASH_SEED: "0", "LMCACHE_TRACK_USAGE": "false"}
    memory = pods.quantity(size + BESIDE)
    probe = {"tcpSocket": {"port": LMCACHE}}
    return {
        "name": LMCACHE,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["lmcache", "server"],
        # all of the memory at once, so that a server that starts has what its pod has requested
        "args": [*(f"--{name}={value}" for name, value in options.items()), "--no-l1-use-lazy"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": pods.read_only(),
        **POLICY,
        "ports": [{"name": LMCACHE, "containerPort": LMCACHE_PORT, "protocol": "TCP"}],
        "startupProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": STARTING},
        "readinessProbe": {**probe, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 12},
        "volumeMounts": pods.mounts(("tmp", HOME)),
    }
