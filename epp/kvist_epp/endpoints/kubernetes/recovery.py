"""What to do when a list or a watch failed. Pure.

The pauses double up to ten seconds, each by chance shortened to no less than half: a thousand pickers do
not come back to a restarted API server at once, and a change made while it was away is seen ten seconds
later at most."""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvist_epp.errors import ApiError

FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 10.0
GONE: Final = 410
"""The version, or a list's next page, is too old (Kubernetes API concepts, "410 Gone responses")."""
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404


class Recovery(NamedTuple):
    """How to go on."""

    pause: float
    """Seconds."""
    relist: bool
    """Whether the version is of no use any more."""


def recovery(error: ApiError, failures: int, chance: Callable[[], float]) -> Recovery:
    """After the ``failures``-th failure in a row, 1 the first. ``chance``: 0 to 1.

    An answer other than 401 and 429 to a watch says that it will not go on from its version: forbidden to
    watch but not to list, for example, a list every ten seconds is what is left. Without an answer the
    version still stands."""
    at_once = error.status in (GONE, UNAUTHORIZED) and failures == 1
    pause = 0.0 if at_once else _pause(failures) * (0.5 + 0.5 * chance())
    relist = error.status not in (0, UNAUTHORIZED, 429)
    return Recovery(max(pause, error.retry_after), relist)


def _pause(failures: int) -> float:
    return float(min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(failures - 1, 10)))
