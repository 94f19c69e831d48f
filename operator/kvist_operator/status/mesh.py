"""Advice on pods that a service mesh has taken in, or that are refused because of it. Pure.

A mesh adds a proxy to each new pod of a namespace that is labelled for it, or redirects the traffic of its
pods on their nodes. Where Istio's proxies require mutual TLS, what the pool's own parts send to each other is
refused: pickers scrape engines by their pods' addresses, and KV events are no HTTP. Names of containers,
labels and annotations are those of Istio (istio.io/api, ``label`` and ``annotation``) and of Linkerd (its
documentation, *Automatic Proxy Injection*).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.manifests.object_names import Note
from kvist_operator.spec.pod_template import CONTAINERS

from .container_diagnosis import part_of

GUIDE: Final = "docs/guides/attach-gateway.md#service-meshes"
REDIRECTED: Final = "ambient.istio.io/redirection"
"""Annotation that Istio's node agent sets on a pod whose traffic it redirects."""
ENDED: Final = ("Succeeded", "Failed")
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Mesh:
    sign: str
    """What a pod has that is in the mesh."""
    proxy: str
    """Name of the container that the mesh adds; empty: none."""
    others: tuple[str, ...]
    """Names of init containers that it adds, which set up the redirection."""
    opt_out: str
    """What leaves a pod out of it."""


ISTIO: Final = _Mesh(
    sign="Istio's proxy",
    proxy="istio-proxy",
    others=("istio-init", "istio-validation"),
    opt_out='the label `sidecar.istio.io/inject: "false"`',
)
LINKERD: Final = _Mesh(
    sign="Linkerd's proxy",
    proxy="linkerd-proxy",
    others=("linkerd-init", "linkerd-network-validator"),
    opt_out="the annotation `linkerd.io/inject: disabled`",
)
AMBIENT: Final = _Mesh(
    sign="Istio's ambient mode",
    proxy="",
    others=(),
    opt_out="the label `istio.io/dataplane-mode: none`",
)
MESHES: Final = (ISTIO, LINKERD, AMBIENT)


def mesh_notes(pods: Iterable[Object]) -> tuple[Note, ...]:
    """Return advice for each mesh that pods of a pool are in, with the overlays that leave them out. Pods
    that have ended do not count: those of a download stay as they were."""
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ENDED]
    found = {(mesh, part_of(pod).overlay) for pod in running for mesh in _meshes(pod)}
    overlays = {mesh: sorted(overlay for one, overlay in found if one is mesh) for mesh in MESHES}
    return tuple(Note("", "InServiceMesh", _advice(mesh, each)) for mesh, each in overlays.items() if each)


def refusal_remedy(message: str, overlay: str) -> str:
    """Return the remedy if the API server refuses pods because of a container that a mesh adds to them;
    empty if the message names none."""
    for mesh in MESHES:
        if any(f'"{name}"' in message for name in (mesh.proxy, *mesh.others) if name):
            return (
                "A service mesh adds this container, which the namespace's Pod Security level forbids: leave "
                f"the pods out of it with {mesh.opt_out} in {overlay} ({GUIDE}), or use the mesh's CNI plugin"
            )
    return ""


def _meshes(pod: Object) -> Iterator[_Mesh]:
    spec = pod.get("spec") or {}
    names = {each.get("name") for kind in CONTAINERS for each in spec.get(kind) or ()}
    yield from (mesh for mesh in MESHES if mesh.proxy and mesh.proxy in names)
    if (pod["metadata"].get("annotations") or {}).get(REDIRECTED) == "enabled":
        yield AMBIENT


def _advice(mesh: _Mesh, overlays: Sequence[str]) -> str:
    return (
        f"pods of the pool are in a service mesh, by {mesh.sign}: where it requires mutual TLS, or a "
        "NetworkPolicy closes its ports, pickers may reach no engine, and a download may not end. Leave the "
        f"pods out of it with {mesh.opt_out} in {' and '.join(overlays)} ({GUIDE})"
    )
