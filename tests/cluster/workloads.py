"""Plain Deployments and Services for the tests of the harness itself."""

from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]
IMAGE: Final = "kvist-test/python:3"
PROGRAM: Final = str(Path(__file__).with_name("answering.py"))
PORT: Final = 8000
USER: Final = 1234
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
HEALTH: Final = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1}


def container(**more: Any) -> Json:
    """A web server that says its pod's name."""
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return {
        "name": "web",
        "image": IMAGE,
        "command": ["python3", PROGRAM],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": HEALTH,
        "securityContext": RESTRICTED,
        **more,
        "env": [name, *more.get("env", [])],
    }


def pod_spec(*containers: Json, **more: Any) -> Json:
    """Return the spec of a pod that Pod Security *restricted* admits."""
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": 4321,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 10,
        "containers": list(containers),
        **more,
    }


def deployment(name: str, spec: Json, *, replicas: int = 1) -> Json:
    """Pods of one kind, labelled ``app: name``."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def pod(name: str, spec: Json) -> Json:
    """Return a single pod."""
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def service(name: str) -> Json:
    """Port 80 of the pods labelled ``app: name``."""
    ports = [{"port": 80, "targetPort": "http"}]
    spec = {"selector": {"app": name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
