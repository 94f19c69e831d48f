"""Values that note what a chat template does with them: texts, and arguments of calls.

``Trace`` has the notes of one render; the environment that leaves no operation unwatched is in
``render_trace``.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from kvist_epp.prompt.tools import Tool

Pieces = tuple[str | int, ...]
"""A text: literals, and numbers of values."""

Value = str | dict[str, Any]
"""A text, or the arguments of a call, which a template can only test for emptiness or print as JSON."""

Step = tuple[Callable[..., Any], int, tuple[Any, ...], bool | None]
"""Function, number of the value it takes first (-1: it takes the list of all values), its further arguments,
and the result of a check; None: the result is a new value."""


class UntraceableError(Exception):
    """The template does something with a content that cannot be noted."""


class Trace:
    """Notes of one render: the contents are its first values."""

    def __init__(self, contents: Sequence[Value]) -> None:
        self.contents: list[TracedText | TracedJson] = [
            TracedText(value, (number,), self) if isinstance(value, str) else TracedJson(value, number, self)
            for number, value in enumerate(contents)
        ]
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

    def check(self, function: Callable[..., bool], text: "TracedText | TracedJson", *arguments: Any) -> bool:
        """Return the result of a function of a value, and note it."""
        key = (function, text.pieces, arguments)
        if key not in self._known:
            result = bool(function(text.plain, *arguments))
            self.steps.append((function, self._number(text), arguments, result))
            self._known[key] = result
        return bool(self._known[key])

    def derive(
        self, function: Callable[..., str], text: "TracedText | TracedJson", *arguments: Any
    ) -> "TracedText":
        """Return the text that a function makes of a value, and note it."""
        step: Step = (function, self._number(text), arguments, None)
        return self._value(step, function(text.plain, *arguments))

    def derive_json(self, dump: Callable[..., str], value: Any, *arguments: Any) -> "TracedText":
        """Return the JSON of a value that is, or holds, traced ones in lists and dicts, and note it."""
        if isinstance(value, TRACED):
            return self.derive(dump, value, *arguments)
        step: Step = (_dumped, -1, (dump, _mapped(value, self._placed), arguments), None)
        plain = _mapped(value, lambda leaf: leaf.plain if isinstance(leaf, TRACED) else leaf)
        return self._value(step, dump(plain, *arguments))

    def _placed(self, leaf: Any) -> Any:
        """Return the place of a traced value, or what is none."""
        if isinstance(leaf, TRACED):
            return _Place(self._number(leaf))
        return leaf if type(leaf) in LITERALS or isinstance(leaf, Tool) else self.fail("tojson")

    def _number(self, text: "TracedText | TracedJson") -> int:
        """Return the number of the value, which is joined if it is a text of several pieces."""
        pieces = text.pieces
        if len(pieces) == 1 and type(pieces[0]) is int:
            return pieces[0]
        assert isinstance(text, TracedText), "arguments are one value"
        numbers = tuple(piece for piece in pieces if type(piece) is int)
        form = tuple(piece if type(piece) is str else None for piece in pieces)
        step: Step = (fill, -1, (form, numbers), None)
        return self._value(step, text.plain).pieces[0]  # type: ignore[return-value]

    def _value(self, step: Step, text: str) -> "TracedText":
        self.steps.append(step)
        self._values += 1
        return TracedText(text, (self._values - 1,), self)


def fill(values: Sequence[str], form: Sequence[str | None], numbers: Sequence[int]) -> str:
    """Return a text of literals and values: each None in ``form`` stands for the value of the next number."""
    following = iter(numbers)
    return "".join([values[next(following)] if piece is None else piece for piece in form])


class _Place(NamedTuple):
    """Stands for a value in the form of an object."""

    number: int


def _dumped(values: Sequence[Any], dump: Callable[..., str], form: Any, arguments: tuple[Any, ...]) -> str:
    """Return the JSON of a form with these values in their places."""
    filled = _mapped(form, lambda leaf: values[leaf.number] if type(leaf) is _Place else leaf)
    return dump(filled, *arguments)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value of lists and dicts with each of its leaves changed."""
    if type(value) is dict:
        return {name: _mapped(each, change) for name, each in value.items()}
    if type(value) in (list, tuple):
        return [_mapped(each, change) for each in value]
    return change(value)


def _forbidden(name: str) -> Callable[..., NoReturn]:
    def method(self: "TracedText | TracedJson", *_arguments: Any, **_named: Any) -> NoReturn:
        self.trace.fail(name)

    return method


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_NEEDED: Final = words(
    "__class__ __new__ __init__ __getattribute__ __setattr__ __delattr__ __dir__ __doc__ __init_subclass__ "
    "__subclasshook__ __sizeof__ __str__"
)
"""Attributes that are not replaced by methods that raise; ``__str__`` of texts only."""


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


class TracedJson(dict[str, Any]):
    """The arguments of a call, of which a template may learn that there are some, and print them as JSON.

    As a dict it is empty: nothing may read it but by ``plain``.
    """

    __slots__ = ("pieces", "plain", "trace")

    def __init__(self, plain: dict[str, Any], number: int, trace: Trace) -> None:
        self.plain, self.pieces, self.trace = plain, (number,), trace

    for _name in dir(dict):
        if _name not in _NEEDED or _name == "__str__":
            locals()[_name] = _forbidden(_name)
    del _name

    def __bool__(self) -> bool:
        return self.trace.check(operator.truth, self)


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


TRACED: Final = (TracedText, TracedJson)
METHODS: Final = words("strip lstrip rstrip replace startswith endswith")
"""Methods of a text that are traced."""
LITERALS: Final = frozenset((str, int, float, bool, type(None)))
"""Types of values that lead to no content."""
