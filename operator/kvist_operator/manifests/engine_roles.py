"""The engines of a disaggregated pool: their pools and plans by role, labels, ports, and advice. Pure."""

from collections.abc import Mapping
from typing import Final

from kvist_epp import names as wire
from kvist_operator.plan import Plan
from kvist_operator.plan.nixl import HOST_VARIABLE, SIDE_CHANNEL
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.disaggregation_reader import pools_by_role
from kvist_operator.spec.pool import Pool

from . import pods
from .object_names import Json, Note

ROLE: Final = wire.LABEL_ROLES[0]
PORT_NAME: Final = "kv-transfer"


def roles(pool: Pool, plan: Plan) -> list[tuple[Pool, Plan]]:
    """Return the pool and the plan of each workload of engines; one of each without roles."""
    by_role = pools_by_role(pool)
    if plan.prefill is None:
        return [(by_role.get(Role.BOTH, pool), plan)]
    return [(by_role[Role.DECODE], plan), (by_role[Role.PREFILL], plan.prefill)]


def scales_itself(pool: Pool) -> bool:
    """Return whether an autoscaler sets the replicas of the workload of this pool's role."""
    spec = pool.disaggregation
    return bool(spec and not spec.fluid and pool.role and spec.of(pool.role).external)


def labels(plan: Plan) -> dict[str, str]:
    """Return the labels by which the picker knows the role of an engine, and its partners."""
    return {ROLE: plan.role, wire.LABEL_KV_COMPATIBILITY: plan.kv_compatibility} if plan.role else {}


def ports(plan: Plan) -> list[tuple[str, int]]:
    """Return the port of the handshakes of rank 0."""
    return [(PORT_NAME, SIDE_CHANNEL)] if plan.role else []


def environment(plan: Plan) -> Mapping[str, Json]:
    """Return the variable with the address that other engines connect to; vLLM's default is localhost."""
    return {HOST_VARIABLE: pods.field(HOST_VARIABLE, "status.podIP")} if plan.role else {}


def notes(pool: Pool, plan: Plan) -> list[Note]:
    """Return advice: what transfers cost without RDMA, and the time-out of a gateway that others
    configure."""
    if pool.disaggregation is None:
        return []
    found = []
    cost = next((each.reason for each in plan.choices if each.field == "kvTransfer"), "")
    on_cpu = plan.hardware.accelerator.vendor == "cpu"
    if pool.interconnect.rdma is None and not on_cpu:
        text = (
            f"spec.interconnect.rdma is not set, so engines send each other blocks over TCP: {cost}; set it "
            "where nodes have RDMA devices"
        )
        found.append(Note("", "TransferOverTcp", text))
    if not pool.gateway.is_envoy:
        text = (
            "the picker answers once a prompt has been computed, and gateways wait 200 ms by default: raise "
            "the message timeout of the gateway's ext_proc filter above --queue-seconds and the longest "
            "prefill, and let it replace bodies (docs/guides/disaggregated-pools.md)"
        )
        found.append(Note("", "GatewayTimeoutUnknown", text))
    return found
