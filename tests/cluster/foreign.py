"""CRDs of other projects, from their Go modules: Gateway API and Envoy Gateway, the Prometheus operator.

LeaderWorkerSet and the policies of GKE and NGINX are on no module proxy; ``LWS``, ``GKE`` and ``NGINX`` have
the fields and limits that facts and their documentation name.
"""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.golang import GoError, go

ENVOY_GATEWAY = "github.com/envoyproxy/gateway@v1.9.1"
PROMETHEUS = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
KEDA = "github.com/kedacore/keda/v2@v2.17.2"
GATEWAY_API = (
    "httproutes.gateway.networking.k8s.io",
    "backendtlspolicies.gateway.networking.k8s.io",
    "gateways.gateway.networking.k8s.io",
    "gatewayclasses.gateway.networking.k8s.io",
)
ENVOY_POLICIES = ("envoyextensionpolicies", "backendtrafficpolicies")
DOWNLOAD_SECONDS = 300

_ROLLOUT = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["RollingUpdate"]},
        "rollingUpdateConfiguration": {
            "type": "object",
            "properties": {
                "partition": {"type": "integer"},
                "maxSurge": {"x-kubernetes-int-or-string": True},
                "maxUnavailable": {"x-kubernetes-int-or-string": True},
            },
        },
    },
}
_TEMPLATE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SPEC = {
    "type": "object",
    "properties": {
        "replicas": {"type": "integer"},
        "startupPolicy": {"type": "string", "enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": _ROLLOUT,
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {
                    "type": "string",
                    "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"],
                },
                "leaderTemplate": _TEMPLATE,
                "workerTemplate": _TEMPLATE,
            },
        },
    },
}
_STATUS = {
    "type": "object",
    "properties": {
        "hpaPodSelector": {"type": "string"},
        **{name: {"type": "integer"} for name in ("replicas", "readyReplicas", "updatedReplicas")},
    },
}
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.hpaPodSelector",
}
_TARGET = {
    "type": "object",
    "required": ["group", "kind", "name"],
    "properties": {key: {"type": "string"} for key in ("group", "kind", "name", "namespace")},
}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_HTTP_CHECK = {
    "type": "object",
    "properties": {
        "requestPath": {"type": "string", "pattern": "^/"},
        "port": _whole(1, 65535),
        "portSpecification": {"type": "string"},
    },
    "x-kubernetes-validations": [
        {
            # like the rules of GKE's own CRD, it fails without the field that it reads
            "rule": "self.portSpecification != 'USE_SERVING_PORT' || !has(self.port)",
            "message": "the serving port is each endpoint's own",
        }
    ],
}
_HEALTH = {
    "type": "object",
    "properties": {
        **{key: _whole(1, 300) for key in ("checkIntervalSec", "timeoutSec")},
        **{key: _whole(1, 10) for key in ("healthyThreshold", "unhealthyThreshold")},
        "config": {
            "type": "object",
            "minProperties": 2,
            "maxProperties": 2,
            "properties": {"type": {"type": "string", "enum": ["HTTP"]}, "httpHealthCheck": _HTTP_CHECK},
        },
    },
    "x-kubernetes-validations": [
        {
            "rule": "!has(self.timeoutSec) || self.timeoutSec <= "
            "(has(self.checkIntervalSec) ? self.checkIntervalSec : 5)",
            "message": "the timeout exceeds the interval",
        }
    ],
}
_LIMITS = {
    "type": "object",
    "properties": {
        "timeoutSec": _whole(1, 2147483647),
        "connectionDraining": {"type": "object", "properties": {"drainingTimeoutSec": _whole(0, 3600)}},
        "logging": {"type": "object", "properties": {"enabled": {"type": "boolean"}}},
        "securityPolicy": {"type": "string"},
    },
}


_SIZE = {"type": "string", "pattern": r"^\d{1,4}(k|m|g)?$"}
_TIME = {"type": "string", "pattern": r"^[0-9]{1,4}(ms|s|m|h)?$"}


