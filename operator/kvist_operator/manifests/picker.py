"""The pickers: Deployment, account, the rights of docs/guides/kubernetes.md, Services, budget. Pure."""

import math
from typing import Final

from kvist_epp.names import LIVENESS, OBJECTIVE_GROUPS, OWN_GROUP
from kvist_epp.settings.settings import Settings
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from . import object_names as child
from . import pods
from .cluster_facts import Json, Site
from .object_names import PICKER, ObjectNames
from .termination_log import POLICY
from .tokenizer import Tokenizer, chats

USER: Final = 65532
CERTIFICATES: Final = "/etc/kvist/tls"
WRITABLE: Final = "/cache"
GRACE_SPARE: Final = 15
"""Seconds to end beyond ``--drain-timeout``."""
READINESS: Final = "readiness"
RESOURCES: Final[Json] = {
    "requests": {"cpu": "500m", "memory": "1Gi"},
    "limits": {"memory": "4Gi"},
}
"""One core does thousands of requests a second; memory is the index and, at most, 1 GiB of waiting bodies."""


def picker(pool: Pool, plan: Plan, site: Site, found: Tokenizer) -> list[Json]:
    """All of it; nothing with ``spec.picker.mode: Off``."""
    if pool.picker.mode == "Off":
        return []
    names = ObjectNames.of(pool)
    return [
        pods.account(names, names.picker, PICKER),
        _role(names),
        _binding(names),
        _service(names),
        _peers(names),
        pods.budget(names, names.picker, PICKER, names.selector(PICKER)),
        _deployment(names, pool, plan, site, found),
    ]


def settings(pool: Pool, plan: Plan, found: Tokenizer) -> Settings:
    """Return the picker's settings; what engines report themselves (labels, metrics) is not among them."""
    names = ObjectNames.of(pool)
    return Settings(
        pool_name=pool.name,
        pool_group=OWN_GROUP,
        model=found.model,
        cert_path=CERTIFICATES,
        kv_events=pool.kv_events and bool(found.model),
        replicas=f"{names.host(names.peers)}:{child.PEER_PORT}",
        replica_cert_path=CERTIFICATES,
        priorities=",".join(f"{p.name}={p.value}" for p in pool.picker.priorities),
        scheduling_policy="priority" if pool.by_priority else "fcfs",
        max_num_seqs=plan.settings.sequences,
        tpot_target=(pool.workload.tpot_ms or 0) / 1000,
        max_endpoints=pool.gateway.failover_endpoints,
        approximate_cache_tokens=max(1, plan.memory.kv_tokens),
        log_format="json",
        **chats(pool, found).settings,
    )


def _role(names: ObjectNames) -> Json:
    """Return the Role with the rights that the guide lists, and no others."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": names.meta(names.picker, PICKER),
        "rules": rules(names.pool),
    }


def rules(pool: str = "") -> list[Json]:
    """Return a picker's rights: follow pods, objectives and its pool, or all pools if none is named."""
    own: Json = {"apiGroups": [OWN_GROUP], "resources": ["inferencepools"], "verbs": ["list", "watch"]}
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {**own, "resourceNames": [pool]} if pool else own,
        {"apiGroups": [*OBJECTIVE_GROUPS], "resources": ["inferenceobjectives"], "verbs": ["list", "watch"]},
    ]


def _binding(names: ObjectNames) -> Json:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": names.meta(names.picker, PICKER),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.picker},
        "subjects": [{"kind": "ServiceAccount", "name": names.picker, "namespace": names.namespace}],
    }


def _service(names: ObjectNames) -> Json:
    """Return the Service that gateways call. The port speaks HTTP/2 over TLS and is called as in the
    conformance suite."""
    return pods.service(
        names,
        names.picker,
        PICKER,
        names.selector(PICKER),
        pods.port("grpc", child.GRPC_PORT, protocol="http2"),
        pods.port("health", child.HEALTH_PORT, protocol="kubernetes.io/h2c"),
        pods.port("metrics", child.METRICS_PORT, protocol="http"),
    )


def _peers(names: ObjectNames) -> Json:
    """All pickers by address, also those that are not ready: they warm up from each other, and Envoy asks
    each for its health itself."""
    made = pods.service(
        names,
        names.peers,
        PICKER,
        names.selector(PICKER),
        pods.port("peers", child.PEER_PORT),
        pods.port("grpc", child.GRPC_PORT, protocol="http2"),
    )
    return pods.headless(made, unready=True)


def _deployment(names: ObjectNames, pool: Pool, plan: Plan, site: Site, found: Tokenizer) -> Json:
    told = settings(pool, plan, found)
    mounts = [each for each in (found.mount,) if each]
    pod: Json = {
        "serviceAccountName": names.picker,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(USER),
        # no preStop: on SIGTERM it says NOT_SERVING and goes on for --drain-delay, by itself
        "terminationGracePeriodSeconds": math.ceil(told.drain_timeout) + GRACE_SPARE,
        "topologySpreadConstraints": pods.spread(names.selector(PICKER)),
        "containers": [
            {
                "name": PICKER,
                "image": pool.picker.image or site.picker_image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["kvist-epp"],
                "args": told.to_args(),
                "env": _environment(found),
                "ports": _ports(),
                "resources": dict(pool.picker.resources) or RESOURCES,
                "securityContext": pods.read_only(),
                **POLICY,
                **_probes(told),
                "volumeMounts": [
                    *pods.mounts(("tls", CERTIFICATES, True), (pods.CACHE, WRITABLE), ("tmp", "/tmp")),
                    *(each.mount for each in mounts),
                ],
            }
        ],
        "volumes": [
            {"name": "tls", "secret": {"secretName": names.certificates}},
            pods.empty(pods.CACHE),
            pods.empty("tmp"),
            *(each.volume for each in mounts),
        ],
    }
    return pods.deployment(names, names.picker, PICKER, {"replicas": pool.picker.replicas}, pod, {})


def _environment(found: Tokenizer) -> list[Json]:
    return [
        pods.field("POD_NAMESPACE", "metadata.namespace"),
        pods.field("POD_IP", "status.podIP"),
        {"name": "HOME", "value": WRITABLE},
        {"name": "HF_HOME", "value": f"{WRITABLE}/huggingface"},
        *found.env,
    ]


def _ports() -> list[Json]:
    ports = {
        "grpc": child.GRPC_PORT,
        "health": child.HEALTH_PORT,
        "metrics": child.METRICS_PORT,
        "peers": child.PEER_PORT,
    }
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports.items()]


def _probes(told: Settings) -> Json:
    """Ready means that the index has been filled, or that ``--warmup-timeout`` has passed."""

    def asks(service: str) -> Json:
        return {"grpc": {"port": child.HEALTH_PORT, "service": service}, "timeoutSeconds": 3}

    starting = 12 + math.ceil(told.warmup_timeout / 5)
    return {
        "startupProbe": {**asks(LIVENESS), "periodSeconds": 5, "failureThreshold": starting},
        "readinessProbe": {**asks(READINESS), "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**asks(LIVENESS), "periodSeconds": 10, "failureThreshold": 6},
    }
