"""The engines: a Deployment, or a LeaderWorkerSet where a replica spans nodes, and what goes with it. Pure.

One workload for all generations of a pool: the Deployment's own controller replaces pods by ReplicaSets, so
two generations never fight for accelerators, and one that never gets ready stops the rollout with the old
pods serving. ReplaceFirst is surge 0, SurgeFirst unavailable 0.
"""

import math
from collections.abc import Mapping
from typing import Final

from kvist_epp import names as wire
from kvist_operator.plan import Plan
from kvist_operator.plan.resources import DISK_MOUNT
from kvist_operator.spec.pool import ENGINE_CONTAINER, Pool, Source

from . import pods, termination_log
from .cluster_facts import Json, Site
from .object_names import ENGINE, ENGINE_PORT, PLAN, ObjectNames
from .pods import merged, model_mounts, placing, token

USER: Final = 2000
"""vLLM's image names no user; any but root will do."""
HOME: Final = "/cache"
KV_BLOCKS: Final = "kv-blocks"
SHM: Final = "shm"
SETTLE_SECONDS: Final = 10
"""A new pod counts as available so long after it is ready: time for every picker to have scraped it."""
PULL_SECONDS: Final = 900
"""For an image of ten gigabytes, on top of loading, before a rollout is called stuck."""
HANDSHAKE_SECONDS: Final = 600
"""vLLM's own limit for its engine processes to be ready (``VLLM_ENGINE_READY_TIMEOUT_S``)."""
HEADLESS: Final = "--headless"

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": HOME,
    "USER": "vllm",
    "XDG_CACHE_HOME": f"{HOME}/.cache",
    "XDG_CONFIG_HOME": f"{HOME}/.config",
    "HF_HOME": f"{HOME}/huggingface",
    "VLLM_CACHE_ROOT": f"{HOME}/vllm",
    "TRITON_CACHE_DIR": f"{HOME}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/inductor",
    "FLASHINFER_WORKSPACE_BASE": HOME,
}
"""A user without an entry in /etc/passwd has no home, and torch asks for its name. All caches go to a
volume."""


def engine(pool: Pool, plan: Plan, site: Site) -> list[Json]:
    """Account, how it logs, Service, budget and workload."""
    names = ObjectNames.of(pool)
    serving = pods.port("http", ENGINE_PORT, protocol="http")
    return [
        pods.account(names, names.engine_account, ENGINE),
        *termination_log.settings(names, pool),
        pods.service(names, names.engine, ENGINE, names.served, serving),
        pods.budget(names, names.engine, ENGINE, names.served),
        _groups(names, pool, plan, site) if plan.nodes > 1 else _deployment(names, pool, plan, site),
    ]


def _deployment(names: ObjectNames, pool: Pool, plan: Plan, site: Site) -> Json:
    needs = plan.pod
    spec: Json = {
        "replicas": pool.replicas,
        "minReadySeconds": SETTLE_SECONDS,
        "progressDeadlineSeconds": needs.grace_seconds + needs.startup_seconds + PULL_SECONDS,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge(pool)},
    }
    made = pods.deployment(names, names.engine, ENGINE, spec, {}, {})
    made["spec"]["template"] = template(names, pool, plan, site)
    return made


def surge(pool: Pool) -> Json:
    """Return how many pods may be missing, or too many, while they are replaced."""
    amount = pool.rollout.max_unavailable
    if pool.rollout.strategy == "SurgeFirst":
        return {"maxSurge": amount, "maxUnavailable": 0}
    return {"maxSurge": 0, "maxUnavailable": amount}


def _groups(names: ObjectNames, pool: Pool, plan: Plan, site: Site) -> Json:
    """A group of pods for each replica; the leader serves, the others compute.

    Fields: ``leaderworkerset.x-k8s.io/v1``; it sets LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in every pod.
    """
    leader = template(names, pool, plan, site)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": names.meta(names.engine, ENGINE),
        "spec": {
            "replicas": pool.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": surge(pool)},
            "leaderWorkerTemplate": {
                "size": plan.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": template(names, pool, plan, site, leads=False),
            },
        },
    }


def template(names: ObjectNames, pool: Pool, plan: Plan, site: Site, *, leads: bool = True) -> Json:
    """The pods of one role, under the user's overlay. Followers serve nothing and carry no pool label."""
    labels = names.labels(ENGINE)
    if leads:
        labels |= names.served | {wire.LABEL_MAX_NUM_SEQS: str(plan.settings.sequences)}
    made: Json = {
        "metadata": {"labels": labels, "annotations": _annotations(pool, plan)},
        "spec": _pod(names, pool, plan, site, leads=leads),
    }
    found: Json = merged(made, pool.pod_template)
    return found


def _annotations(pool: Pool, plan: Plan) -> Json:
    found = {PLAN: plan.hash}
    if not pool.kv_events:
        found[wire.POD_KV_EVENTS] = "false"
    if plan.layout.data > 1:
        found[wire.POD_DATA_PARALLEL_SIZE] = str(plan.layout.data)
    return found


