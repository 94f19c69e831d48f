"""The operations that the operator needs of a cluster, and the meaning of its failures. Pure.

``apiserver`` runs the operations on a real API server; tests have a cluster in memory. Objects are plain
dicts as the API server returns them, without ``managedFields``; arguments are never modified. Every failure
is a ``ClusterError`` (``kvist_operator.errors``), whose message says what was attempted, repeats the server's
own message and names the remedy; it becomes the message of a condition.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from kvist_kube.backoff import backoff_seconds, jittered
from kvist_kube.connection import Answer
from kvist_operator.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotServed,
    QuotaExceeded,
    Refused,
    Unavailable,
)

from .kinds import ObjectKind, Target

Json = dict[str, Any]
UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 10.0
ATTEMPTS: Final = 5
"""Attempts of one request; then its pool is retried later, and others continue."""
MAX_MESSAGE: Final = 1500
_UNDECLARED: Final = "field not declared in schema"
_RIGHTS: Final = (" cannot ", "attempting to grant RBAC permissions not currently held")
"""Texts that distinguish the authorizer's 403 from that of quotas and admission."""


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


def error_of(answer: Answer, *, doing: str, kind: ObjectKind, verb: str) -> ClusterError:
    """Return the error of an answer whose status is not 200 to 299."""
    message = status_message(answer.body) or f"status {answer.status}"
    made, remedy = _classify(answer.status, message, kind, verb)
    text = f"{doing}: {message}" + (f"; {remedy}" if remedy else "")
    return made(text, answer.status, retry_after=answer.retry_after)


def status_message(body: bytes) -> str:
    """Return the message of a ``Status`` object; the text itself when it is not one."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:MAX_MESSAGE]
    message = document.get("message") if isinstance(document, dict) else None
    return str(message or "")[:MAX_MESSAGE]


def _classify(status: int, message: str, kind: ObjectKind, verb: str) -> tuple[type[ClusterError], str]:
    if status == 403 and "exceeded quota" in message:
        return QuotaExceeded, "raise the ResourceQuota of the namespace, or let the pool request less"
    if status == UNAUTHORIZED:
        return Forbidden, "the API server rejects the operator's token: it is unknown or has expired"
    if status == 403 and any(sign in message for sign in _RIGHTS):
        rule = f'apiGroups: ["{kind.group}"], resources: ["{kind.plural}"], verbs: ["{verb}"]'
        return Forbidden, f"the operator's service account needs a rule with {rule} (docs/guides/operator.md)"
    if _UNDECLARED in message:  # status 500: server-side apply of a field that the kind's schema lacks
        return (
            Refused,
            f"the cluster's {kind.resource} is older or newer than the operator expects: upgrade it",
        )
    if status in (400, 403, 413, 422):
        return Refused, "change the pool's spec, or the policy that rejects it"
    if status == NOT_FOUND:
        return (
            NotServed,
            f"check that {kind.resource} {kind.version} is installed and that the namespace exists",
        )
    if status == 409:
        return Conflict, ""
    return Unavailable, ""


def retry_pause(error: ClusterError, attempt: int, chance: Callable[[], float]) -> float | None:
    """Return the seconds to wait after the ``attempt``-th attempt (1 is the first); None if it was the last.

    ``chance`` returns a random number from 0 to 1, which shortens the pause to no less than half.
    """
    if not isinstance(error, Unavailable) or attempt >= ATTEMPTS:
        return None
    wait = jittered(backoff_seconds(attempt, first=FIRST_SECONDS, longest=LONGEST_SECONDS), chance())
    return max(wait, min(error.retry_after, LONGEST_SECONDS))
