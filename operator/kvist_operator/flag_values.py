"""Values of vLLM's flags: what its parser refuses, in a sentence. Pure."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from .flag_table import Flag

VARIABLE: Final = "$("
"""Kubernetes replaces ``$(NAME)`` in arguments, so a value with it is not checked."""
FORMATS: Final = {
    "int": ("a whole number such as 8", re.compile(r"[+-]?\d+")),
    "float": ("a number such as 0.5", re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")),
    "size": ("a number such as 8192 or 8k", re.compile(r"-?\d+|\d+[KMGT]|\d+(\.\d+)?[kmgt]")),
}


def value_problem(flag: Flag, value: str, *, separate: bool) -> str:
    """Return why a value is not of the flag's format; empty if it is.

    ``separate``: the value is a word of its own, not behind ``=``.
    """
    if VARIABLE in value or (flag.none and value in ("", "None")):
        return ""
    if separate and re.fullmatch(r"-\d*\.\d+", value):
        return f"vLLM takes {value!r} for a flag: write --{flag.name}={value}"
    if flag.kind in FORMATS:
        name, pattern = FORMATS[flag.kind]
        return "" if pattern.fullmatch(value.strip()) else f"{value!r} is not {name}"
    return _json_problem(flag, value) if flag.kind in ("json", "object") else ""


def _json_problem(flag: Flag, value: str) -> str:
    try:
        found = read_json(value) if flag.kind == "object" else json.loads(value)
    except ValueError:
        return f"{value!r:.60} is not JSON; quote keys and texts with double quotes"
    if flag.kind == "object" and not isinstance(found, dict):
        return f"{value!r:.60} is not a JSON object; write its keys in braces"
    return ""


def key_problem(flag: Flag, keys: Iterable[str]) -> str:
    """Return which key an object does not have, with the nearest; empty if it has all."""
    for key in keys:
        if flag.keys and key not in flag.keys:
            close = difflib.get_close_matches(key, flag.keys, n=1)
            return f"{key!r} is not one of its keys" + (f"; did you mean {close[0]}?" if close else "")
    return ""


def read_json(text: str) -> Any:
    """Return a JSON value in which numbers may have a suffix: ``{"a": 8k}``, as vLLM reads its objects.

    Raises:
        ValueError: the text is not JSON.
    """
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    plain = (
        part if i % 2 else re.sub(r"(\d+(\.\d+)?)[kKmMgGtT]\b", r"\1", part) for i, part in enumerate(parts)
    )
    return json.loads("".join(plain))


def absent_value(flag: Flag, value: str) -> str:
    """Return which choice, or key of an object, this version does not have; empty if it has all."""
    if flag.kind == "object" and VARIABLE not in value and not (flag.none and value in ("", "None")):
        return key_problem(flag, read_json(value))
    return choice_problem(flag, value)


def choice_problem(flag: Flag, value: str) -> str:
    """Return why a value is not one of a flag's choices, with the nearest; empty if it is."""
    if not flag.choices or VARIABLE in value or (flag.none and value in ("", "None")):
        return ""
    spellings = {value} | ({value.upper(), value.lower().replace("-", "_")} if flag.folds else set())
    if spellings & set(flag.choices):
        return ""
    lower = {choice.lower(): choice for choice in flag.choices}
    close = difflib.get_close_matches(value.lower(), lower, n=1)
    few = ", ".join(sorted(flag.choices, key=lambda c: (c.isdigit() and int(c), c)))
    listed = (
        f"it is one of {few}"
        if len(flag.choices) <= 12
        else f"leave it out, or use one of the {len(flag.choices)} of vLLM"
    )
    return f"{value!r} is not a choice; " + (f"did you mean {lower[close[0]]}?" if close else listed)