def _pod(names: ObjectNames, pool: Pool, plan: Plan, site: Site, *, leads: bool) -> Json:
    sources = model_mounts(pool)
    disk = {KV_BLOCKS: plan.pod.disk_bytes} if plan.pod.disk_bytes else {}
    return {
        "serviceAccountName": names.engine_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT, which vLLM reads
        "securityContext": pods.pod_security(USER),
        "terminationGracePeriodSeconds": plan.pod.grace_seconds,
        **placing(plan, site),
        "topologySpreadConstraints": pods.spread(names.selector(ENGINE)),
        "containers": [
            {
                **_container(pool, plan, leads=leads),
                "volumeMounts": [
                    *pods.mounts((pods.CACHE, HOME), ("tmp", "/tmp"), (SHM, "/dev/shm")),
                    *termination_log.mounts(pool),
                    *(pods.mounts((KV_BLOCKS, DISK_MOUNT)) if disk else []),
                    *(each.mount for each in sources),
                ],
            }
        ],
        "volumes": [
            pods.empty(pods.CACHE),
            pods.empty("tmp"),
            pods.empty(SHM, medium="Memory", sizeLimit=quantity(plan.pod.shm_bytes)),
            *termination_log.volumes(names, pool),
            *(pods.empty(name, sizeLimit=quantity(size)) for name, size in disk.items()),
            *(each.volume for each in sources),
        ],
    }


def _container(pool: Pool, plan: Plan, *, leads: bool) -> Json:
    found: Json = {
        "name": ENGINE_CONTAINER,
        "image": pool.engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["vllm"],
        "args": list(plan.argv) if leads else [*plan.argv, HEADLESS],
        "env": environment(pool, plan),
        "resources": _resources(plan),
        "securityContext": dict(pods.CONTAINER_SECURITY),
        **termination_log.POLICY,
    }
    if not leads:
        return found
    ports = [("http", ENGINE_PORT)]
    if pool.kv_events:
        ports += [("kv-events", wire.KV_EVENTS_PORT), ("kv-replay", wire.KV_REPLAY_PORT)]
    return {
        **found,
        "ports": [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports],
        **_probes(plan),
        "lifecycle": {"preStop": {"sleep": {"seconds": plan.pod.pre_stop_seconds}}},
    }


def _probes(plan: Plan) -> Json:
    """The port is closed until the engine is ready, and /health fails once it is dead (facts: vLLM 5.6).

    Liveness is slow to judge: a busy API server answers late, and a restart costs minutes.
    """
    health = {"httpGet": {"path": "/health", "port": "http"}}
    starting = math.ceil(plan.pod.startup_seconds / 10)
    return {
        "startupProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": starting},
        "readinessProbe": {**health, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 12},
    }


def environment(pool: Pool, plan: Plan) -> list[Json]:
    """Ours, then the plan's, then the user's; each name once, the last word counts."""
    own: dict[str, Json] = {name: {"name": name, "value": value} for name, value in ENVIRONMENT.items()}
    own |= termination_log.environment(pool)
    if plan.pod.startup_seconds > HANDSHAKE_SECONDS:
        name = "VLLM_ENGINE_READY_TIMEOUT_S"
        own[name] = {"name": name, "value": str(plan.pod.startup_seconds)}
    if pool.model.kind is not Source.HUB and not _from_hub(pool):
        own["HF_HUB_OFFLINE"] = {"name": "HF_HUB_OFFLINE", "value": "1"}
    if plan.nodes > 1:
        own["VLLM_HOST_IP"] = pods.field("VLLM_HOST_IP", "status.podIP")
    own |= {entry["name"]: entry for entry in token(pool.model)}
    own |= {name: {"name": name, "value": value} for name, value in plan.env.items()}
    own |= {entry["name"]: dict(entry) for entry in pool.engine.env}
    return list(own.values())


def _from_hub(pool: Pool) -> bool:
    """Whether anything else is fetched from the hub."""
    draft = pool.engine.speculative.model if pool.engine.speculative else ""
    return any(not each.startswith(("/", "pvc:", "oci:")) for each in (draft, *_adapters(pool)) if each)


def _adapters(pool: Pool) -> list[str]:
    return [adapter.source for adapter in pool.model.adapters]


def _resources(plan: Plan) -> Json:
    """Memory is asked for as it is limited, so that nobody else is promised it; a core for each GPU and one
    more is what vLLM's processes need at least. On a CPU the cores are the user's to say."""
    on_node = min(plan.layout.gpus, plan.hardware.per_node)
    memory = quantity(plan.pod.memory_bytes)
    row = plan.hardware.accelerator
    if row.vendor == "cpu":
        return {"requests": {"memory": memory}, "limits": {"memory": memory}}
    devices = {row.resource: str(on_node)}
    return {
        "requests": {"cpu": str(on_node + 1), "memory": memory, **devices},
        "limits": {"memory": memory, **devices},
    }


def quantity(number: float) -> str:
    """Bytes as Kubernetes writes them back, rounded up to whole MiB: what is applied is what is read."""
    mebibytes = math.ceil(number / (1 << 20))
    return f"{mebibytes >> 10}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