def _crd(
    group: str, kind: str, plural: str, spec: Any, status: Any, version: str = "v1", **more: Any
) -> dict[str, Any]:
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}},
        "subresources": {"status": {}, **more},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's own"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }


def _policy_of_gke(kind: str, plural: str, default: Any) -> dict[str, Any]:
    spec = {
        "type": "object",
        "required": ["targetRef"],
        "properties": {"targetRef": _TARGET, "default": default},
    }
    return _crd("networking.gke.io", kind, plural, spec, _TEMPLATE)


def _policy_of_nginx(kind: str, plural: str, **properties: Any) -> dict[str, Any]:
    spec = {"type": "object", "required": [*properties][:1], "properties": properties}
    return _crd("gateway.nginx.org", kind, plural, spec, _TEMPLATE, "v1alpha1")


def _fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


LWS = _crd("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "leaderworkersets", _SPEC, _STATUS, scale=_SCALE)
GKE = (
    _policy_of_gke("HealthCheckPolicy", "healthcheckpolicies", _HEALTH),
    _policy_of_gke("GCPBackendPolicy", "gcpbackendpolicies", _LIMITS),
)
NGINX = (
    _policy_of_nginx(
        "ClientSettingsPolicy",
        "clientsettingspolicies",
        targetRef=_TARGET,
        body=_fields(maxSize=_SIZE, timeout=_TIME),
    ),
    _policy_of_nginx(
        "ProxySettingsPolicy",
        "proxysettingspolicies",
        targetRefs={"type": "array", "minItems": 1, "items": _TARGET},
        timeout=_fields(connect=_TIME, read=_TIME, send=_TIME),
    ),
)


@functools.cache
def module(name: str, required_by: Path | None = None) -> Path:
    """The folder of a Go module, fetched if need be: ``path@version``, or a path of which the ``go.mod`` in
    the folder ``required_by`` knows the version. Raises GoError."""
    command = [go(), "mod", "download", "-json", name]
    done = subprocess.run(
        command, cwd=required_by, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS
    )
    if done.returncode:
        raise GoError(f"`{' '.join(command)}` failed; it needs a Go module proxy (GOPROXY):\n{done.stdout}")
    return Path(json.loads(done.stdout)["Dir"])


def writable_copy(folder: Path, to: Path) -> Path:
    """Copy a folder of a Go module, whose files are read-only, to where programs may read and write it."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    for path in (to, *to.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


@functools.cache
def crds() -> list[dict[str, Any]]:
    """All that the generated objects may need besides our own."""
    found = [crd for crd in gateway_api() if crd["metadata"]["name"] in GATEWAY_API]
    for plural in ENVOY_POLICIES:
        found += _documents(_crd_chart() / "generated" / f"gateway.envoyproxy.io_{plural}.yaml")
    monitors = module(PROMETHEUS) / "example" / "prometheus-operator-crd"
    return [*found, *_documents(monitors / "monitoring.coreos.com_podmonitors.yaml"), LWS, *GKE, *NGINX]


@functools.cache
def gateway_api() -> list[dict[str, Any]]:
    """Return the CRDs of the Gateway API's standard channel, without the policy that guards versions."""
    found = _documents(_crd_chart() / "standard-gatewayapi-crds.yaml")
    return [one for one in found if one["kind"] == "CustomResourceDefinition"]


def _crd_chart() -> Path:
    return module(ENVOY_GATEWAY) / "charts" / "gateway-crds-helm" / "templates"


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Return the CRD of PrometheusRules."""
    folder = module(PROMETHEUS) / "example" / "prometheus-operator-crd"
    return _documents(folder / "monitoring.coreos.com_prometheusrules.yaml")


@functools.cache
def keda() -> list[dict[str, Any]]:
    """Return the CRDs of KEDA, which scales by Prometheus."""
    return _documents(module(KEDA) / "config" / "crd" / "bases" / "keda.sh_scaledobjects.yaml")


def _documents(path: Path) -> list[dict[str, Any]]:
    """CRDs of a chart's template: the template's own lines are conditions around them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("{{")]
    return [document for document in yaml.safe_load_all("\n".join(lines)) if document]
