"""The operations that the operator needs of a cluster. ``apiserver`` runs them on a real API server; tests of
the logic have a cluster in memory.

Objects are plain dicts as the API server returns them, without ``managedFields``; arguments are never
modified. Every failure is a ``ClusterError`` (``kvist_operator.errors``).
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from .kinds import ObjectKind, Target

Json = dict[str, Any]


class Moment(StrEnum):
    """Moment of a write at which a hook is called."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Write:
    """One write, for hooks."""

    verb: str
    """``apply``, ``delete``, ``status`` or ``annotate``."""
    target: Target

    def __str__(self) -> str:
        return f"{self.verb} {self.target}"


Hook = Callable[[Moment, Write], Awaitable[None]]
"""Called before and after each write; its exceptions reach the caller of the write. For tests of crashes."""


class Cluster(Protocol):
    """The API of one cluster."""

    async def get(self, target: Target) -> Json | None:
        """Return the object; None when it, or its API, does not exist."""

    async def find(
        self, kind: ObjectKind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[Json]:
        """Return the objects of a kind that match ``labels``, a selector; with an empty namespace of all
        namespaces. ``bare``: only their metadata.

        Raises NotServed when the API does not exist.
        """

    async def served(self, kinds: Iterable[ObjectKind]) -> frozenset[ObjectKind]:
        """Return those of the kinds whose API exists, by discovery."""

    async def apply(self, made: Json) -> Json:
        """Apply the whole intent server-side, forced, as ``kvist-operator``, and return the resulting object.
        An unchanged resource version means that nothing was written."""

    async def delete(self, target: Target, uid: str) -> None:
        """Delete the object with this uid, in the foreground. Deleting an absent object is no error."""

    async def patch_status(self, found: Json, status: Json) -> Json:
        """Replace ``status`` of the object as it was found.

        Raises Conflict when the object has changed since, or is another one; the caller has to read it again.
        """

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of an object; None removes one. Annotating an absent object is no error."""
