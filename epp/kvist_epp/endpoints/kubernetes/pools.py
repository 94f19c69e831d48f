"""Pools → which pods and which ports; objectives → priorities. Pure.

``InferencePool`` of ``inference.networking.k8s.io/v1`` selects by ``spec.selector.matchLabels`` and
``spec.targetPorts``. Ours, ``kvist.dev/v1alpha1``, labels its pods with its name, and tells ports in
``status``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvist_epp.endpoints.kubernetes.objects import Objective, OwnPool, Pool, Port
from kvist_epp.names import LABEL_POOL

OWN_PORT: Final = 8000
"""Where the engines of our own pools listen unless ``status.targetPorts`` tells."""
MAX_PORTS: Final = 8
"""Target ports of one pool (the CRD's own limit)."""


class Selection(NamedTuple):
    """Which pods, at which ports."""

    selector: str
    """A Kubernetes label selector."""
    ports: tuple[int, ...]


def selection(pool: Pool) -> Selection:
    """What a pool of the Gateway API Inference Extension selects.

    Raises ``ValueError`` when it selects by nothing (that would be every pod) or has no usable port.
    """
    labels = pool.spec.selector.match_labels
    if not labels:
        raise ValueError("spec.selector.matchLabels is empty")
    return Selection(
        ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        _ports(pool.spec.target_ports or (), "spec.targetPorts"),
    )


def own_selection(pool: OwnPool) -> Selection:
    """What one of our own pools selects. Raises ``ValueError``."""
    ports = pool.status.target_ports
    return Selection(
        f"{LABEL_POOL}={pool.metadata.name}",
        (OWN_PORT,) if ports is None else _ports(ports, "status.targetPorts"),
    )


def _ports(ports: Sequence[Port], where: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(port.number for port in ports))
    if not 1 <= len(numbers) <= MAX_PORTS or not all(1 <= number <= 65_535 for number in numbers):
        raise ValueError(f"{where} must be 1 to {MAX_PORTS} ports of 1 to 65535, not {list(numbers)}")
    return numbers


def priorities(pool: str, *generations: Iterable[Objective]) -> Mapping[str, int]:
    """Objective name → priority, 0 where it has none, of the objectives that refer to ``pool`` (empty: all).

    ``generations``: by API, the one that counts most last.
    """
    return {
        one.metadata.name: one.spec.priority or 0
        for objectives in generations
        for one in objectives
        if not pool or one.spec.pool_ref.name == pool
    }
