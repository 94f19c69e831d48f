"""What the operator needs of a cluster. ``apiserver`` is the real one; tests of the logic have one in
memory.

Objects are plain dicts as the API server hands them out, ``managedFields`` left out; what is handed over is
never changed. Every failure is a ``ClusterError`` (``kvist_operator.errors``).
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from .kinds import Kind, Target

Json = dict[str, Any]


class Moment(StrEnum):
    """When a hook is called."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Write:
    """One write that is about to happen, or has."""

    verb: str
    """``apply``, ``delete``, ``status`` or ``annotate``."""
    target: Target

    def __str__(self) -> str:
        return f"{self.verb} {self.target}"


Hook = Callable[[Moment, Write], Awaitable[None]]
"""Called before and after each write; what it raises goes to the write's caller. For tests of crashes."""


class Cluster(Protocol):
    """The API of one cluster."""

    async def get(self, target: Target) -> Json | None:
        """The object; None where there is none, or its API is not there."""

    async def find(
        self, kind: Kind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[Json]:
        """All objects that ``labels``, a selector, leaves; everywhere or in a namespace. ``bare``: their
        metadata alone.

        Raises NotServed where the API is not there.
        """

    async def served(self, kinds: Iterable[Kind]) -> frozenset[Kind]:
        """Those of the kinds whose API is there, by discovery."""

    async def apply(self, made: Json) -> Json:
        """Server-side apply of the whole intent, forced, as ``kvist-operator``; what it has become. The same
        resource version as before means that nothing was written."""

    async def delete(self, target: Target, uid: str) -> None:
        """In the foreground, only if it still is the one with this uid. One that has gone is no error."""

    async def patch_status(self, found: Json, status: Json) -> Json:
        """Replace ``status`` of the object as it was found.

        Raises Conflict when it has changed since, or is another one: read it again.
        """

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of an object, or take them away (None). One that has gone is no error."""
