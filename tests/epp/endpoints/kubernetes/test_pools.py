"""Selections of pools and priorities of objectives."""

from typing import Any

import msgspec
import pytest

from kvist_epp.endpoints.kubernetes.pools import (
    GatewayPool,
    Objective,
    OwnPool,
    PodSelection,
    priorities,
    selection_of,
)
from kvist_kube.object_cache import decode


def pool(spec: dict[str, Any]) -> GatewayPool:
    """Return a pool of the Gateway API Inference Extension."""
    return decode(msgspec.json.encode({"metadata": {"name": "p"}, "spec": spec}), GatewayPool)


def test_a_pool_selects_by_labels_and_ports() -> None:
    """matchLabels become a label selector in a fixed order; a port listed twice counts once."""
    labels = {"b": "2", "a": "1"}
    ports = [{"number": 8000}, {"number": 8001}, {"number": 8000}]
    found = selection_of(pool({"selector": {"matchLabels": labels}, "targetPorts": ports}))
    assert found == PodSelection("a=1,b=2", (8000, 8001))


@pytest.mark.parametrize(
    ("labels", "ports", "field"),
    [
        ({}, [8000], "spec.selector.matchLabels"),
        ({"a": "b"}, [], "spec.targetPorts"),
        ({"a": "b"}, [0], "spec.targetPorts"),
        ({"a": "b"}, range(1, 10), "spec.targetPorts"),
    ],
)
def test_a_pool_that_selects_nothing_usable_is_refused(
    labels: dict[str, str], ports: list[int], field: str
) -> None:
    """A pool without labels, which would select every pod, or without ports is rejected by the field's
    name."""
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
    with pytest.raises(ValueError, match=field):
        selection_of(pool(spec))


@pytest.mark.parametrize(("status", "ports"), [({}, (8000,)), ({"targetPorts": [{"number": 9000}]}, (9000,))])
def test_our_own_pool_labels_its_pods(status: dict[str, Any], ports: tuple[int, ...]) -> None:
    """Pods of our own pool are selected by its name; ports come from its status once the operator has written
    it."""
    own = decode(msgspec.json.encode({"metadata": {"name": "qwen"}, "status": status}), OwnPool)
    assert selection_of(own) == PodSelection("kvist.dev/pool=qwen", ports)


def objective(name: str, pool: str, **spec: Any) -> Objective:
    """Return an InferenceObjective."""
    document = {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **spec}}
    return decode(msgspec.json.encode(document), Objective)


def test_objectives_of_this_pool_give_priorities() -> None:
    """Objectives of other pools are ignored, an absent priority is 0, and the newer API takes precedence."""
    old = [objective("a", "p", priority=1), objective("b", "p", priority=-1)]
    new = [objective("a", "p", priority=2), objective("c", "q", priority=3), objective("d", "p")]

    assert priorities("p", old, new) == {"a": 2, "b": -1, "d": 0}
    assert priorities("", new) == {"a": 2, "c": 3, "d": 0}
