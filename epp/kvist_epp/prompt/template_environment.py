"""The environment of a chat template: that of transformers, bounded, with fast access to messages.

It is the environment of ``transformers.utils.chat_template_utils``: immutable sandbox, ``trim_blocks``,
``lstrip_blocks``, loop controls, the ``generation`` tag, ``raise_exception``, ``strftime_now``, and
``tojson`` without HTML escapes.

A template runs in the picker's only thread, over messages a client wrote, so its work is bounded: each loop
is charged the length of what it runs over, each macro call one step, and a render may spend ``LOOP_LIMIT``
of them; repetition (``*``, ``**``) is bounded by ``REPEAT_LIMIT``.
"""

import datetime as dt
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import ext, nodes, parser, runtime, sandbox, utils

from kvist_epp.prompt.tools import Tool

LOOP_LIMIT: Final = 50_000
"""Loop iterations of one render: 100 ms at worst."""

REPEAT_LIMIT: Final = 1_000_000
"""Maximum number of characters or items that ``*`` may create."""


Write = Callable[[runtime.Context, Iterator[str]], str]


class TooMuchWork(Exception):
    """A render has used up its budget."""


class Generation(ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it only wraps."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: parser.Parser) -> nodes.Node:
        """Return the node of a tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

    def inside(self, caller: Any) -> Any:
        """Return what is inside the tag."""
        return caller()


class TemplateEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """The environment of transformers, with a budget for loops and fast access to the keys of plain dicts."""

    left = LOOP_LIMIT
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
        self.filters["tojson"] = tojson
        self.filters["_charged"] = self._charged
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = now

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_charged", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``*`` and ``**``, unless the result would be huge."""
        sizes = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        counts = [abs(side) for side in (left, right) if isinstance(side, int)]
        if operator == "**" and max(counts, default=0) > 64:
            raise TooMuchWork
        if sizes and counts and sizes[0] * counts[0] > REPEAT_LIMIT:
            raise TooMuchWork
        return super().call_binop(context, operator, left, right)

    def call(self, context: runtime.Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro (one step), a recursive loop (as a loop), a method of a text, or as jinja2 does.

        jinja2 looks first for marks of unsafe functions and for those that want its context; these have none.
        """
        kind = type(callee)
        if kind is runtime.Macro:
            self._charge(1)
        elif kind is runtime.LoopContext:
            args = (self._charged(kwargs.pop("iterable") if "iterable" in kwargs else args[0]), *args[1:])
        elif kind is not types.BuiltinMethodType or type(callee.__self__) is not str:
            return super().call(context, callee, *args, **kwargs)
        for name in HIDDEN:
            kwargs.pop(name, None)
        return callee(*args, **kwargs)

    def _charged(self, items: Any) -> Any:
        """Charge the length of the items of a loop and return them; a loop that breaks is charged in full."""
        if not hasattr(items, "__len__"):
            return self._counted(items)
        self._charge(len(items))
        return items

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            self._charge(1)
            yield item

    def _charge(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up ``message.role`` or ``loop.last`` as jinja2 does, without its exceptions and checks."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is utils.Namespace:
            attributes = _attributes_of(obj, "_Namespace__attrs")
            if attribute in attributes and attribute[0] != "_":
                return attributes[attribute]
        elif kind is runtime.LoopContext and attribute[0] != "_" and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class CompiledTemplate:
    """A template that is compiled in an environment of its own."""

    def __init__(self, environment: TemplateEnvironment, source: str, constants: Mapping[str, Any]) -> None:
        """Compile; ``constants`` are variables that each render has.

        Raises:
            jinja2.TemplateError: the source is no template.
        """
        self._environment = environment
        self._template = environment.from_string(source)
        self._constants = {**self._template.globals, **constants}

    def render(self, variables: Mapping[str, Any], write: Write | None = None) -> str:
        """Render, within the budget of a render; raises whatever the template raises.

        ``write`` joins the pieces of the prompt; None: they are joined as they come.
        """
        template, environment = self._template, self._environment
        given = {**self._constants, **variables}
        context = runtime.new_context(environment, template.name, template.blocks, given, shared=True)
        environment.left = LOOP_LIMIT
        try:
            pieces = template.root_render_func(context)
            return environment.concat(pieces) if write is None else write(context, pieces)
        finally:  # macros and context refer to each other: they would keep the messages until a collection
            context.vars.clear()
            given.clear()


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, as transformers' filter does; that of a tool or a list of tools is kept."""
    pair = None if separators is None else (separators[0], separators[1])
    options = (ensure_ascii, indent, pair, sort_keys)
    tool: Tool
    key: tuple[Any, ...]
    if type(value) is list and value and all(type(item) is Tool for item in value):
        key, tool = (list, *options, *map(id, value)), value[0]
    elif type(value) is Tool:
        key, tool = (Tool, *options, id(value)), value
    else:
        return _dumped(value, *options)
    shown = tool.texts.get(key)
    return tool.texts.keep(key, _dumped(value, *options)) if shown is None else shown


def _dumped(
    value: Any, ascii_only: bool, indent: int | None, separators: tuple[str, str] | None, sort: bool
) -> str:
    return _encoder(bool(ascii_only), indent, separators, bool(sort)).encode(value)


@lru_cache(maxsize=64)
def _encoder(
    ascii_only: bool, indent: int | None, separators: tuple[str, str] | None, sort: bool
) -> json.JSONEncoder:
    """Return what ``json.dumps`` makes for each call."""
    return json.JSONEncoder(ensure_ascii=ascii_only, indent=indent, separators=separators, sort_keys=sort)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def now(pattern: str) -> str:
    """Return the local date and time in this pattern."""
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 the engine takes its local time as well


HIDDEN: Final = ("_loop_vars", "_block_vars")
"""Arguments that jinja2 adds to each call."""
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_attributes_of: Final = object.__getattribute__
"""Reads the attributes of a namespace, whose own method takes four times as long."""
