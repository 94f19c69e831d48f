"""The pool's own Envoy (``gateway.mode: Envoy``): ConfigMap, Deployment, Services, account, budget. Pure."""

import hashlib
import json
from typing import Final

from kvist_operator.spec.pod_template import ENVOYS
from kvist_operator.spec.pool import Pool

from . import object_names as child
from . import pods
from .bootstrap import AUTHORITY_FOLDER, CONFIG_FOLDER, HEAP_BYTES, SDS_FILE, authority, bootstrap
from .object_names import CONFIG, ENVOY, Json, ObjectNames, Site
from .overlays import overlaid
from .pods import quantity
from .termination_log import POLICY

USER: Final = 101
"""``envoy`` in Envoy's image."""
REPLICAS: Final = 2
DRAIN_SECONDS: Final = 600
"""Time limit for requests in flight when an Envoy is shut down; it exits as soon as there are none."""
CONFIG_FILE: Final = "envoy.json"
DRAIN_FILE: Final = "drain.sh"

DRAIN: Final = f"""\
#!/bin/bash
# Envoy exits at once on SIGTERM. Therefore, before it: fail the health check, so that Envoy closes each
# connection after its next answer; wait until Services route elsewhere; wait until no request is active.
ask() {{
  exec 3<>/dev/tcp/127.0.0.1/{child.ADMIN_PORT} || exit 0
  printf '%s HTTP/1.1\\r\\nHost: drain\\r\\nConnection: close\\r\\nContent-Length: 0\\r\\n\\r\\n' "$1" >&3
  cat <&3
  exec 3>&-
}}
ask 'POST /healthcheck/fail' >/dev/null
sleep 5
for ((waited = 5; waited < {DRAIN_SECONDS}; waited++)); do
  ask 'GET /stats?filter=^http.inference.downstream_rq_active$' | grep -q 'downstream_rq_active: 0' && exit 0
  sleep 1
done
"""
"""Script that drains Envoy; needs bash and grep, which Envoy's distroless image lacks."""


def envoy(pool: Pool, site: Site) -> list[Json]:
    """Return all objects of the pool's Envoy; none with another gateway mode."""
    if pool.gateway.mode != "Envoy":
        return []
    names = ObjectNames.of(pool)
    selector = names.selector(ENVOY)
    inbound = pods.port("http", child.HTTP_PORT, protocol="http", at=80)
    outbound = pods.port("http", child.ENGINE_PORT, protocol="http")
    data = {CONFIG_FILE: _text(bootstrap(pool)), DRAIN_FILE: DRAIN}
    if pool.picker.mode != "Off":
        data[SDS_FILE] = _text(authority(pool))
    engines = pods.service(names, names.engines, ENVOY, names.served, outbound)
    return [
        pods.account(names, names.envoy, ENVOY),
        names.child("v1", "ConfigMap", names.envoy, ENVOY, data=data),
        # with a picker also those that start: it answers with an engine the moment that this is ready
        pods.headless(engines, unready=pool.picker.mode != "Off"),
        pods.service(names, names.envoy, ENVOY, selector, inbound),
        pods.budget(names, names.envoy, ENVOY, selector),
        _deployment(names, pool, site, data),
    ]


def _text(document: Json) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _deployment(names: ObjectNames, pool: Pool, site: Site, data: Json) -> Json:
    verifies = pool.picker.mode != "Off"
    folders = [("config", CONFIG_FOLDER, True), ("tmp", "/tmp")]
    volumes = [{"name": "config", "configMap": {"name": names.envoy}}, pods.empty("tmp")]
    if verifies:
        folders.append(("authority", AUTHORITY_FOLDER, True))
        volumes.append({"name": "authority", "configMap": {"name": names.authority}})
    pod: Json = {
        "serviceAccountName": names.envoy,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(USER, site),
        "terminationGracePeriodSeconds": DRAIN_SECONDS + 30,
        "topologySpreadConstraints": pods.spread(names.selector(ENVOY)),
        "containers": [{**_container(site), "volumeMounts": pods.mounts(*folders)}],
        "volumes": volumes,
    }
    digest = hashlib.sha256(_text(data).encode()).hexdigest()[:12]
    made = overlaid(pods.template(names, ENVOY, pod, {CONFIG: digest}), ENVOYS, pool.gateway.pod_template)
    return pods.deployment(names, names.envoy, ENVOY, {"replicas": REPLICAS}, made)


def _container(site: Site) -> Json:
    ready = {"httpGet": {"path": "/ready", "port": "status"}, "timeoutSeconds": 3}
    return {
        "name": ENVOY,
        "image": site.envoy_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["envoy"],
        "args": [
            *("-c", f"{CONFIG_FOLDER}/{CONFIG_FILE}"),
            *("--service-node", "$(POD_NAME)"),
            *("--drain-time-s", "30"),
            *("--log-level", "warning"),
        ],
        "env": [pods.field("POD_NAME", "metadata.name")],
        "ports": [
            {"name": "http", "containerPort": child.HTTP_PORT, "protocol": "TCP"},
            {"name": "status", "containerPort": child.STATUS_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": "500m", "memory": "256Mi"},
            "limits": {"memory": quantity(HEAP_BYTES)},
        },
        "securityContext": pods.read_only(),
        **POLICY,
        "startupProbe": {**ready, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {
            "tcpSocket": {"port": "status"},
            "timeoutSeconds": 3,
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["bash", f"{CONFIG_FOLDER}/{DRAIN_FILE}"]}}},
    }
