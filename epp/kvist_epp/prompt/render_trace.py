"""Watch what a chat template does with the contents of messages.

A template is rendered once with each content as a ``TracedText``. Concatenation and output are noted. So is
what the template learns of a content (is it empty, does it contain ``</think>``), as a *check*: a chat with
other contents that pass the same checks takes the same way through the template. Methods that return a text
(``strip``) are noted as *derived values*. Whatever else is done with a content raises ``UntraceableError``,
and no plan is made.

``TracingEnvironment`` leaves no operation unwatched. Python's own operators and functions written in C read
the characters of a text without a call of its methods, hence comparisons, ``~`` and arithmetic are compiled
as calls, filters, tests and calls take contents only if they are listed here, and so are the kinds of nodes
that a template may have.

Example: ``<u>{{ m.content | trim }}{% if m.content %}!{% endif %}`` gives the derived value
``v1 = str.strip(v0)``, the check ``truth(v0) is True``, and the pieces ``"<u>", 1, "!"``.
"""

import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

from jinja2 import nodes, runtime, utils, visitor

from kvist_epp.prompt.template_environment import HIDDEN, Generation, TemplateEnvironment, now, tojson
from kvist_epp.prompt.tools import Tool
from kvist_epp.prompt.traced_values import (
    LITERALS,
    METHODS,
    TRACED,
    Trace,
    TracedJson,
    TracedText,
    UntraceableError,
    joined,
    words,
)

NO_TRACE: Final = Trace(())
"""That of a template which is not rendered."""


