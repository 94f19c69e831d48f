"""Metrics and labels that an expression of Prometheus names."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import promql_parser

VARIABLES: Final = {
    "$__rate_interval": "5m",
    "$__interval": "1m",
    "$__range": "1h",
}
"""Durations that Grafana fills in."""


def named(expr: str) -> Mapping[str, frozenset[str]]:
    """Return the labels by metric that an expression names: in selectors, and in the grouping and joins
    around them. Raises ValueError for an expression that is none.

    Labels of a grouping belong to every metric below it.
    """
    found: dict[str, set[str]] = defaultdict(set)
    _walk(promql_parser.parse(filled(expr)), frozenset(), found)
    return {name: frozenset(labels) for name, labels in found.items()}


def selectors(expr: str) -> list[str]:
    """Return each series that an expression selects, without its range and offset."""
    found: list[str] = []

    def note(node: Any) -> None:
        node = getattr(node, "vector_selector", node)
        if type(node).__name__ == "VectorSelector":
            labels = ",".join(str(each) for each in node.matchers.matchers)
            found.append(f"{node.name}{{{labels}}}" if labels else str(node.name))

    promql_parser.walk(promql_parser.parse(filled(expr)), note)
    return list(dict.fromkeys(found))


def filled(expr: str) -> str:
    """Return an expression of a dashboard with durations in place of Grafana's variables."""
    for name, duration in VARIABLES.items():
        expr = expr.replace(name, duration)
    return expr


def _walk(node: Any, around: frozenset[str], found: dict[str, set[str]]) -> None:
    match type(node).__name__:
        case "VectorSelector":
            matchers = node.matchers.matchers
            names = [each.value for each in matchers if each.name == "__name__"]
            labels = {each.name for each in matchers} - {"__name__"}
            found[node.name or names[0]] |= labels | around
        case "MatrixSelector":
            _walk(node.vector_selector, around, found)
        case "AggregateExpr":
            # labels outside an aggregation can only be those that it keeps
            modifier = node.modifier
            kept = (
                frozenset(modifier.labels)
                if modifier and modifier.type == promql_parser.AggModifierType.By
                else around
            )
            _walk(node.expr, kept, found)
        case "BinaryExpr":
            joined = _joined(node.modifier)
            _walk(node.lhs, around | joined, found)
            _walk(node.rhs, around | joined, found)
        case "Call":
            for each in node.args:
                _walk(each, _made(node, around), found)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            _walk(node.expr, around, found)


def _joined(modifier: Any) -> frozenset[str]:
    matching = getattr(modifier, "matching", None)
    return frozenset(matching.labels) if matching else frozenset()


def _made(call: Any, around: frozenset[str]) -> frozenset[str]:
    """Return the labels around a call that its arguments must have: not the one that ``label_replace``
    makes."""
    if call.func.name in ("label_replace", "label_join"):
        return around - {call.args[1].val}
    return around
