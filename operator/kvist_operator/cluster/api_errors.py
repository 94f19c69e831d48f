"""Meaning of the API server's failures, and pauses between attempts. Pure.

The message of an error says what was being done, has the server's own message and the remedy; it becomes the
message of a condition.
"""

import json
from collections.abc import Callable
from typing import Any, Final

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

from .kinds import ObjectKind

UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 10.0
ATTEMPTS: Final = 5
"""Attempts of one request; then its pool is retried later, and others continue."""
MAX_MESSAGE: Final = 1500
_RIGHTS: Final = (" cannot ", "attempting to grant RBAC permissions not currently held")
"""Texts that distinguish the authorizer's 403 from that of quotas and admission."""


def error_of(answer: Answer, *, doing: str, kind: ObjectKind, verb: str) -> ClusterError:
    """Return the error of an answer whose status is not 200 to 299."""
    status = answer.status
    message = status_message(answer.body) or f"status {status}"
    made, remedy = _classify(status, message, kind, verb)
    text = f"{doing}: {message}" + (f"; {remedy}" if remedy else "")
    return made(text, status, retry_after=answer.retry_after)


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
        return Forbidden, _grant(kind, verb)
    if status in (400, 403, 413, 422):
        return Refused, "change the pool's spec, or the policy that rejects it"
    if status == NOT_FOUND:
        return NotServed, f"is {kind.resource} {kind.version} installed, and does the namespace exist?"
    if status == 409:
        return Conflict, ""
    return Unavailable, ""


def _grant(kind: ObjectKind, verb: str) -> str:
    rule = f'apiGroups: ["{kind.group}"], resources: ["{kind.plural}"], verbs: ["{verb}"]'
    return f"the operator's service account needs a rule with {rule} (docs/guides/operator.md)"


def retry_pause(error: ClusterError, attempt: int, chance: Callable[[], float]) -> float | None:
    """Return the seconds to wait after the ``attempt``-th attempt (1 is the first); None to give up.

    ``chance`` returns a random number from 0 to 1, which shortens the pause to no less than half.
    """
    if not isinstance(error, Unavailable) or attempt >= ATTEMPTS:
        return None
    wait = jittered(backoff_seconds(attempt, first=FIRST_SECONDS, longest=LONGEST_SECONDS), chance())
    return max(wait, min(error.retry_after, LONGEST_SECONDS))
