"""The pickers: Deployment, ServiceAccount, the rights of docs/guides/kubernetes.md, Services, budget.
Pure."""

import math
from typing import Final

from kvist_epp.names import LIVENESS, OBJECTIVE_GROUPS, OWN_GROUP
from kvist_epp.settings.settings import Settings
from kvist_operator.plan import Plan
from kvist_operator.spec.pod_template import PICKERS
from kvist_operator.spec.pool import Pool

from . import object_names as child
from . import pods
from .object_names import PICKER, SERVICE_NAME, Json, ObjectNames, Site
from .overlays import overlaid
from .termination_log import POLICY
from .tokenizer import Tokenizer, chats

_RBAC: Final = "rbac.authorization.k8s.io"
USER: Final = 65532
CERTIFICATES: Final = "/etc/kvist/tls"
KEYS: Final = "/etc/kvist/engine-key"
"""Folder with the engines' API key, which the kubelet updates when the Secret changes."""
WRITABLE: Final = "/cache"
GRACE_SPARE: Final = 15
"""Seconds to exit after ``--drain-timeout``."""
GRACE: Final = "terminationGracePeriodSeconds"
POD_GRACE: Final = 30
"""What Kubernetes gives a pod that does not say."""
DRAIN_VARIABLE: Final = "KVIST_EPP_DRAIN_TIMEOUT"
LONGEST_RESPONSE: Final = 600.0
"""Seconds for which a picker drains that may be called by a gateway other than Envoy: the responses in flight
end with its streams. Without such streams it does not take them."""
READINESS: Final = "readiness"
RESOURCES: Final[Json] = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
"""One core serves thousands of requests per second; memory holds the index and at most 1 GiB of queued
bodies."""


def picker(pool: Pool, plan: Plan, site: Site, found: Tokenizer) -> list[Json]:
    """Return all objects of the pickers; none with ``spec.picker.mode: Off``."""
    if pool.picker.mode == "Off":
        return []
    names = ObjectNames.of(pool)
    selector = names.selector(PICKER)
    role = {"apiGroup": _RBAC, "kind": "Role", "name": names.picker}
    subjects = [
        {"kind": "ServiceAccount", "name": name, "namespace": names.namespace}
        for name in _accounts(names, pool)
    ]
    # the port speaks HTTP/2 over TLS and is called as in the conformance suite of the Inference Extension
    grpc = pods.port("grpc", child.GRPC_PORT, protocol="http2")
    health = pods.port("health", child.HEALTH_PORT, protocol="kubernetes.io/h2c")
    metrics = pods.port("metrics", child.METRICS_PORT, protocol="http")
    peers = pods.service(names, names.peers, PICKER, selector, pods.port("peers", child.PEER_PORT), grpc)
    return [
        pods.account(names, names.picker, PICKER),
        names.child(f"{_RBAC}/v1", "Role", names.picker, PICKER, rules=rules(names.pool)),
        names.child(f"{_RBAC}/v1", "RoleBinding", names.picker, PICKER, roleRef=role, subjects=subjects),
        pods.service(names, names.picker, PICKER, selector, grpc, health, metrics),
        # unready pickers too: they fill their index from each other, and Envoy checks the health of each
        pods.headless(peers, unready=True),
        pods.budget(names, names.picker, PICKER, selector),
        _deployment(names, pool, plan, site, found),
    ]


def settings(pool: Pool, plan: Plan, found: Tokenizer) -> Settings:
    """Return the picker's settings; what engines report themselves (labels, metrics) is not among them."""
    names, traces = ObjectNames.of(pool), pool.tracing
    return Settings(
        pool_name=pool.name,
        pool_group=OWN_GROUP,
        model=found.model,
        cert_path=CERTIFICATES,
        prefix_matching=plan.routes_by_prefix,
        kv_events=plan.kv_events and bool(found.model),
        replicas=f"{names.host(names.peers)}:{child.PEER_PORT}",
        replica_cert_path=CERTIFICATES,
        priorities=",".join(f"{p.name}={p.value}" for p in pool.picker.priorities),
        scheduling_policy="priority" if pool.by_priority else "fcfs",
        max_num_seqs=plan.settings.sequences,
        tpot_target=(pool.workload.tpot_ms or 0) / 1000,
        gateway="envoy" if pool.gateway.is_envoy else "auto",
        drain_timeout=_drain_seconds(pool),
        max_endpoints=pool.gateway.failover_endpoints,
        approximate_cache_tokens=max(1, plan.memory.kv_tokens),
        log_format="json",
        engine_key_file=f"{KEYS}/{pool.engine.api_key.key}" if pool.engine.api_key else "",
        # a request runs on one rank of a data-parallel engine
        gpus_per_endpoint=plan.layout.tensor * plan.layout.pipeline,
        trace_endpoint=traces.endpoint if traces else "",
        trace_protocol="grpc" if traces else "auto",
        trace_sample_ratio=traces.sampling_percent / 100 if traces else Settings().trace_sample_ratio,
        disaggregation="on" if pool.disaggregation else "off",
        kv_lease=float(pool.disaggregation.lease_seconds) if pool.disaggregation else Settings().kv_lease,
        **chats(pool, found).settings,
    )


