"""Names, labels, ports and annotations of a pool's objects, and the site that they are rendered for. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import kvist_epp
from kvist_epp.names import LABEL_POOL, LABEL_ROLES
from kvist_epp.settings.settings import Settings
from kvist_operator.plan.engine_args import PORT
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.fields import NAME_LENGTH, OBJECT_NAME
from kvist_operator.spec.pool import (
    COMPONENT,
    ENGINE_CONTAINER,
    ENVOY_CONTAINER,
    INSTANCE,
    MANAGED,
    PICKER_CONTAINER,
    Pool,
)

Json = dict[str, Any]

MANAGER: Final = "kvist-operator"
"""Value of ``app.kubernetes.io/managed-by``, and the field manager of every apply."""
API_VERSION: Final = "kvist.dev/v1alpha1"
PLAN: Final = "kvist.dev/plan"
"""Annotation of engines' pods: hash of their plan."""
CONFIG: Final = "kvist.dev/config"
"""Annotation of Envoy's pods: hash of their configuration, so that a change rolls them."""
INTENT: Final = "kvist.dev/intent"
"""Annotation of every child: hash of what was applied last."""

SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
"""Variable with the name of a program in its traces."""

ENGINE: Final = ENGINE_CONTAINER
PICKER: Final = PICKER_CONTAINER
ENVOY: Final = ENVOY_CONTAINER
DOWNLOAD: Final = "download"
"""Component of the Job that fills the cache for weights."""
KV_CLEANER: Final = "kv-cleaner"
LMCACHE: Final = "lmcache"

_APP: Final = "app.kubernetes.io"
OURS: Final = f"{MANAGED}={MANAGER}"
"""Label selector of everything that pools are made of."""
KEPT_LABELS: Final = (INSTANCE, COMPONENT, LABEL_POOL, LABEL_ROLES[0])
"""Labels of pods by which Services, workloads, pickers and the operator find them."""
_PICKER_PORTS: Final = Settings()
ENGINE_PORT: Final = PORT
GRPC_PORT: Final = _PICKER_PORTS.grpc_port
HEALTH_PORT: Final = _PICKER_PORTS.grpc_health_port
METRICS_PORT: Final = _PICKER_PORTS.metrics_port
PEER_PORT: Final = _PICKER_PORTS.replica_port
HTTP_PORT: Final = 8080
"""Envoy's port for requests."""
STATUS_PORT: Final = 8081
"""Envoy's port for probes and scrapes; its admin page listens on the loopback only."""
ADMIN_PORT: Final = 9901


class ObjectNames:
    """Names of one pool's children; all of them fit 63 characters, since a pool's name fits 40."""

    def __init__(self, pool: str, namespace: str, role: str = "") -> None:
        self.pool, self.namespace = pool, namespace
        self.role = role
        """Role of the engines, where each role has a workload of its own."""
        self.engine = pool
        """Service of the engines, route and budget."""
        self.workload = f"{pool}-{role}" if role else pool
        """Workload of the engines."""
        self.engine_account = f"{pool}-engine"
        self.engine_settings = f"{pool}-engine"
        """ConfigMap with the engines' logging configuration."""
        self.engines = f"{pool}-engines"
        """Headless Service by which Envoy finds ready engines."""
        self.picker = f"{pool}-epp"
        self.peers = f"{pool}-epp-peers"
        """Headless Service by which all pickers are found, ready or not."""
        self.certificates = f"{pool}-epp-tls"
        """Secret with tls.crt, tls.key and ca.crt of the pickers. Not rendered: ``reconcile`` creates it."""
        self.authority = f"{pool}-epp-ca"
        """ConfigMap with ca.crt, for clients that verify pickers. Created with the Secret."""
        self.envoy = f"{pool}-envoy"
        self.download = f"{pool}-download"
        """Begin of the name of Jobs that fill the cache for weights."""
        self.cleaner = f"{pool}-kv-cleaner"
        """Deployment that keeps the shared volume for KV cache blocks from filling up."""
        self.lmcache = f"{pool}-lmcache"
        """NetworkPolicy of LMCache's servers; their DaemonSet and Service have a longer name."""
        self.served = {LABEL_POOL: pool}
        """Label by which the picker, gateways and autoscalers find engines that serve requests."""

    @classmethod
    def of(cls, pool: Pool) -> "ObjectNames":
        apart = pool.role is not None and pool.role is not Role.BOTH
        return cls(pool.name, pool.namespace, str(pool.role) if apart else "")

    def host(self, service: str) -> str:
        """Return the DNS name of a Service, without the cluster's domain, which is not known."""
        return f"{service}.{self.namespace}.svc"

    def selector(self, component: str) -> dict[str, str]:
        """Return the labels that select the pods of one component; immutable."""
        return {INSTANCE: self.pool, COMPONENT: component}

    @property
    def engine_pods(self) -> dict[str, str]:
        """Return the labels that select the pods of the engines' workload; immutable."""
        return {**self.selector(ENGINE), **({LABEL_ROLES[0]: self.role} if self.role else {})}

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of a component's objects and pods."""
        return {
            f"{_APP}/name": f"kvist-{component}",
            **self.selector(component),
            f"{_APP}/part-of": "kvist",
            MANAGED: MANAGER,
        }

    def child(self, api_version: str, kind: str, name: str, component: str, **fields: Any) -> Json:
        """Return an object of the pool with these fields; ``render`` adds the owner."""
        meta = {"name": name, "namespace": self.namespace, "labels": self.labels(component)}
        return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


