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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

from jinja2 import nodes, runtime, utils, visitor

from kvist_epp.prompt.chat import Tool
from kvist_epp.prompt.template_environment import Generation, TemplateEnvironment, now

Pieces = tuple[str | int, ...]
"""A text: literals, and numbers of values."""

Step = tuple[Callable[..., Any], int, tuple[Any, ...], bool | None]
"""Function, number of the value it takes first, its further arguments, and the result of a check; None: the
result is a new value."""


class UntraceableError(Exception):
    """The template does something with a content that cannot be noted."""


class Trace:
    """Notes of one render: the contents are its first values."""

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = [TracedText(text, (number,), self) for number, text in enumerate(contents)]
        self.steps: list[Step] = []
        self.dates: dict[str, str] = {}
        """Patterns of ``strftime_now``, and what they gave."""
        self.spoiled = False
        """An ``UntraceableError`` was raised, whether or not the template's environment caught it."""
        self._values = len(contents)
        self._known: dict[tuple[Any, ...], Any] = {}

    def release(self) -> None:
        """Drop the contents, which refer to the trace."""
        self.contents.clear()
        self._known.clear()

    def fail(self, what: str) -> NoReturn:
        """Raise ``UntraceableError`` and mark the trace as spoiled."""
        self.spoiled = True
        raise UntraceableError(what)

    def check(self, function: Callable[..., bool], text: "TracedText", *arguments: Any) -> bool:
        """Return the result of a function of a text, and note it."""
        key = (function, text.pieces, arguments)
        if key not in self._known:
            result = bool(function(text.plain, *arguments))
            self.steps.append((function, self._number(text), arguments, result))
            self._known[key] = result
        return bool(self._known[key])

    def derive(self, function: Callable[..., str], text: "TracedText", *arguments: Any) -> "TracedText":
        """Return the text that a function makes of a text, and note it."""
        step: Step = (function, self._number(text), arguments, None)
        return self._value(step, function(text.plain, *arguments))

    def _number(self, text: "TracedText") -> int:
        """Return the number of the value that is this text, which is joined if it has several pieces."""
        pieces = text.pieces
        if len(pieces) == 1 and type(pieces[0]) is int:
            return pieces[0]
        numbers = tuple(piece for piece in pieces if type(piece) is int)
        form = tuple(piece if type(piece) is str else None for piece in pieces)
        step: Step = (fill, -1, (form, numbers), None)  # -1: it takes all values
        return self._value(step, text.plain).pieces[0]  # type: ignore[return-value]

    def _value(self, step: Step, text: str) -> "TracedText":
        self.steps.append(step)
        self._values += 1
        return TracedText(text, (self._values - 1,), self)


def fill(values: Sequence[str], form: Sequence[str | None], numbers: Sequence[int]) -> str:
    """Return a text of literals and values: each None in ``form`` stands for the value of the next number."""
    following = iter(numbers)
    return "".join([values[next(following)] if piece is None else piece for piece in form])


def _forbidden(name: str) -> Callable[..., NoReturn]:
    def method(self: "TracedText", *_arguments: Any, **_named: Any) -> NoReturn:
        self.trace.fail(name)

    return method


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEEDED: Final = _words(
    "__class__ __new__ __init__ __getattribute__ __setattr__ __delattr__ __dir__ __doc__ __init_subclass__ "
    "__subclasshook__ __sizeof__ __str__"
)
"""Attributes of ``str`` that are not replaced by methods that raise."""


class TracedText(str):
    """A content, or a text made of contents; ``plain`` has the characters that it has in this render."""

    __slots__ = ("pieces", "trace")
    pieces: Pieces
    trace: Trace

    def __new__(cls, text: str, pieces: Pieces, trace: Trace) -> "TracedText":
        made = str.__new__(cls, text)
        made.pieces, made.trace = pieces, trace
        return made

    for _name in dir(str):
        if _name not in _NEEDED:
            locals()[_name] = _forbidden(_name)
    del _name

    @property
    def plain(self) -> str:
        """Return the text as an ordinary one."""
        return "".join((self,))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        if any(type(piece) is str and piece for piece in self.pieces):
            return True
        return self.trace.check(operator.truth, self)

    def __add__(self, other: object) -> "TracedText":
        return joined((self, other))

    def __radd__(self, other: object) -> "TracedText":
        return joined((other, self))

    def strip(self, chars: Any = None, /) -> "TracedText":
        """Return the text without these characters at its ends."""
        return self.trace.derive(str.strip, self, self._literal(chars))

    def lstrip(self, chars: Any = None, /) -> "TracedText":
        """Return the text without these characters at its start."""
        return self.trace.derive(str.lstrip, self, self._literal(chars))

    def rstrip(self, chars: Any = None, /) -> "TracedText":
        """Return the text without these characters at its end."""
        return self.trace.derive(str.rstrip, self, self._literal(chars))

    def replace(self, old: Any, new: Any, count: Any = -1, /) -> "TracedText":
        """Return the text with another text replaced."""
        return self.trace.derive(str.replace, self, self._literal(old), self._literal(new), int(count))

    def startswith(self, prefix: Any, /, *bounds: Any) -> bool:
        """Return whether the text starts so."""
        return self.trace.check(str.startswith, self, self._literal(prefix), *bounds)

    def endswith(self, suffix: Any, /, *bounds: Any) -> bool:
        """Return whether the text ends so."""
        return self.trace.check(str.endswith, self, self._literal(suffix), *bounds)

    def _literal(self, argument: Any) -> Any:
        if argument is not None and type(argument) is not str:
            self.trace.fail("argument")
        return argument


def joined(texts: Iterable[Any]) -> TracedText:
    """Return the concatenation of texts, of which at least one is traced."""
    pieces: list[str | int] = []
    plain: list[str] = []
    trace: Trace | None = None
    strange = False
    for text in texts:
        if type(text) is TracedText:
            trace = text.trace
            pieces += text.pieces
            plain.append(text.plain)
        elif type(text) is str:
            pieces.append(text)
            plain.append(text)
        else:
            strange = True
    assert trace is not None, "one is traced"
    if strange:
        trace.fail("concatenation")
    return TracedText("".join(plain), tuple(pieces), trace)


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
        given = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
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
            return getattr(obj, attribute) if attribute in _METHODS else self.trace.fail(attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; a traced text has none, and is no key."""
        if type(obj) is TracedText or type(argument) is TracedText:
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
        return type(value) is TracedText or test(value)

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
    if kind in _LITERALS or kind is Tool or isinstance(value, runtime.Undefined):
        return False
    if kind is dict:
        return any(map(touches, value.values()))
    return any(map(touches, value)) if kind in (list, tuple) else True


_LITERALS: Final = frozenset((str, int, float, bool, type(None)))
_HIDDEN: Final = ("_loop_vars", "_block_vars")
"""Arguments that jinja2 adds to each call."""
_METHODS: Final = _words("strip lstrip rstrip replace startswith endswith")
_FILTERS: Final = _words("trim string default d length count first last list selectattr rejectattr _charged")
"""Filters that use a text only through its methods, or hand it on."""
_TESTS: Final = _words(
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
    for name in _words(
        "Output TemplateData Name NSRef Const Tuple List Dict Pair Keyword CondExpr Filter Test Call Getitem "
        "Getattr Slice Concat Compare Operand Not Neg Pos And Or For If Macro CallBlock FilterBlock Assign "
        "AssignBlock ExtensionAttribute ExprStmt Break Continue Add Sub Mul Div FloorDiv Mod Pow"
    )
)
"""Nodes of templates that can be traced."""
