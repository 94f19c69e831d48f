"""The engines: a Deployment, or a LeaderWorkerSet where a replica spans nodes, and their other objects. Pure.

All generations of a pool share one workload: its own controller replaces the pods, so two generations never
compete for accelerators, and a generation that does not become ready stops the rollout while the old pods
serve. ReplaceFirst is surge 0, SurgeFirst unavailable 0.
"""

import math
from collections.abc import Mapping
from typing import Final

from kvist_epp import names as wire
from kvist_operator.plan import Plan
from kvist_operator.spec.consistency import API_KEY_VARIABLE
from kvist_operator.spec.pod_template import ENGINES
from kvist_operator.spec.pool import ENGINE_CONTAINER, Pool, Source

from . import disk_tier, engine_roles, placement, pods, shared_tier, termination_log, weights_cache
from .object_names import ENGINE, ENGINE_PORT, PLAN, SERVICE_NAME, Json, ObjectNames, Site
from .overlays import overlaid
from .pods import model_mounts, quantity, token

USER: Final = 2000
"""vLLM's image names no user; any other than root works."""
HOME: Final = "/cache"
SHM: Final = "shm"
SETTLE_SECONDS: Final = 10
"""``minReadySeconds``: by then every picker has scraped a new pod."""
PULL_SECONDS: Final = 900
"""Time to pull an image of ten gigabytes, added to the startup time before a rollout counts as stuck."""
HANDSHAKE_SECONDS: Final = 600
"""vLLM's own limit for its engine processes to be ready (``VLLM_ENGINE_READY_TIMEOUT_S``)."""
HEADLESS: Final = "--headless"
HEALTH_PATH: Final = "/health"
"""Path that fails once the engine's core has died, and needs no API key (facts: vLLM 5.6)."""
READINESS: Final[Mapping[str, int]] = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3}
SAMPLER: Final = "OTEL_TRACES_SAMPLER"
FOLLOW_CALLER: Final = "parentbased_always_off"
"""OpenTelemetry's sampler that traces what was sampled before, and begins no trace of its own."""

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
"""A user without an entry in /etc/passwd has no home, and torch asks for its name. All caches are on a
volume."""


def engine(pool: Pool, plan: Plan, site: Site) -> list[Json]:
    """Return the ServiceAccount, logging configuration, Service, budget and workload of the engines."""
    names = ObjectNames.of(pool)
    serving = pods.port("http", ENGINE_PORT, protocol="http")
    return [
        pods.account(names, names.engine_account, ENGINE),
        *termination_log.settings(names, pool),
        *weights_cache.jobs(pool, plan, site, USER),
        pods.service(names, names.engine, ENGINE, names.served, serving),
        pods.budget(names, names.engine, ENGINE, names.served),
        *(_workload(own, each, site) for own, each in engine_roles.roles(pool, plan)),
    ]


def _workload(pool: Pool, plan: Plan, site: Site) -> Json:
    """Return the workload of a pool, or of one role."""
    names = ObjectNames.of(pool)
    made = (_groups if plan.nodes > 1 else _deployment)(names, pool, plan, site)
    if names.role:
        made["metadata"]["labels"] |= engine_roles.labels(plan)
    if engine_roles.scales_itself(pool):
        del made["spec"]["replicas"]
    return made


def _deployment(names: ObjectNames, pool: Pool, plan: Plan, site: Site) -> Json:
    needs = plan.pod
    spec: Json = {
        "replicas": pool.replicas,
        "minReadySeconds": SETTLE_SECONDS,
        "progressDeadlineSeconds": needs.grace_seconds + needs.startup_seconds + PULL_SECONDS,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge(pool)},
    }
    made = pods.deployment(names, names.workload, ENGINE, spec, template(names, pool, plan, site))
    made["spec"]["selector"] = {"matchLabels": names.engine_pods}
    return made


def surge(pool: Pool) -> Json:
    """Return how many pods may be missing, or too many, while they are replaced."""
    amount = pool.rollout.max_unavailable
    if pool.rollout.strategy == "SurgeFirst":
        return {"maxSurge": amount, "maxUnavailable": 0}
    return {"maxSurge": 0, "maxUnavailable": amount}


def _groups(names: ObjectNames, pool: Pool, plan: Plan, site: Site) -> Json:
    """Return a LeaderWorkerSet: a group of pods for each replica, of which the leader serves requests.

    It sets LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in every pod (``leaderworkerset.x-k8s.io/v1``).
    """
    spec = {
        "replicas": pool.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": surge(pool)},
        "leaderWorkerTemplate": {
            "size": plan.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": template(names, pool, plan, site),
            "workerTemplate": template(names, pool, plan, site, leads=False),
        },
    }
    made = names.child("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", names.workload, ENGINE, spec=spec)
    if annotations := placement.group_annotations(pool):
        made["metadata"]["annotations"] = annotations
    return made


def template(names: ObjectNames, pool: Pool, plan: Plan, site: Site, *, leads: bool = True) -> Json:
    """Return the pod template of one role, merged with ``spec.podTemplate``. Followers serve no requests and
    have no pool label."""
    labels, annotations = names.labels(ENGINE), {PLAN: plan.hash}
    if leads:
        labels |= names.served | {wire.LABEL_MAX_NUM_SEQS: str(plan.settings.sequences)}
    if not plan.kv_events:
        annotations[wire.POD_KV_EVENTS] = "false"
    if plan.layout.data > 1:
        annotations[wire.POD_DATA_PARALLEL_SIZE] = str(plan.layout.data)
    more_labels, more_annotations = shared_tier.marks(pool, plan)
    labels |= more_labels | engine_roles.labels(plan)
    annotations |= more_annotations
    made: Json = {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": _pod(names, pool, plan, site, leads=leads),
    }
    return overlaid(made, ENGINES, pool.pod_template)