PICKER_IMAGE: Final = f"kvist-epp:{kvist_epp.__version__}"
"""Image of the operator's own version; the chart adds the registry."""
ENVOY_IMAGE: Final = "envoyproxy/envoy:v1.40.0"

ENVOY_GATEWAY: Final = "gateway.envoyproxy.io/gatewayclass-controller"
GKE: Final = "networking.gke.io/gateway"
HIGRESS: Final = "higress.io/gateway-controller"
ISTIO: Final = "istio.io/gateway-controller"
NGINX: Final = "gateway.nginx.org/nginx-gateway-controller"
"""``controllerName`` of classes of gateways: Envoy Gateway and Envoy AI Gateway, GKE, Higress, Istio, NGINX
Gateway Fabric."""


class Api(StrEnum):
    """An API that a cluster may lack: the name of its CRD."""

    LEADER_WORKER_SET = "leaderworkersets.leaderworkerset.x-k8s.io"
    HTTP_ROUTE = "httproutes.gateway.networking.k8s.io"
    BACKEND_TLS_POLICY = "backendtlspolicies.gateway.networking.k8s.io"
    INFERENCE_POOL = "inferencepools.inference.networking.k8s.io"
    EXTENSION_POLICY = "envoyextensionpolicies.gateway.envoyproxy.io"
    TRAFFIC_POLICY = "backendtrafficpolicies.gateway.envoyproxy.io"
    HEALTH_CHECK_POLICY = "healthcheckpolicies.networking.gke.io"
    GCP_BACKEND_POLICY = "gcpbackendpolicies.networking.gke.io"
    CLIENT_SETTINGS = "clientsettingspolicies.gateway.nginx.org"
    PROXY_SETTINGS = "proxysettingspolicies.gateway.nginx.org"
    POD_MONITOR = "podmonitors.monitoring.coreos.com"


@dataclass(frozen=True, slots=True, order=True)
class Referrer:
    """A Gateway, or another parent of a route, that has a route to a pool's InferencePool."""

    namespace: str
    name: str
    kind: str = "Gateway"
    controller: str = ""
    """Name of its controller; empty if it is not known."""

    @property
    def is_gateway(self) -> bool:
        """Return whether it can be a Gateway: the status may hold anything."""
        names = (self.name, self.namespace)
        sound = all(len(each) <= NAME_LENGTH and re.fullmatch(OBJECT_NAME, each) for each in names)
        return self.kind == "Gateway" and sound


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The cluster and namespace that a pool is rendered for."""

    apis: frozenset[Api] = frozenset(Api)
    """Optional APIs that are served."""
    claims: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Access modes of claims (``ReadWriteMany``, …) by name, as far as they are known."""
    node_labels: Sequence[Mapping[str, str]] = ()
    """Labels of each node; empty where nodes may not be read."""
    gateways: frozenset[str] = frozenset()
    """Controllers of the pool's gateways: those of their classes, as far as they may be read, and those that
    have answered the pool's route (``status.parents`` of an HTTPRoute). Of a pool without a route: those of
    ``referring``."""
    referring: tuple[Referrer, ...] = ()
    """What has a route to the InferencePool of a pool without one."""
    storage: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What engines of other pools of the namespace agree on to share blocks (``status.plan.storage``), by the
    name of the pool."""
    assigns_users: bool = False
    """The cluster assigns user ids to pods, and refuses those that name one (OpenShift)."""
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
