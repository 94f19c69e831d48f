"""Promises of the advice on pods in a service mesh."""

from typing import Any

import pytest
from tests.operator.broken import healthy

from kvist_operator.status.mesh import mesh_notes, refusal_remedy

Json = dict[str, Any]
PROXY = {"name": "istio-proxy", "image": "istio/proxyv2"}


def pod(
    component: str,
    kind: str = "containers",
    container: Json | None = None,
    annotations: dict[str, str] | None = None,
) -> Json:
    """Return a pod of a component, with a container that admission has added, and annotations."""
    found = healthy(component)
    if container:
        found["spec"][kind] = [*found["spec"].get(kind, []), container]
    found["metadata"]["annotations"] = {**found["metadata"].get("annotations", {}), **(annotations or {})}
    return found


def test_pods_of_no_mesh_need_no_advice() -> None:
    """Pods as the operator makes them, and those with other containers, are in no mesh."""
    pods = [healthy("engine"), pod("picker", container={"name": "agent"}), healthy("envoy")]

    assert mesh_notes(pods) == ()
    assert mesh_notes([]) == ()


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize(
    ("component", "overlay"),
    [
        ("engine", "spec.podTemplate ("),
        ("picker", "spec.picker.podTemplate ("),
        ("envoy", "spec.gateway.podTemplate ("),
    ],
)
def test_a_proxy_is_named_with_the_overlay_that_leaves_it_out(
    kind: str, component: str, overlay: str
) -> None:
    """The advice names the label of Istio, and the field of the component whose pods have the proxy; a proxy
    may be an init container that keeps running."""
    [note] = mesh_notes([pod(component, kind, PROXY), healthy("engine")])

    assert note.condition == ""
    assert f'`sidecar.istio.io/inject: "false"` in {overlay}' in note.message


def test_the_advice_stays_while_pods_come_and_go() -> None:
    """The advice does not depend on how many pods there are, on their names or on their order."""
    pods = [pod("engine", container=PROXY), pod("picker", container=PROXY)]
    more = [*reversed(pods), healthy("engine", "another"), *pods]

    [note] = mesh_notes(pods)
    assert mesh_notes(more) == (note,)
    assert "in spec.picker.podTemplate and spec.podTemplate (" in note.message


def test_a_pod_that_has_ended_is_in_no_mesh() -> None:
    """The pod of a finished download keeps the proxy that it had, and no label can take it away."""
    done = pod("engine", container=PROXY)
    done["metadata"]["labels"]["app.kubernetes.io/component"] = "download"
    running = {**done, "status": {"phase": "Running"}}
    done["status"] = {"phase": "Succeeded"}

    assert mesh_notes([done]) == ()
    assert "in spec.picker.podTemplate (" in mesh_notes([running])[0].message


@pytest.mark.parametrize(
    ("component", "overlay"), [("kv-cleaner", "spec.picker.podTemplate"), ("lmcache", "spec.podTemplate")]
)
def test_pods_beside_engines_and_pickers_have_their_overlays(component: str, overlay: str) -> None:
    """The advice names the overlay by which the pod of a cleaner, or a server of LMCache, gets the label."""
    found = pod("engine", container=PROXY)
    found["metadata"]["labels"]["app.kubernetes.io/component"] = component

    assert f" in {overlay} (" in mesh_notes([found])[0].message


def test_each_mesh_has_its_own_way_out() -> None:
    """Istio's ambient mode shows in an annotation, Linkerd by its container, each with its own remedy."""
    linkerd = pod("engine", container={"name": "linkerd-proxy"})
    ambient = pod("engine", annotations={"ambient.istio.io/redirection": "enabled"})
    out = pod("engine", annotations={"ambient.istio.io/redirection": "disabled"})

    first, second = mesh_notes([ambient, linkerd, out])
    assert "`linkerd.io/inject: disabled`" in first.message
    assert "`istio.io/dataplane-mode: none`" in second.message


@pytest.mark.parametrize("container", ["istio-init", "istio-proxy", "istio-validation"])
def test_pods_that_are_refused_because_of_a_mesh_have_its_remedy(container: str) -> None:
    """A container of a mesh in the API server's words is known; other refusals have another remedy."""
    message = (
        f'violates PodSecurity "restricted:latest": (container "{container}" must not include "NET_ADMIN")'
    )

    assert '`sidecar.istio.io/inject: "false"` in spec.podTemplate' in refusal_remedy(
        message, "spec.podTemplate"
    )
    assert refusal_remedy(message.replace(container, "agent"), "spec.podTemplate") == ""
    assert "linkerd.io/inject" in refusal_remedy(
        message.replace(container, "linkerd-init"), "spec.podTemplate"
    )
