"""What a pool's children are called, labelled and found by; their ports."""

from dataclasses import dataclass
from typing import Final

from kvist_epp.names import LABEL_POOL
from kvist_epp.settings.settings import Settings
from kvist_operator.plan.engine_args import PORT
from kvist_operator.spec.pool import Pool

from .cluster_facts import Json

MANAGER: Final = "kvist-operator"
"""Value of ``app.kubernetes.io/managed-by``, and the field manager of every apply."""
API_VERSION: Final = "kvist.dev/v1alpha1"
PLAN: Final = "kvist.dev/plan"
"""Annotation of engines' pods: hash of the plan they run."""
CONFIG: Final = "kvist.dev/config"
"""Annotation of Envoy's pods: hash of their configuration, so that a change rolls them."""
INTENT: Final = "kvist.dev/intent"
"""Annotation of every child: hash of what was applied last."""

ENGINE: Final = "engine"
PICKER: Final = "picker"
ENVOY: Final = "envoy"

_APP: Final = "app.kubernetes.io"
INSTANCE: Final = f"{_APP}/instance"
COMPONENT: Final = f"{_APP}/component"
MANAGED: Final = f"{_APP}/managed-by"
OURS: Final = f"{MANAGED}={MANAGER}"
"""Label selector of everything that pools are made of."""
_PICKER_PORTS: Final = Settings()
ENGINE_PORT: Final = PORT
GRPC_PORT: Final = _PICKER_PORTS.grpc_port
HEALTH_PORT: Final = _PICKER_PORTS.grpc_health_port
METRICS_PORT: Final = _PICKER_PORTS.metrics_port
PEER_PORT: Final = _PICKER_PORTS.replica_port
HTTP_PORT: Final = 8080
"""Where Envoy takes requests."""
STATUS_PORT: Final = 8081
"""Where Envoy answers probes and scrapes; its admin page stays on the loopback."""
ADMIN_PORT: Final = 9901


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Names of one pool's children; all of them fit 63 characters, since a pool's name fits 40."""

    pool: str
    namespace: str

    @classmethod
    def of(cls, pool: Pool) -> "ObjectNames":
        return cls(pool.name, pool.namespace)

    @property
    def engine(self) -> str:
        """Workload of the engines, their Service, route and budget."""
        return self.pool

    @property
    def engine_account(self) -> str:
        return f"{self.pool}-engine"

    @property
    def engine_settings(self) -> str:
        """ConfigMap with how engines log."""
        return f"{self.pool}-engine"

    @property
    def engines(self) -> str:
        """Headless Service: the addresses of ready engines, for Envoy."""
        return f"{self.pool}-engines"

    @property
    def picker(self) -> str:
        return f"{self.pool}-epp"

    @property
    def peers(self) -> str:
        """Headless Service: the addresses of all pickers, ready or not."""
        return f"{self.pool}-epp-peers"

    @property
    def certificates(self) -> str:
        """Secret with tls.crt, tls.key and ca.crt of the pickers. Made by the operator, not rendered."""
        return f"{self.pool}-epp-tls"

    @property
    def authority(self) -> str:
        """ConfigMap with ca.crt, for those who verify a picker. Made with the Secret."""
        return f"{self.pool}-epp-ca"

    @property
    def envoy(self) -> str:
        return f"{self.pool}-envoy"

    def host(self, service: str) -> str:
        """A Service's name in the cluster, without the cluster's domain, which may be any."""
        return f"{service}.{self.namespace}.svc"

    def selector(self, component: str) -> dict[str, str]:
        """The labels that pods of one component have and no others; immutable."""
        return {INSTANCE: self.pool, COMPONENT: component}

    def labels(self, component: str) -> dict[str, str]:
        """Labels of a component's objects and pods."""
        return {
            f"{_APP}/name": f"kvist-{component}",
            **self.selector(component),
            f"{_APP}/part-of": "kvist",
            MANAGED: MANAGER,
        }

    @property
    def served(self) -> dict[str, str]:
        """The label by which the picker, gateways and autoscalers find engines that take requests."""
        return {LABEL_POOL: self.pool}

    def meta(self, name: str, component: str) -> Json:
        """Metadata of a child; ``render`` adds the owner."""
        return {"name": name, "namespace": self.namespace, "labels": self.labels(component)}
