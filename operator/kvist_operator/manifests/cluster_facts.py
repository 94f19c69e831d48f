"""Facts of a cluster that manifests depend on, and notes on objects that it does not permit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import kvist_epp

Json = dict[str, Any]

PICKER_IMAGE: Final = f"kvist-epp:{kvist_epp.__version__}"
"""Image of the operator's own version; the chart adds the registry."""
ENVOY_IMAGE: Final = "envoyproxy/envoy:v1.40.0"


class Api(StrEnum):
    """An API that a cluster may lack: the name of its CRD."""

    LEADER_WORKER_SET = "leaderworkersets.leaderworkerset.x-k8s.io"
    HTTP_ROUTE = "httproutes.gateway.networking.k8s.io"
    BACKEND_TLS_POLICY = "backendtlspolicies.gateway.networking.k8s.io"
    INFERENCE_POOL = "inferencepools.inference.networking.k8s.io"
    EXTENSION_POLICY = "envoyextensionpolicies.gateway.envoyproxy.io"
    TRAFFIC_POLICY = "backendtrafficpolicies.gateway.envoyproxy.io"
    POD_MONITOR = "podmonitors.monitoring.coreos.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The cluster and namespace that a pool is rendered for."""

    apis: frozenset[Api] = frozenset(Api)
    """Optional APIs that are served."""
    claims: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Access modes of claims (``ReadWriteMany``, …) by name, as far as they are known."""
    node_labels: Sequence[Mapping[str, str]] = ()
    """Labels of each node; empty where nodes may not be read."""
    picker_image: str = PICKER_IMAGE
    envoy_image: str = ENVOY_IMAGE


@dataclass(frozen=True, slots=True)
class Note:
    """An object that could not be rendered as the spec requests."""

    condition: str
    """Type of the condition it becomes; empty = advice."""
    reason: str
    """CamelCase, for a condition."""
    message: str
    """What is missing and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object by its name."""

    kind: str
    name: str
