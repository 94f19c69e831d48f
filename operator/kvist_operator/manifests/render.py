"""All objects of a pool, in the order in which they are applied, each with its owner. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvist_operator.errors import RenderError
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from . import engine_roles, lmcache, shared_tier, weights_cache
from .engine_clients import engine_clients
from .engine_roles import roles
from .engine_workload import USER, engine
from .envoy import envoy
from .gateway import gateway, missing, plaintext
from .object_names import API_VERSION, Api, Json, Note, ObjectNames, Ref, Site
from .picker import picker
from .pods import unplaced
from .policy import monitoring, policies, unmonitored
from .tokenizer import chats, tokenizer

ORDER: Final = (
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "ConfigMap",
    "NetworkPolicy",
    "Service",
    "PodDisruptionBudget",
    "Job",
    "DaemonSet",
    "Deployment",
    "LeaderWorkerSet",
    "BackendTLSPolicy",
    "BackendTrafficPolicy",
    "EnvoyExtensionPolicy",
    "InferencePool",
    "HealthCheckPolicy",
    "GCPBackendPolicy",
    "ClientSettingsPolicy",
    "ProxySettingsPolicy",
    "HTTPRoute",
    "PodMonitor",
)
"""Order of applying: objects that others need first, and routes after the objects they lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The objects of a pool."""

    objects: tuple[Json, ...]
    expects: tuple[Ref, ...]
    """Objects that ``reconcile`` creates, because they contain keys or their authority."""
    notes: tuple[Note, ...]


def render(pool: Pool, plan: Plan, site: Site) -> Rendered:
    """Return the complete objects of a pool.

    Raises:
        RenderError: the cluster lacks an API without which engines cannot run.
    """
    nodes = max(each.nodes for _, each in roles(pool, plan))
    if nodes > 1 and Api.LEADER_WORKER_SET not in site.apis:
        raise RenderError(
            f"a replica spans {nodes} nodes, which needs {Api.LEADER_WORKER_SET}: install "
            "LeaderWorkerSet, or let it fit one node (larger accelerators, a smaller spec.engine.maxModelLen)"
        )
    found, clients = tokenizer(pool, plan, site), engine_clients(pool, site)
    objects = [
        *engine(pool, plan, site),
        *shared_tier.cleaner(pool, site, USER),
        *_servers(pool, plan, site),
        *picker(pool, plan, site, found),
        *envoy(pool, site),
        *gateway(pool, plan, site),
        *policies(pool, plan, clients),
        *monitoring(pool, site),
    ]
    ordered = sorted(objects, key=lambda o: (ORDER.index(o["kind"]), o["metadata"]["name"]))
    names = ObjectNames.of(pool)
    expects = (Ref("ConfigMap", names.authority), Ref("Secret", names.certificates))
    notes = [
        *missing(pool, site),
        *plaintext(pool, site),
        *unmonitored(pool, site),
        *([found.note] if found.note else []),
        *chats(pool, found).notes,
        *dict.fromkeys(note for _, each in roles(pool, plan) for note in unplaced(each, site)),
        *clients.notes,
        *weights_cache.notes(pool, site),
        *shared_tier.notes(pool, plan, site),
        *engine_roles.notes(pool, plan),
    ]
    return Rendered(
        objects=tuple(with_owner(pool, _apart(each)) for each in ordered),
        expects=expects if pool.picker.mode != "Off" else (),
        notes=tuple(notes),
    )


def _servers(pool: Pool, plan: Plan, site: Site) -> list[Json]:
    """Return LMCache's servers, each once: roles of other parallelism have servers of their own."""
    found = [made for _, each in roles(pool, plan) for made in lmcache.servers(pool, each, site, USER)]
    return list({(made["kind"], made["metadata"]["name"]): made for made in found}.values())


def _apart(value: Any) -> Any:
    """Return a copy in which no dict or list occurs twice."""
    if isinstance(value, dict):
        return {key: _apart(below) for key, below in value.items()}
    return [_apart(below) for below in value] if isinstance(value, list) else value


def with_owner(pool: Pool, made: Json) -> Json:
    """Make the pool the controller of a child, so that garbage collection deletes the children of a deleted
    pool, also while the operator is down. A pool without a uid (``kvist render``) owns nothing."""
    if pool.uid:
        owner = {
            "apiVersion": API_VERSION,
            "kind": "InferencePool",
            "name": pool.name,
            "uid": pool.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        made["metadata"]["ownerReferences"] = [owner]
    return made


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def to_yaml(objects: Iterable[Json]) -> str:
    """Return YAML documents, each of which begins with ``---``, in the order of the objects."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )
