"""Reference of a pool's conditions and their reasons, read in the code that gives them."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from tests.reference.markdown import code, page, prose, table

import kvist_operator
from kvist_operator.errors import OperatorError
from kvist_operator.status import status_builder
from kvist_operator.status.diagnosis import ORDER

PACKAGE: Final = Path(kvist_operator.__file__).parent
GUIDE: Final = "../guides/troubleshooting.md"
CALLS: Final = {"Condition": (0, 2), "Note": (0, 1)}
"""Positions of type and reason in the calls that make a condition."""


def conditions() -> str:
    """Return the page of conditions and reasons."""
    return page(
        "Conditions and reasons",
        "kvist_operator.status and kvist_operator.errors",
        "Conditions of an InferencePool, in `status.conditions`. A message names the field to change. "
        f"[Troubleshooting]({GUIDE}) says for each reason what it means and what to do.",
        "## Conditions",
        table(("condition", "meaning", "reasons given by the operator"), _conditions()),
        "`Progressing` and `Ready` also take the reason of an error or of a pod, from the tables below; "
        "`GatewayAttached` that of the gateway.",
        "## Reasons of errors",
        table(("reason", "what the message is about"), _errors()),
        "## Reasons of pods",
        "A pod that does not run gives one of these to `Progressing` (engines), `Ready` (pickers) or "
        "`GatewayAttached` (Envoys). "
        "If several apply, the first of this list is shown:",
        "\n".join(f"{number}. {code(reason)}" for number, reason in enumerate(ORDER, 1)),
    )


def _conditions() -> Iterator[tuple[str, str, str]]:
    reasons = _reasons()
    for names, text in re.findall(r"^- ([\w, ]+): (.*?)\.$", status_builder.__doc__ or "", re.MULTILINE):
        for name in names.split(", "):
            shown = ", ".join(code(reason) for reason in dict.fromkeys(reasons[name]))
            yield code(name), prose(text), shown or "those of errors and pods"


def _reasons() -> dict[str, list[str]]:
    """Return the reasons that are literals where conditions and notes are made, by condition."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for kind, reason in _calls(function):
                    names = _assigned(function)
                    for condition in _texts(kind, module, names):
                        found[condition] += _texts(reason, module, names)
    return found


def _calls(function: ast.FunctionDef) -> Iterator[list[ast.expr]]:
    """Yield type and reason of each condition and note that a function makes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield [node.args[at] for at in CALLS[node.func.id]]


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return what a function assigns to its names."""
    names: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id].append(node.value)
    return names


def _texts(node: ast.expr, module: ModuleType, names: Mapping[str, list[ast.expr]]) -> list[str]:
    """Return the texts of an expression: literals, both of a conditional, and names that stand for one."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, module, names), *_texts(node.orelse, module, names)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if not isinstance(node, ast.Name):
        return []
    value = getattr(module, node.id, None)
    if isinstance(value, str):
        return [value]
    return [text for assigned in names.get(node.id, ()) for text in _texts(assigned, module, {})]


def _errors() -> Iterator[tuple[str, str]]:
    """Yield each reason of an exception once, with the text of the first class that has it."""
    texts: dict[str, str] = {}
    for kind in _classes(OperatorError):
        texts.setdefault(kind.reason, inspect.getdoc(kind) or "")
    for reason, text in texts.items():
        yield code(reason), prose(text)


def _classes(kind: type[OperatorError]) -> Iterator[type[OperatorError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _classes(below)
