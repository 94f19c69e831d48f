"""Kubernetes objects as the API sends them."""

from typing import Any

import msgspec

from kvist_epp.endpoints.kubernetes.pod_endpoints import Pod
from kvist_kube.object_cache import decode

PODS = "/api/v1/namespaces/ns/pods"


def pod(
    name: str = "a", address: str = "10.0.0.1", *, ready: bool = True, phase: str = "Running", **meta: Any
) -> dict[str, Any]:
    """Return the document of a pod."""
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    status: dict[str, Any] = {"phase": phase, "conditions": conditions}
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    head = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": head | meta, "spec": {"nodeName": "n"}, "status": status}


def parsed(document: dict[str, Any]) -> Pod:
    """Decode a document as the picker does."""
    return decode(msgspec.json.encode(document), Pod)
