"""All objects of a pool, in the order they are made, each with its owner. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvist_operator.errors import RenderError
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from .cluster_facts import Api, Json, Note, Ref, Site
from .engine_workload import engine
from .envoy import envoy
from .gateway import gateway, missing
from .object_names import API_VERSION, ObjectNames
from .picker import picker
from .pods import unplaced
from .policy import monitoring, policies, unmonitored
from .tokenizer import chats, tokenizer
from .tokenizer import notes as said

ORDER: Final = (
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "ConfigMap",
    "NetworkPolicy",
    "Service",
    "PodDisruptionBudget",
    "Deployment",
    "LeaderWorkerSet",
    "BackendTLSPolicy",
    "BackendTrafficPolicy",
    "EnvoyExtensionPolicy",
    "InferencePool",
    "HTTPRoute",
    "PodMonitor",
)
"""What others need comes first; the way in comes when there is something behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The objects of a pool."""

    objects: tuple[Json, ...]
    expects: tuple[Ref, ...]
    """Objects that the operator makes besides, because they hold keys."""
    notes: tuple[Note, ...]


def render(pool: Pool, plan: Plan, site: Site) -> Rendered:
    """The whole intent, the same for the same input.

    Raises:
        RenderError: engines cannot run here at all.
    """
    if plan.nodes > 1 and Api.LEADER_WORKER_SET not in site.apis:
        raise RenderError(
            f"a replica spans {plan.nodes} nodes, which needs {Api.LEADER_WORKER_SET}: install "
            "LeaderWorkerSet, or let it fit one node (larger accelerators, a smaller spec.engine.maxModelLen)"
        )
    found = tokenizer(pool, site)
    objects = [
        *engine(pool, plan, site),
        *picker(pool, plan, site, found),
        *envoy(pool, site),
        *gateway(pool, site),
        *policies(pool, plan),
        *monitoring(pool, site),
    ]
    notes = [
        *missing(pool, site),
        *unmonitored(pool, site),
        *said(found),
        *chats(pool, found).notes,
        *unplaced(plan, site),
    ]
    return Rendered(objects=_owned(pool, objects), expects=_expected(pool), notes=tuple(notes))


def _expected(pool: Pool) -> tuple[Ref, ...]:
    names = ObjectNames.of(pool)
    if pool.picker.mode == "Off":
        return ()
    return (Ref("ConfigMap", names.authority), Ref("Secret", names.certificates))


def _owned(pool: Pool, objects: Iterable[Json]) -> tuple[Json, ...]:
    ordered = sorted(objects, key=lambda o: (ORDER.index(o["kind"]), o["metadata"]["name"]))
    return tuple(with_owner(pool, _apart(each)) for each in ordered)


def _apart(value: Any) -> Any:
    """A copy in which nothing is shared, not even within one object."""
    if isinstance(value, dict):
        return {key: _apart(below) for key, below in value.items()}
    return [_apart(below) for below in value] if isinstance(value, list) else value


def with_owner(pool: Pool, made: Json) -> Json:
    """Garbage collection deletes the children of a deleted pool, also with the operator down. Without a uid
    (``kvist render``) nobody owns them."""
    if pool.uid:
        made["metadata"]["ownerReferences"] = [owner(pool)]
    return made


def owner(pool: Pool) -> dict[str, Any]:
    """The reference that makes the pool the controller of a child."""
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def to_yaml(objects: Iterable[Json]) -> str:
    """Documents, each begun by ``---``, in the order given."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )
