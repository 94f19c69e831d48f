"""Pools and the pods and ports they select; objectives and the priorities they set. Pure.

``InferencePool`` of ``inference.networking.k8s.io/v1`` selects by ``spec.selector.matchLabels`` and
``spec.targetPorts``. Our own, ``kvist.dev/v1alpha1``, labels its pods with its name and lists ports in
``status``. ``InferenceObjective`` is v1alpha2 of ``llm-d.ai`` or, older, of
``inference.networking.x-k8s.io``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kvist_epp.names import LABEL_POOL
from kvist_kube.object_cache import KubeObject

OWN_PORT: Final = 8000
"""Port of the engines of our own pools when ``status.targetPorts`` is absent."""
MAX_PORTS: Final = 8
"""Target ports of one pool (the CRD's own limit)."""


class TargetPort(msgspec.Struct, frozen=True):
    """One of ``targetPorts``."""

    number: int


class PodSelector(msgspec.Struct, frozen=True, rename="camel"):
    """``spec.selector`` of an InferencePool."""

    match_labels: dict[str, str] | None = None


class GatewayPoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of an InferencePool of the Gateway API Inference Extension."""

    selector: PodSelector = PodSelector()
    target_ports: list[TargetPort] | None = None


class GatewayPool(KubeObject, frozen=True):
    """``InferencePool`` of ``inference.networking.k8s.io/v1``."""

    spec: GatewayPoolSpec = GatewayPoolSpec()


class OwnPoolStatus(msgspec.Struct, frozen=True, rename="camel"):
    """``status`` of our own InferencePool."""

    target_ports: list[TargetPort] | None = None


class OwnPool(KubeObject, frozen=True):
    """``InferencePool`` of ``kvist.dev/v1alpha1``, with only the fields that the picker needs."""

    status: OwnPoolStatus = OwnPoolStatus()


class PoolReference(msgspec.Struct, frozen=True):
    """``spec.poolRef`` of an InferenceObjective."""

    name: str = ""


class ObjectiveSpec(msgspec.Struct, frozen=True, rename="camel"):
    """``spec`` of an InferenceObjective."""

    priority: int | None = None
    pool_ref: PoolReference = PoolReference()


class Objective(KubeObject, frozen=True):
    """An ``InferenceObjective`` with the fields that are read."""

    spec: ObjectiveSpec = ObjectiveSpec()


class PodSelection(NamedTuple):
    """Pods and ports that are endpoints."""

    selector: str
    """A Kubernetes label selector."""
    ports: tuple[int, ...]


def selection_of(pool: GatewayPool | OwnPool) -> PodSelection:
    """Return what a pool selects.

    Raises ``ValueError`` when it has no selector (that would be every pod) or no usable port.
    """
    if isinstance(pool, OwnPool):
        ports = pool.status.target_ports
        return PodSelection(
            f"{LABEL_POOL}={pool.metadata.name}",
            (OWN_PORT,) if ports is None else _numbers(ports, "status.targetPorts"),
        )
    labels = pool.spec.selector.match_labels
    if not labels:
        raise ValueError("spec.selector.matchLabels is empty")
    return PodSelection(
        ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        _numbers(pool.spec.target_ports or (), "spec.targetPorts"),
    )


def _numbers(ports: Sequence[TargetPort], where: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(port.number for port in ports))
    if not 1 <= len(numbers) <= MAX_PORTS or not all(1 <= number <= 65_535 for number in numbers):
        raise ValueError(f"{where} must be 1 to {MAX_PORTS} ports of 1 to 65535, not {list(numbers)}")
    return numbers


def priorities(pool: str, *generations: Iterable[Objective]) -> Mapping[str, int]:
    """Return the priority of each objective that refers to ``pool`` (empty: all), by name; 0 where it sets
    none.

    ``generations``: objectives by API; later ones take precedence.
    """
    return {
        one.metadata.name: one.spec.priority or 0
        for objectives in generations
        for one in objectives
        if not pool or one.spec.pool_ref.name == pool
    }
