"""Pages of pickers, and pods, for tests of what the operator makes of them."""

import json
from typing import Any


def row(pod: str, *, port: int = 8000, worth: int = 0, **more: Any) -> dict[str, Any]:
    """Return an endpoint of a picker's page."""
    counted = {"seconds": 0.0, "requests": 0.0, "preemptions": 0.0, "queries": 0.0, "hits": 0.0}
    counted |= more.pop("counted", {})
    return {
        "pod": pod,
        "endpoint": f"{pod}:{port}",
        "ready": True,
        "worth_tokens": worth,
        "exclusive_blocks": 0,
        "kv_tokens": None,
        "kv_usage": 0.0,
        "running": 0,
        "waiting": 0,
        "counted": counted,
        **more,
    }


def page(*rows: dict[str, Any], replica: str = "r", **more: Any) -> bytes:
    """Return one picker's page, with unknown fields."""
    return json.dumps({"version": 1, "replica": replica, "new": [1], "endpoints": rows, **more}).encode()


def pod(name: str, component: str, **more: Any) -> dict[str, Any]:
    """Return a running and ready pod as the API server reports it."""
    labels = {"app.kubernetes.io/instance": "twig", "app.kubernetes.io/component": component}
    owner = {"kind": more.pop("owner", "ReplicaSet"), "controller": True, "name": "twig-1"}
    ready = "True" if more.pop("ready", True) else "False"
    status = {
        "phase": more.pop("phase", "Running"),
        "podIP": more.pop("address", "127.0.0.1"),
        "conditions": [{"type": "Ready", "status": ready}],
    }
    meta = {"name": name, "namespace": "ns", "labels": labels, "ownerReferences": [owner], **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
