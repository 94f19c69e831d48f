"""Typed reader of one object of the spec, and readers of the parts that Kubernetes defines. Pure.

Errors name the path of the field; for a misspelled field or value they suggest the nearest one that exists.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from kvist_kube.quantity import parse_bytes
from kvist_operator.errors import SpecError

from .pool import SecretKey

MAX_BYTES: Final = 2**63 - 1024
"""A little less than 64 bits hold, because a fraction of it is rounded."""
MAX_LENGTH: Final = 1024
"""Characters of a string whose field has no other limit."""
NAME_LENGTH: Final = 253
"""Characters of a Kubernetes name."""
OBJECT_NAME: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""A Kubernetes name: labels of a host name."""
VARIABLE: Final = r"[-._A-Za-z][-._A-Za-z0-9]*"
SECRET_KEY: Final = r"[-._a-zA-Z0-9]+"
AMOUNT: Final = r"[0-9]+(\.[0-9]+)?([KMGTP]i|[numkMGTP])?"
ENABLED: Final = ("Enabled", "Disabled")
T = TypeVar("T")


class Fields:
    """One object of the spec. ``done`` rejects fields that were not read; methods raise SpecError."""

    def __init__(self, raw: Any, path: str) -> None:
        if not isinstance(raw, Mapping):
            raise SpecError(path, f"is {type_name(raw)}, not an object")
        self._raw = raw
        self._read: set[str] = set()
        self.path = path

    def at(self, key: str) -> str:
        """Return the path of a field, for messages."""
        return f"{self.path}.{key}"

    def get(self, key: str) -> Any:
        """Return the raw value; None when absent or null."""
        self._read.add(key)
        return self._raw.get(key)

    def text(
        self,
        key: str,
        default: str = "",
        *,
        choices: Sequence[str] = (),
        pattern: str = "",
        like: str = "",
        most: int = MAX_LENGTH,
    ) -> str:
        """Return a string of at most ``most`` characters, one of the choices or a match of the pattern, of
        which ``like`` is an example."""
        value = self.get(key)
        if value is None:
            return default
        if choices and isinstance(value, str) and value not in choices:
            listed = ", ".join(choices)
            raise SpecError(self.at(key), f"{value!r} is not one of {listed}{suggestion(value, choices)}")
        return text_of(value, self.at(key), pattern=pattern, like=like, most=most)

    def required(
        self, key: str, hint: str, *, pattern: str = "", like: str = "", most: int = MAX_LENGTH
    ) -> str:
        """Return a string that must not be absent or empty."""
        if self.get(key) in (None, ""):
            raise SpecError(self.at(key), f"is missing: {hint}")
        return self.text(key, pattern=pattern, like=like, most=most)

    def whole(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """Return a whole number within bounds; None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            problem = f"is {type_name(value)}, not a whole number: write it like 8, without quotes or unit"
            raise SpecError(self.at(key), problem)
        if not low <= value <= high:
            raise SpecError(self.at(key), f"{value} is not within {low} and {high}")
        return value

    def number(self, key: str, default: int, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """Return a whole number within bounds; the default when absent."""
        value = self.whole(key, low=low, high=high)
        return default if value is None else value

    def switch(self, key: str, default: bool) -> bool:
        """Return whether the value is ``Enabled`` (and not ``Disabled``)."""
        value = self.text(key, choices=ENABLED)
        return value == "Enabled" if value else default

    def boolean(self, key: str) -> bool:
        """Return a field that is true or false; false if it is absent."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise SpecError(self.at(key), f"{value!r} is neither true nor false")
        return value

    def quantity(self, key: str, *, low: int = 0) -> int:
        """Return a Kubernetes quantity (``80Gi``, ``1.5Ti``, a number) in bytes; 0 when absent.

        A value below ``low`` is taken for one whose unit is missing.
        """
        value = self.get(key)
        found = 0 if value is None else bytes_of(value, self.at(key))
        if value is not None and found < low:
            raise SpecError(self.at(key), f"{value!r} is {found} bytes: write it like 80Gi")
        return found

    def section(self, key: str) -> Self:
        """Return an object; an absent one is empty."""
        value = self.get(key)
        return type(self)({} if value is None else value, self.at(key))

    def optional(self, key: str) -> Self | None:
        """Return an object; None when absent."""
        return None if self.get(key) is None else self.section(key)

    def items(self, key: str, *, most: int) -> list[Any]:
        """Return a list of at most ``most`` entries; an absent one is empty."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(self.at(key), f"is {type_name(value)}, not a list")
        if len(value) > most:
            raise SpecError(self.at(key), f"has {len(value)} entries; at most {most}")
        return value

    def sections(self, key: str, *, most: int) -> list[Self]:
        """Return a list of objects."""
        return [type(self)(v, f"{self.at(key)}[{i}]") for i, v in enumerate(self.items(key, most=most))]

    def texts(self, key: str, *, most: int, each: int, pattern: str = "", like: str = "") -> tuple[str, ...]:
        """Return a list of strings of at most ``each`` characters."""
        found = enumerate(self.items(key, most=most))
        return tuple(
            text_of(v, f"{self.at(key)}[{i}]", pattern=pattern, like=like, most=each) for i, v in found
        )

    def free(self, key: str) -> Mapping[str, Any]:
        """Return an object whose fields are not checked; an absent one is empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(self.at(key), f"is {type_name(value)}, not an object")
        return value or {}

    def done(self, record: T) -> T:
        """Return the record that was read from these fields, if no field is left that was not read."""
        for key in self._raw:
            if key not in self._read:
                known = sorted(self._read)
                few = f": use {' or '.join(known)}" if 0 < len(known) <= 4 else ": leave it out"
                near = suggestion(str(key), known) or few
                raise SpecError(self.at(str(key)), f"unknown field{near}")
        return record


def check_unique(names: Sequence[str], path: str, why: str) -> None:
    """Raise SpecError for a name that occurs twice; ``why`` says what the names are for."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise SpecError(path, f"{twice!r} occurs twice; {why}")


def text_of(value: Any, path: str, *, pattern: str = "", like: str = "", most: int = MAX_LENGTH) -> str:
    """Return a value that is a string within bounds. Raises SpecError."""
    if not isinstance(value, str):
        quote = ": put it in quotes" if isinstance(value, bool | int | float) else ": write a string"
        raise SpecError(path, f"is {type_name(value)}, not a string{quote}")
    if len(value) > most:
        raise SpecError(path, f"has {len(value)} characters; at most {most}")
    if pattern and not re.fullmatch(pattern, value):
        form = f": write it like {like}" if like else f" {pattern}: write it in that form"
        raise SpecError(path, f"{value!r} does not match{form}")
    return value


def bytes_of(value: Any, path: str) -> int:
    """Return the bytes of a Kubernetes quantity. Raises SpecError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES:
        return value
    try:
        found = parse_bytes(value) if isinstance(value, str) and not value.endswith(("E", "Ei")) else None
    except ValueError:
        found = None
    if found is None:
        raise SpecError(path, f"{value!r:.40} is not a quantity of bytes; write it like 80Gi")
    if found > MAX_BYTES:
        raise SpecError(path, f"{value!r:.40} is more than Kubernetes can represent: write it like 80Gi")
    return found


def suggestion(word: str, known: Sequence[str], likeness: float = 0.6) -> str:
    """Return ``; did you mean …?`` with the nearest of the known names; empty if none is near."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=likeness)
    return f"; did you mean {lower[close[0]]}?" if close else ""


def type_name(value: Any) -> str:
    """Return the type of a value as YAML calls it, with its article."""
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a fraction", list: "a list"}
    if value is None:
        return "null"
    return "an object" if isinstance(value, Mapping) else names.get(type(value), f"a {type(value).__name__}")


def read_secret(f: Fields | None, default: str = "token") -> SecretKey | None:
    """Return one key of a Secret; None when absent. ``default``: the key if none is named."""
    if f is None:
        return None
    name = f.required("name", "the Secret's name", most=NAME_LENGTH)
    return f.done(SecretKey(name=name, key=f.text("key", default, most=NAME_LENGTH, pattern=SECRET_KEY)))


def read_env(f: Fields) -> Mapping[str, Any]:
    """Return one entry of a container's ``env``."""
    name = f.required("name", "the variable's name", pattern=VARIABLE, most=128)
    value, source = f.get("value"), _value_source(f.optional("valueFrom"))
    if value is not None and source is not None:
        raise SpecError(f.path, "value and valueFrom exclude each other: leave one out")
    text = f.text("value", most=8192)
    return f.done({"name": name, "value": text} if source is None else {"name": name, "valueFrom": source})


def _value_source(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    found = {
        "secretKeyRef": _key_reference(f.optional("secretKeyRef")),
        "configMapKeyRef": _key_reference(f.optional("configMapKeyRef")),
        "fieldRef": _field_reference(f.optional("fieldRef")),
    }
    given = f.done({key: value for key, value in found.items() if value is not None})
    if len(given) != 1:
        raise SpecError(f.path, f"needs exactly one of {', '.join(found)}")
    return given


def _field_reference(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    return f.done({"fieldPath": f.required("fieldPath", "such as status.podIP", most=NAME_LENGTH)})


def _key_reference(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    name, key = (f.required(k, f"the {k} of the object", most=NAME_LENGTH) for k in ("name", "key"))
    optional = f.get("optional")
    if optional is not None and not isinstance(optional, bool):
        raise SpecError(f.at("optional"), "is neither true nor false")
    return f.done({"name": name, "key": key, **({} if optional is None else {"optional": optional})})


def read_resources(f: Fields) -> Mapping[str, Any]:
    """Return ``requests`` and ``limits`` of a container."""
    found = {key: f.free(key) for key in ("requests", "limits")}
    for key, amounts in found.items():
        if len(amounts) > 8:
            raise SpecError(f.at(key), f"has {len(amounts)} entries; at most 8")
        for name, value in amounts.items():
            if isinstance(value, bool | float) or not re.fullmatch(AMOUNT, str(value)):
                problem = f"{value!r} is not a quantity; write it like 500m or 2Gi"
                raise SpecError(f"{f.at(key)}.{name}", problem)
    return f.done({key: dict(amounts) for key, amounts in found.items() if amounts})


def read_parent(f: Fields) -> Mapping[str, Any]:
    """Return a ParentReference of the Gateway API."""
    found = {
        "group": f.text("group", most=NAME_LENGTH),
        "kind": f.text("kind", most=63),
        "namespace": f.text("namespace", most=63),
        "name": f.required("name", "the Gateway's name", most=NAME_LENGTH),
        "sectionName": f.text("sectionName", most=NAME_LENGTH),
        "port": f.whole("port", high=65_535),
    }
    return f.done({key: value for key, value in found.items() if value})
