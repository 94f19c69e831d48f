"""The kinds of objects that the operator reads or writes, their API paths, and the rights it needs. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_epp.names import OWN_GROUP, POOL_GROUP
from kvist_operator.manifests.gateway_policies import ENVOY_GROUP, GATEWAY_GROUP, GKE_GROUP, NGINX_GROUP
from kvist_operator.manifests.object_names import Api
from kvist_operator.manifests.picker import rules as picker_rules


@dataclass(frozen=True, slots=True, order=True)
class ObjectKind:
    """A kind of object in one API version."""

    group: str
    """API group; empty for the core API."""
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def resource(self) -> str:
        """Name of the resource as in ``kubectl api-resources`` and of CRDs: ``deployments.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """Value of ``apiVersion`` in objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the API version, which lists its resources."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def optional(self) -> Api | None:
        """The optional API that the kind belongs to; None when every cluster has it."""
        return _OPTIONAL.get(self.resource)

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of one object, or of the collection in one namespace or in all."""
        within = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return f"{self.root}{within}/{self.plural}" + (f"/{name}" if name else "")

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """Kind, namespace and name of one object."""

    kind: ObjectKind
    namespace: str
    name: str

    @property
    def path(self) -> str:
        """Path of the object."""
        return self.kind.path(self.namespace, self.name)

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind.kind} {where}"


_OPTIONAL: Final[Mapping[str, Api]] = {str(api): api for api in Api}
_RBAC: Final = "rbac.authorization.k8s.io"

POOL: Final = ObjectKind(OWN_GROUP, "v1alpha1", "InferencePool", "inferencepools")
PRESET: Final = ObjectKind(OWN_GROUP, "v1alpha1", "InferencePoolPreset", "inferencepoolpresets")
POD: Final = ObjectKind("", "v1", "Pod", "pods")
EVENT: Final = ObjectKind("", "v1", "Event", "events")
SECRET: Final = ObjectKind("", "v1", "Secret", "secrets")
CONFIG_MAP: Final = ObjectKind("", "v1", "ConfigMap", "configmaps")
CLAIM: Final = ObjectKind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
LEASE: Final = ObjectKind("coordination.k8s.io", "v1", "Lease", "leases")
NODE: Final = ObjectKind("", "v1", "Node", "nodes", namespaced=False)
GATEWAY: Final = ObjectKind(GATEWAY_GROUP, "v1", "Gateway", "gateways")
GATEWAY_CLASS: Final = ObjectKind(GATEWAY_GROUP, "v1", "GatewayClass", "gatewayclasses", namespaced=False)
SECURITY_CONSTRAINTS: Final = ObjectKind(
    "security.openshift.io",
    "v1",
    "SecurityContextConstraints",
    "securitycontextconstraints",
    namespaced=False,
)
"""Only looked for: the sign of OpenShift, which assigns user ids to pods."""
JOB: Final = ObjectKind("batch", "v1", "Job", "jobs")
DAEMON_SET: Final = ObjectKind("apps", "v1", "DaemonSet", "daemonsets")
DEPLOYMENT: Final = ObjectKind("apps", "v1", "Deployment", "deployments")
LEADER_WORKER_SET: Final = ObjectKind("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets")
BACKEND_TLS_POLICY: Final = ObjectKind(GATEWAY_GROUP, "v1", "BackendTLSPolicy", "backendtlspolicies")
GATEWAY_POLICIES: Final = (
    ObjectKind(GKE_GROUP, "v1", "HealthCheckPolicy", "healthcheckpolicies"),
    ObjectKind(GKE_GROUP, "v1", "GCPBackendPolicy", "gcpbackendpolicies"),
    ObjectKind(NGINX_GROUP, "v1alpha1", "ClientSettingsPolicy", "clientsettingspolicies"),
    ObjectKind(NGINX_GROUP, "v1alpha1", "ProxySettingsPolicy", "proxysettingspolicies"),
)
"""Policies of single gateways."""

NEWER: Final = frozenset({JOB, PRESET, DAEMON_SET, GATEWAY, GATEWAY_CLASS, *GATEWAY_POLICIES})
"""Kinds to which older charts give no right: only pools that use them need it, and say so or do without."""

