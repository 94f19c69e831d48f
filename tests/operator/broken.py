"""Broken pods as files: what the API has of them, and what the pool's Ready condition says then.

A file has the parts in which a pod differs from one that the operator renders.
``python -m tests.operator.broken`` writes what is said again, after ``says:``, to be reviewed as a diff.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml
from tests.crd.cases import planned
from tests.operator.manifested import one, rendered, resource

from kvist_operator.manifests.object_names import ENVOY, PICKER
from kvist_operator.spec import read_pool
from kvist_operator.status import ObservedPool, Subject, status
from kvist_operator.status.diagnosis import troubles

Json = dict[str, Any]
FOLDER: Final = Path(__file__).parent / "pods"
MARK: Final = "says:\n"
CASE: Final = "agents"
"""The pool of all of them: engines, pickers and an Envoy."""
WORKLOADS: Final = {"engine": "twig", PICKER: "twig-epp", ENVOY: "twig-envoy"}
NAMES: Final = {
    "engine": "twig-5d9c7b9f4-x7k2p",
    PICKER: "twig-epp-77c6f-q8r2t",
    ENVOY: "twig-envoy-6b8d-z4n7w",
}
NOW: Final = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Broken:
    """A pod in trouble, from a file, with the reason and message expected of it."""

    name: str
    component: str
    pod: Json
    events: tuple[Json, ...]
    reason: str
    message: str


def gallery() -> list[Broken]:
    """Return all broken pods, sorted by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def _read(path: Path) -> Broken:
    told = yaml.safe_load(path.read_text())
    component = told["component"]
    pod = merged(healthy(component), {k: told[k] for k in ("metadata", "spec", "status") if k in told})
    says = told.get("says") or {}
    events = tuple(
        {**each, "involvedObject": {"name": NAMES[component]}} for each in told.get("events") or ()
    )
    return Broken(path.stem, component, pod, events, says.get("reason", ""), says.get("message", ""))


def healthy(component: str, name: str = "", **meta: Any) -> Json:
    """Return a pod of the rendered template, as it is when it was just created."""
    template = one(rendered(CASE), "Deployment", WORKLOADS[component])["spec"]["template"]
    pod: Json = json.loads(json.dumps({"metadata": template["metadata"], "spec": template["spec"]}))
    labels = {**pod["metadata"]["labels"], "pod-template-hash": "5d9c7b9f4"}
    born = {"name": name or NAMES[component], "creationTimestamp": "2026-11-21T11:39:58Z", "labels": labels}
    made: Json = merged(pod, {"metadata": {**born, **meta}, "status": {"phase": "Pending"}})
    return made


def merged(base: Any, over: Any) -> Any:
    """Merge objects by key and lists of named objects by name; replace anything else."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: merged(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}
        }
    if isinstance(base, list) and isinstance(over, list) and all("name" in each for each in (*base, *over)):
        found = {each["name"]: each for each in base}
        return list((found | {each["name"]: merged(found.get(each["name"]), each) for each in over}).values())
    return deepcopy(over)


def workload(wanted: int, ready: int) -> Json:
    """Return a Deployment that has created all its pods."""
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": wanted},
        "status": {
            "observedGeneration": 2,
            "replicas": wanted,
            "updatedReplicas": wanted,
            "readyReplicas": ready,
        },
    }


def told(broken: Broken) -> dict[str, Json]:
    """Return the conditions of a pool of which only this pod is broken."""
    ready = {component: 0 if component == broken.component else 2 for component in WORKLOADS}
    observed = ObservedPool(
        workload=workload(2, ready["engine"]),
        picker=workload(2, ready[PICKER]),
        envoy=workload(2, ready[ENVOY]),
        troubles=troubles([broken.pod], broken.events),
    )
    found = resource(CASE)
    subject = Subject(
        name="twig", generation=3, pool=read_pool(found), plan=planned(found), notes=rendered(CASE).notes
    )
    return {each["type"]: each for each in status(subject, observed, {}, NOW)["conditions"]}


def write() -> None:
    """Write reason and message of all files again."""
    for broken in gallery():
        path = FOLDER / f"{broken.name}.yaml"
        ready = told(broken)["Ready"]
        says = yaml.safe_dump(
            {"reason": ready["reason"], "message": ready["message"]},
            sort_keys=False,
            width=104,
            allow_unicode=True,
        )
        before = path.read_text().partition(MARK)[0]
        path.write_text(before + MARK + "".join(f"  {line}\n" for line in says.splitlines()))


if __name__ == "__main__":
    write()