def _accounts(names: ObjectNames, pool: Pool) -> list[str]:
    """Return the ServiceAccounts of pickers: that of an overlay, and the operator's own, which pickers have
    until they are replaced."""
    spec = pool.picker.pod_template.get("spec") or {}
    own = spec.get("serviceAccountName", names.picker) or "default"
    return list(dict.fromkeys((names.picker, own)))


def _drain_seconds(pool: Pool) -> float:
    """Return ``--drain-timeout``: what fits into the time that an overlay gives pickers to end, unless a
    variable says it."""
    spec = pool.picker.pod_template.get("spec") or {}
    if GRACE in spec and all(each["name"] != DRAIN_VARIABLE for each in pool.picker.env):
        grace = spec[GRACE]
        return float(max(1, (POD_GRACE if grace is None else grace) - GRACE_SPARE))
    return LONGEST_RESPONSE if pool.gateway.of_extension else Settings().drain_timeout


def rules(pool: str = "") -> list[Json]:
    """Return a picker's rights: follow pods, objectives and its pool, or all pools if none is named."""
    own: Json = {"apiGroups": [OWN_GROUP], "resources": ["inferencepools"], "verbs": ["list", "watch"]}
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {**own, "resourceNames": [pool]} if pool else own,
        {"apiGroups": [*OBJECTIVE_GROUPS], "resources": ["inferenceobjectives"], "verbs": ["list", "watch"]},
    ]


def _deployment(names: ObjectNames, pool: Pool, plan: Plan, site: Site, found: Tokenizer) -> Json:
    flags = settings(pool, plan, found)
    mounts = [each for each in (found.mount, _engine_key(pool)) if each]
    ports = {
        "grpc": child.GRPC_PORT,
        "health": child.HEALTH_PORT,
        "metrics": child.METRICS_PORT,
        "peers": child.PEER_PORT,
    }
    variables = [
        pods.field("POD_NAMESPACE", "metadata.namespace"),
        pods.field("POD_IP", "status.podIP"),
        {"name": "HOME", "value": WRITABLE},
        {"name": "HF_HOME", "value": f"{WRITABLE}/huggingface"},
        *found.env,
        *([{"name": SERVICE_NAME, "value": names.picker}] if pool.tracing else []),
        *(dict(entry) for entry in pool.picker.env),
    ]
    pod: Json = {
        "serviceAccountName": names.picker,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(USER, site),
        # no preStop: after SIGTERM a picker reports NOT_SERVING and keeps serving for --drain-delay
        GRACE: math.ceil(flags.drain_timeout) + GRACE_SPARE,
        "topologySpreadConstraints": pods.spread(names.selector(PICKER)),
        "containers": [
            {
                "name": PICKER,
                "image": pool.picker.image or site.picker_image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["kvist-epp"],
                "args": flags.to_args(),
                "env": list({entry["name"]: entry for entry in variables}.values()),
                "ports": [
                    {"name": name, "containerPort": number, "protocol": "TCP"}
                    for name, number in ports.items()
                ],
                "resources": dict(pool.picker.resources) or RESOURCES,
                "securityContext": pods.read_only(),
                **POLICY,
                **_probes(flags),
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
    made = overlaid(pods.template(names, PICKER, pod), PICKERS, pool.picker.pod_template)
    return pods.deployment(names, names.picker, PICKER, {"replicas": pool.picker.replicas}, made)


def _engine_key(pool: Pool) -> pods.Mounted | None:
    """Return the volume with the engines' API key; None if they have none. It is optional: without the Secret
    engines wait, and a picker runs."""
    source = pool.engine.api_key
    if source is None:
        return None
    items = [{"key": source.key, "path": source.key}]
    volume = {"name": "engine-key", "secret": {"secretName": source.name, "items": items, "optional": True}}
    return pods.Mounted(volume, {"name": "engine-key", "mountPath": KEYS, "readOnly": True})


def _probes(flags: Settings) -> Json:
    """Return the probes. A picker is ready when its index has been filled, or ``--warmup-timeout`` has
    passed."""

    def check(service: str) -> Json:
        return {"grpc": {"port": child.HEALTH_PORT, "service": service}, "timeoutSeconds": 3}

    starting = 12 + math.ceil(flags.warmup_timeout / 5)
    return {
        "startupProbe": {**check(LIVENESS), "periodSeconds": 5, "failureThreshold": starting},
        "readinessProbe": {**check(READINESS), "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**check(LIVENESS), "periodSeconds": 10, "failureThreshold": 6},
    }
