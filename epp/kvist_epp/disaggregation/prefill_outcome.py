"""Reasons why leg 1 has left nothing to fetch. Pure."""

from enum import Enum

from kvist_epp.endpoints.engine_key import UNAUTHORIZED, is_final_refusal


class PrefillFailure(Enum):
    """Why leg 1 has left nothing to fetch."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMEOUT = "timeout"
    ERROR = "error"
    """Status 5xx, 408 or 429."""
    REFUSED = "refused"
    """Another status 4xx: the engine that answers will refuse the request, too."""
    DENIED = "denied"
    """The engine requires an API key, or another one."""
    NOTHING = "nothing"
    """An answer without blocks: the engine has no connector, or the prompt has less than a block."""


def failure_of(status: int) -> PrefillFailure | None:
    """Return the failure that an HTTP status stands for; None: it is none."""
    if status == 200:
        return None
    if status in UNAUTHORIZED:
        return PrefillFailure.DENIED
    return PrefillFailure.REFUSED if is_final_refusal(status) else PrefillFailure.ERROR