CHILDREN: Final = (
    ObjectKind("", "v1", "ServiceAccount", "serviceaccounts"),
    ObjectKind(_RBAC, "v1", "Role", "roles"),
    ObjectKind(_RBAC, "v1", "RoleBinding", "rolebindings"),
    CONFIG_MAP,
    SECRET,
    ObjectKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    ObjectKind("", "v1", "Service", "services"),
    ObjectKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    JOB,
    DAEMON_SET,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    BACKEND_TLS_POLICY,
    ObjectKind(ENVOY_GROUP, "v1alpha1", "BackendTrafficPolicy", "backendtrafficpolicies"),
    ObjectKind(ENVOY_GROUP, "v1alpha1", "EnvoyExtensionPolicy", "envoyextensionpolicies"),
    ObjectKind(POOL_GROUP, "v1", "InferencePool", "inferencepools"),
    *GATEWAY_POLICIES,
    ObjectKind(GATEWAY_GROUP, "v1", "HTTPRoute", "httproutes"),
    ObjectKind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
)
"""Kinds of objects that pools consist of."""

_BY_NAME: Final = {
    (kind.group, kind.kind): kind
    for kind in (*CHILDREN, POOL, PRESET, POD, EVENT, CLAIM, NODE, LEASE, GATEWAY, GATEWAY_CLASS)
}


def kind_of(made: Mapping[str, Any]) -> ObjectKind:
    """Return the kind of an object, by ``apiVersion`` and ``kind``. Raises KeyError for unknown kinds."""
    group, slash, _ = str(made["apiVersion"]).partition("/")
    return kind_named(group if slash else "", str(made["kind"]))


def kind_named(group: str, kind: str) -> ObjectKind:
    """Return the kind with this group and name. Raises KeyError for unknown kinds."""
    return _BY_NAME[group, kind]


def target_of(made: Mapping[str, Any]) -> Target:
    """Return kind, namespace and name of an object."""
    kind, meta = kind_of(made), made["metadata"]
    return Target(kind, str(meta.get("namespace", "")) if kind.namespaced else "", str(meta["name"]))


Rule = dict[str, Any]
READ: Final = ("get", "list", "watch")
WRITE: Final = ("create", "patch", "delete")
"""Server-side apply is a patch; where it creates an object, the API server requires ``create`` too."""
_GET: Final = ("get",)
_LISTED: Final = ("get", "list")


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource."""

    group: str
    resource: str
    """Plural of the resource, with ``/status`` for that subresource."""
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def namespaced() -> list[Rule]:
    """Return the rules of the Role in each managed namespace."""
    own = [
        _rule(POOL, READ),
        _rule(POOL, ("patch",), "status"),
        # required by clusters that check blockOwnerDeletion, for example OpenShift
        _rule(POOL, ("update",), "finalizers"),
        _rule(POD, (*READ, "patch")),
        _rule(CLAIM, _GET),
        _rule(PRESET, _LISTED),
        _rule(GATEWAY, _GET),
    ]
    made = [_rule(kind, (*(_GET if kind == SECRET else READ), *WRITE)) for kind in CHILDREN]
    return merged([*own, *made, *picker_rules()])


def election() -> list[Rule]:
    """Return the rules of the Role in the operator's own namespace: the election of a leader, and presets for
    all pools."""
    return [_rule(LEASE, ("get", "create", "update")), _rule(PRESET, _LISTED)]


def everywhere() -> list[Rule]:
    """Return the rules of the ClusterRole: the same for all namespaces, the labels of nodes, and classes of
    gateways."""
    return merged([*namespaced(), _rule(NODE, ("list",)), _rule(GATEWAY_CLASS, _GET)])


def single_rights(rules: Iterable[Rule]) -> list[Right]:
    """Return each single right of some rules, sorted."""
    return sorted(
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def merged(rules: Iterable[Rule]) -> list[Rule]:
    """Merge rules: one for each group and set of verbs. Rules for objects by name become rules for all
    names."""
    verbs: dict[tuple[str, str], set[str]] = {}
    for right in single_rights(rules):
        verbs.setdefault((right.group, right.resource), set()).add(right.verb)
    by: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (group, resource), said in sorted(verbs.items()):
        by.setdefault((group, tuple(sorted(said))), []).append(resource)
    return [
        {"apiGroups": [group], "resources": resources, "verbs": list(said)}
        for (group, said), resources in by.items()
    ]


def _rule(kind: ObjectKind, verbs: Sequence[str], part: str = "") -> Rule:
    resource = f"{kind.plural}/{part}" if part else kind.plural
    return {"apiGroups": [kind.group], "resources": [resource], "verbs": list(verbs)}
