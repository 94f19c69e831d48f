"""Reads a mapping field by field: types, bounds, choices; errors name the path, typos get a suggestion."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from kvist_kube.quantity import parse_bytes
from kvist_operator.errors import SpecError

MOST_BYTES: Final = 2**63 - 1024
"""A little below what 64 bits hold: a fraction of it is rounded."""
MOST_CHARACTERS: Final = 1024
"""Of a string, unless its field says otherwise."""


class Fields:
    """One object of the spec; ``done`` rejects fields that were not read."""

    def __init__(self, raw: Any, path: str) -> None:
        if not isinstance(raw, Mapping):
            raise SpecError(path, f"is {_kind(raw)}, not an object")
        self._raw = raw
        self._seen: set[str] = set()
        self.path = path

    def at(self, key: str) -> str:
        """The path of a field, for messages."""
        return f"{self.path}.{key}"

    def get(self, key: str) -> Any:
        """The raw value; None when absent or null."""
        self._seen.add(key)
        return self._raw.get(key)

    def text(
        self,
        key: str,
        default: str = "",
        *,
        choices: Sequence[str] = (),
        pattern: str = "",
        most: int = MOST_CHARACTERS,
    ) -> str:
        """A string, one of the choices, or one that fits the pattern as a whole; ``most`` characters."""
        value = self.get(key)
        if value is None:
            return default
        if choices and isinstance(value, str) and value not in choices:
            raise SpecError(
                self.at(key), f"{value!r} is not one of {', '.join(choices)}{_near(value, choices)}"
            )
        return text_of(value, self.at(key), pattern=pattern, most=most)

    def required(self, key: str, hint: str, *, pattern: str = "", most: int = MOST_CHARACTERS) -> str:
        """A string that must be there."""
        if self.get(key) in (None, ""):
            raise SpecError(self.at(key), f"is missing: {hint}")
        return self.text(key, pattern=pattern, most=most)

    def whole(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """A whole number within bounds; None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(self.at(key), f"is {_kind(value)}, not a whole number")
        if not low <= value <= high:
            raise SpecError(self.at(key), f"{value} is not within {low} and {high}")
        return value

    def number(self, key: str, default: int, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """Return a field's value, or the default if it is absent."""
        value = self.whole(key, low=low, high=high)
        return default if value is None else value

    def switch(self, key: str, default: bool) -> bool:
        """``Enabled`` or ``Disabled``."""
        value = self.text(key, choices=("Enabled", "Disabled"))
        return default if not value else value == "Enabled"

    def quantity(self, key: str, *, low: int = 0) -> int:
        """A Kubernetes quantity in bytes: ``80Gi``, ``1.5Ti``, a number; 0 when absent. What is below ``low``
        has lost its unit."""
        value = self.get(key)
        found = 0 if value is None else bytes_of(value, self.at(key))
        if value is not None and found < low:
            raise SpecError(self.at(key), f"{value!r} is {found} bytes: write it like 80Gi")
        return found

    def section(self, key: str) -> Self:
        """An object; an absent one is empty."""
        value = self.get(key)
        return type(self)({} if value is None else value, self.at(key))

    def optional(self, key: str) -> Self | None:
        """An object; None when absent."""
        return None if self.get(key) is None else self.section(key)

    def items(self, key: str, *, most: int) -> list[Any]:
        """A list, bounded."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(self.at(key), f"is {_kind(value)}, not a list")
        if len(value) > most:
            raise SpecError(self.at(key), f"has {len(value)} entries; at most {most}")
        return value

    def sections(self, key: str, *, most: int) -> list[Self]:
        """A list of objects."""
        return [type(self)(v, f"{self.at(key)}[{i}]") for i, v in enumerate(self.items(key, most=most))]

    def texts(
        self, key: str, *, most: int, each: int = MOST_CHARACTERS, pattern: str = ""
    ) -> tuple[str, ...]:
        """A list of strings of at most ``each`` characters."""
        found = enumerate(self.items(key, most=most))
        return tuple(text_of(v, f"{self.at(key)}[{i}]", pattern=pattern, most=each) for i, v in found)

    def free(self, key: str) -> Mapping[str, Any]:
        """An object whose fields are not ours."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(self.at(key), f"is {_kind(value)}, not an object")
        return value or {}

    def done(self) -> None:
        """Raise SpecError for the first field that was not read."""
        unknown = [key for key in self._raw if key not in self._seen]
        if unknown:
            name = str(unknown[0])
            raise SpecError(self.at(name), f"unknown field{_near(name, sorted(self._seen))}")


def text_of(value: Any, path: str, *, pattern: str = "", most: int = MOST_CHARACTERS) -> str:
    """A string within bounds. Raises SpecError."""
    if not isinstance(value, str):
        raise SpecError(path, f"is {_kind(value)}, not a string")
    if len(value) > most:
        raise SpecError(path, f"has {len(value)} characters; at most {most}")
    if pattern and not re.fullmatch(pattern, value):
        raise SpecError(path, f"{value!r} does not fit {pattern}")
    return value


def bytes_of(value: Any, path: str) -> int:
    """Return the bytes of a Kubernetes quantity. Raises SpecError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES:
        return value
    try:
        found = parse_bytes(value) if isinstance(value, str) and not value.endswith(("E", "Ei")) else None
    except ValueError:
        found = None
    if found is None:
        raise SpecError(path, f"{value!r:.40} is no quantity of bytes; write it like 80Gi")
    if found > MOST_BYTES:
        raise SpecError(path, f"{value!r:.40} is more than Kubernetes can count: write it like 80Gi")
    return found


def _near(word: str, known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"; did you mean {lower[close[0]]}?" if close else ""


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a fraction", list: "a list"}
    if value is None:
        return "null"
    return "an object" if isinstance(value, Mapping) else names.get(type(value), f"a {type(value).__name__}")
