"""What has to be there before the operator can do anything: its CRD, and its rights. Says what is missing."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvist_epp.names import OBJECTIVE_GROUPS
from kvist_operator.errors import StartError

from .kinds import CHILDREN, POOL
from .port import Cluster
from .rights import Right, asked, everywhere, namespaced

AT_ONCE: Final = 16
SHOWN: Final = 8


class Reviewer(Protocol):
    """Who can tell what we may do."""

    async def may(self, right: Right, namespace: str) -> bool:
        """Whether we may; in one namespace, or everywhere with an empty one. Raises ClusterError."""


async def check(cluster: Cluster, reviewer: Reviewer, namespaces: Sequence[str]) -> None:
    """Raises StartError, naming what is missing and how it gets there."""
    if POOL not in await cluster.served([POOL]):
        raise StartError(
            f"there is no {POOL.resource} {POOL.version} in this cluster: "
            "kubectl apply --server-side -f crds/inferencepools.yaml"
        )
    lacking = [
        f"{right} in {space or 'all namespaces'}"
        for space in namespaces or ("",)
        for right in await _lacking(reviewer, space, needed(bool(namespaces)))
    ]
    if lacking:
        more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise StartError(
            f"the operator's service account may not {', '.join(lacking[:SHOWN])}{more}: give it the rules "
            "of docs/guides/operator.md" + ("" if namespaces else ", or say --namespaces")
        )


def needed(within: bool) -> list[Right]:
    """Rights without which nothing goes; those for optional APIs are missed when they are used."""
    optional = {(kind.group, kind.plural) for kind in CHILDREN if kind.optional}
    spare = {(group, "inferenceobjectives") for group in OBJECTIVE_GROUPS}
    spare.add(("kvist.dev", "inferencepools/finalizers"))
    found = asked(namespaced() if within else everywhere())
    return [right for right in found if (right.group, right.resource) not in optional | spare]


async def _lacking(reviewer: Reviewer, namespace: str, rights: Sequence[Right]) -> list[Right]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(right: Right) -> bool:
        async with gate:
            return await reviewer.may(right, namespace)

    answers = await asyncio.gather(*(one(right) for right in rights))
    return [right for right, may in zip(rights, answers, strict=True) if not may]


def review(right: Right, namespace: str) -> dict[str, Any]:
    """A SelfSubjectAccessReview."""
    resource, _, part = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": part,
        "verb": right.verb,
        "namespace": namespace,
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }
