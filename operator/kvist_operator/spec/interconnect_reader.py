"""Reader of ``spec.interconnect``: where the pods of one replica are, and the network between them. Pure."""

from typing import Final

from kvist_operator.errors import SpecError

from .fields import Fields
from .network_policy_reader import KEY_LENGTH, LABEL_KEY
from .pool import InterconnectSpec, Rdma

PLACEMENTS: Final = ("Preferred", "Required", "Exclusive")
DEVICE: Final = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
"""An extended resource, which a device plugin announces."""


def read_interconnect(f: Fields) -> InterconnectSpec:
    """Return the fields. Raises SpecError."""
    defaults = InterconnectSpec()
    return f.done(
        InterconnectSpec(
            placement=f.text("placement", defaults.placement, choices=PLACEMENTS),
            topology_key=f.text(
                "topologyKey",
                defaults.topology_key,
                pattern=LABEL_KEY,
                like="topology.kubernetes.io/rack",
                most=KEY_LENGTH,
            ),
            rdma=_rdma(f.optional("rdma")),
        )
    )


def _rdma(f: Fields | None) -> Rdma | None:
    if f is None:
        return None
    hint = "the device plugin's resource, such as rdma/hca or nvidia.com/roce"
    name = f.required("resourceName", hint, pattern=DEVICE, like="rdma/hca", most=128)
    if name.startswith("kubernetes.io/"):
        raise SpecError(f.at("resourceName"), f"{name} belongs to Kubernetes: write {hint}")
    rdma = Rdma(
        resource=name,
        count=f.number("count", 1, low=1, high=64),
        ipc_lock=f.switch("ipcLock", True),
    )
    return f.done(rdma)
