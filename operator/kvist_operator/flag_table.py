"""Every flag of ``vllm serve``, by version, as vLLM's own parser declares it.

``engine_flags.json`` is written by ``python -m tests.engine.flags``, which builds the parser of each version
(the CPU build of 0.30 to 0.32, the CUDA wheel of 0.33). A flag has a row for each run of versions in which
it is the same.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

Version = tuple[int, int]
FILE: Final = "engine_flags.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of one version."""

    name: str
    """Without dashes in front."""
    kind: str
    """Format of the value: switch (none), text, int, float, size (``64k``), json, object (of JSON) or
    json-or-text."""
    takes: str = ""
    """How many values, if not one: ``many``, ``maybe`` (none or one), ``each`` (the flag may be repeated)."""
    none: bool = False
    """The value may be ``None``."""
    also: tuple[str, ...] = ()
    """Other spellings, with their dashes."""
    off: tuple[str, ...] = ()
    """Spellings that switch the flag off."""
    choices: tuple[str, ...] = ()
    """All values there are; empty if any is accepted. Those of parsers of tool calls and reasoning can be
    extended by a plugin."""
    keys: tuple[str, ...] = ()
    """Keys of an object that refuses others."""
    folds: bool = False
    """Choices are compared without case."""


@cache
def _file() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(
        resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    )
    return found


def _version(text: str) -> Version:
    major, minor = text.split(".")
    return int(major), int(minor)


VERSIONS: Final[tuple[Version, ...]] = tuple(map(_version, _file()["versions"]))
"""Versions whose flags and memory arithmetic are known, the oldest first."""
LATEST: Final = VERSIONS[-1]


def dotted(version: Version) -> str:
    """Return a version as text: ``0.33``."""
    return ".".join(map(str, version))


@cache
def flags(version: Version) -> Mapping[str, Flag]:
    """Return the flags of a known version by name."""
    found = {}
    for name, rows in _file()["flags"].items():
        for row in rows:
            if _version(row["first"]) <= version <= _version(row["last"]):
                found[name] = _flag(name, row)
    return found


def _flag(name: str, row: Mapping[str, Any]) -> Flag:
    given = {key: value for key, value in row.items() if key not in ("first", "last")}
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return Flag(name=name, **fields)


@cache
def options(version: Version) -> Mapping[str, Flag]:
    """Return the flags of a known version by every spelling, dashes included."""
    every = flags(version).values()
    return {text: flag for flag in every for text in (f"--{flag.name}", *flag.also, *flag.off)}


@cache
def short_options() -> Mapping[str, str]:
    """Return the names of flags by their short spellings (``tp``), of all versions."""
    spelled = ((text, flag) for version in VERSIONS for text, flag in options(version).items())
    return {text[1:]: flag.name for text, flag in spelled if not text.startswith("--")}


def versions_with(option: str) -> list[Version]:
    """Return the known versions that have a spelling."""
    return [version for version in VERSIONS if option in options(version)]


def nearest_version(version: Version | None) -> Version:
    """Return the known version whose flags are used for a version: the newest that is not newer, the oldest
    for older ones, the newest if the version is not known."""
    older: Iterable[Version] = (known for known in VERSIONS if version is None or known <= version)
    return max(older, default=VERSIONS[0])