def _pod(names: ObjectNames, pool: Pool, plan: Plan, site: Site, *, leads: bool) -> Json:
    mounted = [
        *termination_log.mounted(names, pool),
        *disk_tier.mounted(pool, plan),
        *shared_tier.mounted(pool),
        *weights_cache.mounted(pool),
        *model_mounts(pool),
    ]
    home = {"sizeLimit": quantity(plan.pod.home_bytes)} if plan.pod.home_bytes else {}
    init = [*weights_cache.init_containers(pool, site), *disk_tier.cleaner(pool, plan, site)]
    return {
        "serviceAccountName": names.engine_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT, which vLLM reads
        "securityContext": placement.pod_security(pool, USER, site),
        "terminationGracePeriodSeconds": plan.pod.grace_seconds,
        **placement.engine_nodes(names, pool, plan, site, leads=leads),
        **({"initContainers": init} if init else {}),
        "containers": [
            {
                **_container(pool, plan, leads=leads),
                "volumeMounts": [
                    *pods.mounts((pods.CACHE, HOME), ("tmp", "/tmp"), (SHM, "/dev/shm")),
                    *(each.mount for each in mounted),
                ],
            }
        ],
        "volumes": [
            pods.empty(pods.CACHE, **home),
            pods.empty("tmp"),
            pods.empty(SHM, medium="Memory", sizeLimit=quantity(plan.pod.shm_bytes)),
            *(each.volume for each in mounted),
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
        "resources": _resources(pool, plan),
        "securityContext": placement.container_security(pool),
        **termination_log.POLICY,
    }
    if not leads:
        return found
    ports = [("http", ENGINE_PORT)]
    if plan.kv_events:
        ports += [("kv-events", wire.KV_EVENTS_PORT), ("kv-replay", wire.KV_REPLAY_PORT)]
    ports += engine_roles.ports(plan)
    return {
        **found,
        "ports": [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports],
        **_probes(plan),
        "lifecycle": {"preStop": {"sleep": {"seconds": plan.pod.pre_stop_seconds}}},
    }


def _probes(plan: Plan) -> Json:
    """Return the probes of an engine, whose port is closed until it is ready. Liveness has two minutes, since
    a busy engine answers late and a restart takes minutes."""
    health = {"httpGet": {"path": HEALTH_PATH, "port": "http"}}
    starting = math.ceil(plan.pod.startup_seconds / 10)
    return {
        "startupProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": starting},
        "readinessProbe": {**health, **READINESS},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 12},
    }


def environment(pool: Pool, plan: Plan) -> list[Json]:
    """Return the engine's variables; the plan's override ours, and the user's override both."""
    own: dict[str, Json] = {name: {"name": name, "value": value} for name, value in ENVIRONMENT.items()}
    own |= termination_log.environment(pool)
    if plan.pod.startup_seconds > HANDSHAKE_SECONDS:
        name = "VLLM_ENGINE_READY_TIMEOUT_S"
        own[name] = {"name": name, "value": str(plan.pod.startup_seconds)}
    draft = pool.engine.speculative.model if pool.engine.speculative else ""
    others = [each for each in (draft, *(adapter.source for adapter in pool.model.adapters)) if each]
    if pool.model.kind is not Source.HUB and all(each.startswith(("/", "pvc:", "oci:")) for each in others):
        own["HF_HUB_OFFLINE"] = {"name": "HF_HUB_OFFLINE", "value": "1"}
    own |= weights_cache.environment(pool)
    if plan.nodes > 1:
        own["VLLM_HOST_IP"] = pods.field("VLLM_HOST_IP", "status.podIP")
    own |= engine_roles.environment(plan)
    own |= {entry["name"]: entry for entry in token(pool.model)}
    if pool.engine.api_key:
        own[API_KEY_VARIABLE] = pods.from_secret(API_KEY_VARIABLE, pool.engine.api_key)
    if pool.tracing and pool.tracing.engines:
        traces = {SERVICE_NAME: ObjectNames.of(pool).engine, SAMPLER: FOLLOW_CALLER}
        own |= {name: {"name": name, "value": value} for name, value in traces.items()}
    own |= {name: {"name": name, "value": value} for name, value in plan.env.items()}
    own |= {entry["name"]: dict(entry) for entry in pool.engine.env}
    return list(own.values())


def _resources(pool: Pool, plan: Plan) -> Json:
    """Return the resources of one pod: memory request and limit are equal, so that it is reserved; vLLM's
    processes need at least a core for each GPU and one more. On a CPU users set the cores."""
    on_node = min(plan.layout.gpus, plan.hardware.per_node)
    memory = quantity(plan.pod.memory_bytes)
    disk = {"ephemeral-storage": quantity(plan.pod.ephemeral_bytes)} if plan.pod.ephemeral_bytes else {}
    row = plan.hardware.accelerator
    if row.vendor == "cpu":
        return {"requests": {"memory": memory, **disk}, "limits": {"memory": memory, **disk}}
    fixed = {"memory": memory, **disk, row.resource: str(on_node), **placement.rdma_resources(pool)}
    return {"requests": {"cpu": str(on_node + 1), **fixed}, "limits": fixed}