class TracingEnvironment(TemplateEnvironment):
    """An environment whose templates do nothing unwatched with a ``TracedText``."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__()
        self.trace = NO_TRACE
        """That of the render under way."""
        self.filters = {name: self._watched(name, found, _FILTERS) for name, found in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        tests = {name: self._watched(name, found, _TESTS) for name, found in tests.items()}
        for name, operation in _COMPARING_TESTS.items():
            tests[name] = functools.partial(self._compared, operation=operation)
        for name in ("iterable", "sequence"):
            tests[name] = functools.partial(self._test_kind, tests[name])
        self.tests = tests
        self.filters["tojson"] = self._tojson
        self.filters["_compared"] = self._compared
        self.filters["_concatenated"] = self._concatenated
        self.globals["strftime_now"] = self._now
        self.concat = self._concat  # type: ignore[method-assign]

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for node in source.find_all(nodes.Node):
            if type(node) not in _NODES:
                raise UntraceableError(type(node).__name__)
        changed: nodes.Template = _Rewriter().visit(source)
        return super()._generate(changed, name, filename, defer_init)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator; only ``+`` takes a traced text."""
        if type(left) is TracedText or type(right) is TracedText:
            return joined((left, right)) if operator == "+" else self.trace.fail(operator)
        both_lists = operator == "+" and type(left) is list and type(right) is list
        if not both_lists and (touches(left) or touches(right)):
            self.trace.fail(operator)
        return super().call_binop(context, operator, left, right)

    def call(self, context: runtime.Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro or a namespace with anything; methods and functions that are known, with literals."""
        kind = type(callee)
        given = {name: value for name, value in kwargs.items() if name not in HIDDEN}
        if kind is types.MethodType and callee.__func__ is Generation.inside:
            return callee(*args, **given)
        if kind is not runtime.Macro and callee is not utils.Namespace:
            if any(map(touches, (*args, *given.values()))) or not self._is_known(callee):
                self.trace.fail("call")
            if kind is types.MethodType and type(callee.__self__) is TracedText:
                return callee(*args, **given)
        return super().call(context, callee, *args, **kwargs)

    def _is_known(self, callee: Any) -> bool:
        if isinstance(callee, (types.MethodType, types.BuiltinMethodType)):
            owner = callee.__self__
            if type(owner) is dict:
                return callee.__name__ in ("get", "items", "keys", "values")
            if callee == self._now:
                return True
            return type(owner) in (str, TracedText, runtime.LoopContext)
        return callee in (self.globals["raise_exception"], self.globals["range"])

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute; a traced text has the methods that it traces."""
        if type(obj) is TracedText:
            return getattr(obj, attribute) if attribute in METHODS else self.trace.fail(attribute)
        if type(obj) is TracedJson:
            self.trace.fail(attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; a traced text has none, and is no key."""
        if type(obj) in TRACED or type(argument) in TRACED:
            self.trace.fail("item")
        return super().getitem(obj, argument)

    def _watched(self, name: str, function: Callable[..., Any], allowed: frozenset[str]) -> Any:
        if name in allowed:
            return function
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "random" or any(map(touches, (*args[skipped:], *kwargs.values()))):
                self.trace.fail(name)
            return function(*args, **kwargs)

        return watched

    def _test_kind(self, test: Callable[[Any], bool], value: Any) -> bool:
        """Return whether a value is iterable, or a sequence; a text is both."""
        if type(value) is TracedJson:
            self.trace.fail("kind")
        return type(value) is TracedText or test(value)

    def _tojson(self, value: Any, *args: Any, **kwargs: Any) -> str:
        """Return a value as JSON; what holds a text, or arguments of a call, becomes a derived value."""
        if not touches(value):
            return tojson(value, *args, **kwargs)
        if any(map(touches, (*args, *kwargs.values()))):
            self.trace.fail("tojson")
        return self.trace.derive_json(functools.partial(tojson, **kwargs), value, *args)

    def _compared(self, left: Any, right: Any, operation: str) -> bool:
        """Compare; a text is compared with a literal, or asked whether it contains one."""
        if type(left) is TracedText and operation in ("eq", "ne"):
            return self._equal(left, right) is (operation == "eq")
        if type(right) is TracedText and operation in ("eq", "ne"):
            return self._equal(right, left) is (operation == "eq")
        if operation in ("in", "notin"):
            if type(right) is TracedText and type(left) is str:
                return right.trace.check(str.__contains__, right, left) is (operation == "in")
            if type(right) is dict and type(left) is str:
                return (left in right) is (operation == "in")
        if touches(left) or touches(right):
            self.trace.fail(operation)
        return bool(_COMPARISONS[operation](left, right))

    def _equal(self, text: TracedText, other: Any) -> bool:
        if type(other) is str:
            return text.trace.check(operator.eq, text, other)
        if other is None or type(other) in (bool, int) or isinstance(other, runtime.Undefined):
            return False
        return self.trace.fail("eq")

    def _concatenated(self, *values: Any) -> Any:
        """Return what ``~`` makes of values."""
        return self._concat([value if isinstance(value, str) else self._text(value) for value in values])

    def _text(self, value: Any) -> str:
        return self.trace.fail("~") if touches(value) else str(value)

    @staticmethod
    def _concat(texts: Iterable[str]) -> str:
        """Join what a template, a macro or a block yields."""
        found = list(texts)
        return joined(found) if any(type(text) is TracedText for text in found) else "".join(found)

    def _now(self, pattern: str) -> str:
        shown = self.trace.dates[pattern] = now(pattern)
        return shown


class _Rewriter(visitor.NodeTransformer):
    """Makes calls of comparisons and of ``~``."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 jinja2 calls it so
        self.generic_visit(node)
        if len(node.ops) != 1:
            raise UntraceableError("several comparisons")
        (operand,) = node.ops
        arguments: list[nodes.Expr] = [operand.expr, nodes.Const(operand.op)]
        return nodes.Filter(node.expr, "_compared", arguments, [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 as above
        self.generic_visit(node)
        return nodes.Filter(
            node.nodes[0], "_concatenated", node.nodes[1:], [], None, None, lineno=node.lineno
        )


def touches(value: Any) -> bool:
    """Return whether a value is, holds, or could lead to a traced text."""
    kind = type(value)
    if kind in LITERALS or kind is Tool or isinstance(value, runtime.Undefined):
        return False
    if kind is dict:
        return any(map(touches, value.values()))
    return any(map(touches, value)) if kind in (list, tuple) else True


_FILTERS: Final = words("trim string default d length count first last list selectattr rejectattr _charged")
"""Filters that use a text only through its methods, or hand it on."""
_TESTS: Final = words(
    "string mapping number integer float boolean none defined undefined true false callable iterable sequence"
)
"""Tests of a value's type."""
_COMPARING_TESTS: Final = dict.fromkeys(("eq", "==", "equalto"), "eq") | {"ne": "ne", "!=": "ne", "in": "in"}
_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_NODES: Final[frozenset[type]] = frozenset(
    getattr(nodes, name)
    for name in words(
        "Output TemplateData Name NSRef Const Tuple List Dict Pair Keyword CondExpr Filter Test Call Getitem "
        "Getattr Slice Concat Compare Operand Not Neg Pos And Or For If Macro CallBlock FilterBlock Assign "
        "AssignBlock ExtensionAttribute ExprStmt Break Continue Add Sub Mul Div FloorDiv Mod Pow"
    )
)
"""Nodes of templates that can be traced."""
