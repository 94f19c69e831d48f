"""What an answer of the API server means, and whether to ask again. Pure.

The message of an error says what was being done, has the server's own words, and what to do about it: it
becomes the message of a condition.
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

from .kinds import Kind

UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 10.0
ATTEMPTS: Final = 5
"""Of one call; then its pool waits, and others go on."""
MAX_WORDS: Final = 1500
_RIGHTS: Final = (" cannot ", "attempting to grant RBAC permissions not currently held")
"""How the authorizer says no, beside those who say the same with the same status: quotas, admission."""


def failure(answer: Answer, *, doing: str, kind: Kind, verb: str) -> ClusterError:
    """Return the error of an answer whose status is not 200 to 299."""
    status = answer.status
    words = said(answer.body) or f"status {status}"
    made, remedy = _judged(status, words, kind, verb)
    text = f"{doing}: {words}" + (f"; {remedy}" if remedy else "")
    return made(text, status, retry_after=answer.retry_after)


def said(body: bytes) -> str:
    """The message of a ``Status``, or the text that came instead."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:MAX_WORDS]
    message = document.get("message") if isinstance(document, dict) else None
    return str(message or "")[:MAX_WORDS]


def _judged(status: int, words: str, kind: Kind, verb: str) -> tuple[type[ClusterError], str]:
    if status == 403 and "exceeded quota" in words:
        return QuotaExceeded, "raise the ResourceQuota of the namespace, or let the pool ask for less"
    if status == UNAUTHORIZED:
        return Forbidden, "the API server does not know the operator's token, or it has expired"
    if status == 403 and any(sign in words for sign in _RIGHTS):
        return Forbidden, _grant(kind, verb)
    if status in (400, 403, 413, 422):
        return Refused, "change the pool's spec, or what refuses it"
    if status == NOT_FOUND:
        return NotServed, f"is {kind.resource} {kind.version} installed, and the namespace there?"
    if status == 409:
        return Conflict, ""
    return Unavailable, ""


def _grant(kind: Kind, verb: str) -> str:
    rule = f'apiGroups: ["{kind.group}"], resources: ["{kind.plural}"], verbs: ["{verb}"]'
    return f"the operator's service account needs a rule with {rule} (docs/guides/operator.md)"


def pause(error: ClusterError, attempt: int, chance: Callable[[], float]) -> float | None:
    """Seconds until the next attempt, after the ``attempt``-th (1 the first); None = give up.

    Doubled each time, by chance shortened to no less than half. ``chance``: 0 to 1.
    """
    if not isinstance(error, Unavailable) or attempt >= ATTEMPTS:
        return None
    wait = jittered(backoff_seconds(attempt, first=FIRST_SECONDS, longest=LONGEST_SECONDS), chance())
    return max(wait, min(error.retry_after, LONGEST_SECONDS))
