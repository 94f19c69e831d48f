"""Tenant and priority of a request, from its headers. Pure, and standard library only.

A priority is a whole number: higher goes first, below 0 is shed first, and 0 is the default. It is given by
``x-kvist-priority``, or by the name of an objective.
"""

from collections.abc import Callable, Mapping
from typing import Final

from kvist_epp.errors import BadRequest, SettingsError
from kvist_epp.names import OBJECTIVE_HEADERS, PRIORITY_HEADER, TENANT_HEADERS

MAX_PRIORITY: Final = 2**31 - 1
"""Priorities are 32-bit integers, as an InferenceObjective's."""
MAX_TENANT: Final = 128
"""Characters of a tenant's name that count."""

_PRIORITIES: Final = frozenset((PRIORITY_HEADER, *OBJECTIVE_HEADERS))
_TENANTS: Final = frozenset(TENANT_HEADERS)
_SHOWN: Final = 40


def nobody(_name: str) -> int | None:
    """Knows no objective."""
    return None


class Priorities:
    """Priorities by the names of objectives."""

    __slots__ = ("_named", "objectives")

    def __init__(self, named: Mapping[str, int] | None = None) -> None:
        """``named``: those of ``--priorities``, which come before those of ``objectives``."""
        self._named = dict(named or {})
        self.objectives: Callable[[str], int | None] = nobody
        """The priority of an InferenceObjective of the pool; None: there is none of this name."""

    def of(self, headers: Mapping[str, str]) -> int | None:
        """The priority that a request names; None when it names none. An unknown objective has priority 0.

        Raises ``BadRequest`` for a priority that is no whole number.
        """
        if _PRIORITIES.isdisjoint(headers):
            return None
        text = headers.get(PRIORITY_HEADER)
        if text is not None:
            return _number(text)
        for header in OBJECTIVE_HEADERS:
            if (name := headers.get(header)) is not None:
                return self._objective(name.strip())
        return None

    def _objective(self, name: str) -> int:
        known = self._named.get(name)
        if known is None:
            known = self.objectives(name)
        return known or 0


def tenant(headers: Mapping[str, str]) -> str:
    """Return the tenant of a request by its headers; empty: they name none."""
    if _TENANTS.isdisjoint(headers):
        return ""
    for header in TENANT_HEADERS:
        if name := headers.get(header, "").strip():
            return name[:MAX_TENANT]
    return ""


def engine_priority(priority: int) -> str:
    """Return the priority as vLLM has it: a lower number goes first."""
    return str(-priority)


def named_priorities(text: str) -> dict[str, int]:
    """``name=int,…`` as ``--priorities`` has it. Raises ``SettingsError``."""
    found: dict[str, int] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, equals, number = (part.strip() for part in entry.rpartition("="))
        value = _whole(number)
        if not (name and equals) or value is None:
            raise SettingsError(f"--priorities: {entry!r} is not name=number, such as batch=-1")
        if name in found:
            raise SettingsError(f"--priorities: {name!r} occurs twice")
        found[name] = value
    return found


def _number(text: str) -> int:
    value = _whole(text.strip(" \t"))  # optional whitespace of RFC 9110, no other
    if value is None:
        limits = f"between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        raise BadRequest(
            f"header {PRIORITY_HEADER}: {text[:_SHOWN]!r} is not a whole number {limits}",
            reason="bad-priority",
        )
    return value


def _whole(text: str) -> int | None:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        return None
    value = int(text)
    return value if abs(value) <= MAX_PRIORITY else None
