"""The rules of the operator's ClusterRole, or of a Role in each of its namespaces. Pure.

They are the least that works. The operator makes Roles for pickers, and Kubernetes lets it grant only rights
that it has itself; so it has the pickers' rules too. Secrets it gets, writes and deletes by name; it neither
lists nor watches them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.manifests.picker import rules as picker_rules

from . import kinds
from .kinds import CHILDREN, ObjectKind

Rule = dict[str, Any]
READ: Final = ("get", "list", "watch")
WRITE: Final = ("create", "patch", "delete")
"""Server-side apply is a patch; where it creates an object, the API server requires ``create`` too."""
_BY_NAME: Final = ("get",)


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
        _rule(kinds.POOL, READ),
        _rule(kinds.POOL, ("patch",), "status"),
        # required by clusters that check blockOwnerDeletion, for example OpenShift
        _rule(kinds.POOL, ("update",), "finalizers"),
        _rule(kinds.POD, (*READ, "patch")),
        _rule(kinds.CLAIM, _BY_NAME),
    ]
    made = [_rule(kind, (*(_BY_NAME if kind == kinds.SECRET else READ), *WRITE)) for kind in CHILDREN]
    return merged([*own, *made, *picker_rules()])


def everywhere() -> list[Rule]:
    """Return the rules of the ClusterRole: the same for all namespaces, and the labels of nodes."""
    return merged([*namespaced(), _rule(kinds.NODE, ("list",))])


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
