"""A model's chat template: compiled once, rendered as transformers and vLLM render it, and bounded.

The environment is the one of ``transformers.utils.chat_template_utils``: immutable sandbox, ``trim_blocks``,
``lstrip_blocks``, loop controls, the ``generation`` tag, ``raise_exception``, ``strftime_now``, and
``tojson`` without HTML escapes.

A template runs in the picker's only thread, over messages a client wrote, so its work is bounded: each loop
is charged the length of what it runs over, each macro call one step, and a render may spend ``LOOP_LIMIT``
of them; repetition (``*``, ``**``) is bounded by ``REPEAT_LIMIT``, the prompt by ``GROWTH_LIMIT``. Templates
join texts in loops, which copies up to the whole prompt a message, hence ``COPY_LIMIT``. What exceeds them is
routed by load, as are templates that raise. Clients cannot send templates; filters are left to the model's
author.
"""

import datetime as dt
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jinja2
from jinja2 import ext, meta, nodes, parser, runtime, sandbox, utils

from kvist_epp.prompt import chat as chats
from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat, Tool, UnrenderableError
from kvist_epp.prompt.request_types import Chat

LOOP_LIMIT: Final = 50_000
"""Loop iterations of one render: 100 ms at worst."""

COPY_LIMIT: Final = 4_000_000_000
"""Bound on messages times bytes of the body: half a second of copying for the worst template."""

REPEAT_LIMIT: Final = 1_000_000
"""Maximum number of characters or items that ``*`` may create."""

GROWTH_LIMIT: Final = 16
"""Maximum ratio of prompt to request size, plus a megabyte: indented tools grow three- to fivefold."""

Variables = Mapping[str, Any]
NONE: Final[Variables] = {}

_CONTINUE: Final = "KVIST-CONTINUES-HERE "
"""Mark at the end of the message to continue; its blank shows whether the template trims."""


class Template:
    """A compiled chat template with the special tokens it may use."""

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        style: ContentFormat | None = None,
        defaults: Variables = NONE,
    ) -> None:
        """Compile the source; ``specials`` are variables such as ``bos_token``, ``defaults`` those that
        requests may override. ``style``: how contents are handed over; None: as the template shows.

        Raises:
            jinja2.TemplateError: the source is no template.
        """
        environment = _Environment()
        tree = environment.parse(source)
        self._environment = environment
        self._template = environment.from_string(source)
        self._constants = {**self._template.globals, **specials}
        self._variables = meta.find_undeclared_variables(tree)
        self._has_content = "content" in source
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._defaults = {name: defaults[name] for name in defaults if name in self._variables}
        self.style = style or detect_content_format(tree)
        """``string`` or ``openai``: how contents are handed over."""

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt up to the first media item; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the template fails or works too long, or a message has an unknown shape.
        """
        if len(chat.messages) * size > COPY_LIMIT:
            raise UnrenderableError("work")
        messages = chats.template_messages(chat.messages, self.style, reorder_calls=chat.reorder_calls)
        media = chats.have_media(messages)
        if not self._knows_developer:
            messages = chats.merge_developer_messages(messages)
        if not messages:
            raise UnrenderableError("empty")
        if chat.continue_final_message:
            return self._continued(chat, messages, media=media)
        rendered = self._run(chat, messages, media=media)
        if len(rendered) > GROWTH_LIMIT * size + 1_000_000:
            raise UnrenderableError("work")
        return rendered

    def _run(self, chat: Chat, messages: list[dict[str, Any]], *, media: bool) -> str:
        given = {name: chat.variables[name] for name in chat.variables if name in self._variables}
        variables = {
            **self._constants,
            **self._defaults,
            **given,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        template = self._template
        context = runtime.new_context(
            self._environment, template.name, template.blocks, variables, shared=True
        )
        self._environment.left = LOOP_LIMIT
        try:
            rendered = "".join(template.root_render_func(context))
        except _TooMuchWork:
            raise UnrenderableError("work") from None
        except Exception:  # noqa: BLE001 a template may raise anything; it must never fail a request
            raise UnrenderableError("template") from None
        finally:  # macros and context refer to each other: they would keep the messages until a collection
            context.vars.clear()
            variables.clear()
        return rendered.partition(MEDIA_MARK)[0] if media else rendered

    def _continued(self, chat: Chat, messages: list[dict[str, Any]], *, media: bool) -> str:
        """Return the prompt up to the end of the last message's text, which the model is to continue."""
        if chat.add_generation_prompt or not self._has_content:
            raise UnrenderableError("continue")
        last, text = _marked(messages[-1])
        rendered = self._run(chat, [*messages[:-1], last], media=media)
        at = rendered.rfind(_CONTINUE.strip())
        if at < 0 or text.strip() not in rendered:
            raise UnrenderableError("continue")
        trimmed = not rendered.startswith(_CONTINUE, at)
        return rendered[:at].rstrip() if trimmed else rendered[:at]


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the message with a mark after its last text, and that text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE}, content
    at = next((i for i in reversed(range(len(content))) if "text" in content[i]), None)
    if at is None:
        raise UnrenderableError("continue")
    text = content[at]["text"]
    parts = [*content[:at], {**content[at], "text": text + _CONTINUE}, *content[at + 1 :]]
    return {**message, "content": parts}, text


class _TooMuchWork(Exception):
    pass


class _Generation(ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it only wraps."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The environment of transformers, with a budget for loops and fast access to the keys of plain dicts."""

    left = LOOP_LIMIT
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["_charged"] = self._charged
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now

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
            raise _TooMuchWork
        if sizes and counts and sizes[0] * counts[0] > REPEAT_LIMIT:
            raise _TooMuchWork
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
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
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
            raise _TooMuchWork

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up ``message.role`` or ``loop.last`` as jinja2 does, without its exceptions and checks."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _OWN and attribute[0] != "_" and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    options = (ensure_ascii, indent, separators, sort_keys)
    if type(value) is not Tool:
        return _dumped(value, *options)
    if options not in value.shown:
        value.shown[options] = _dumped(value, *options)
    return value.shown[options]


def _dumped(
    value: Any, ascii_only: bool, indent: int | None, separators: tuple[str, str] | None, sort: bool
) -> str:
    return json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators, sort_keys=sort)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 the engine takes its local time as well


_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_OWN: Final = (runtime.LoopContext, utils.Namespace)
"""Objects of jinja2 whose public attributes are safe to read."""


# A template that loops over a message's content takes a list of parts (``openai``), any other one text
# (``string``). vLLM decides so for ``--chat-template-content-format auto``, a wrong decision changes every
# prompt. The rules for what counts as such a loop are those of ``vllm.renderers.hf``.


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Return ``openai`` if a loop runs over a message's content, else ``string``."""
    try:
        message_names = {loop.target.name for loop in _message_loops(tree)}  # type: ignore[attr-defined]
    except AttributeError:  # the loop unpacks its messages: vLLM gives up the analysis as well
        return "string"
    inner = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    loops = list(tree.find_all(nodes.For))
    if any(_reads(loop.iter, name, "content") for loop in loops for name in message_names):
        return "openai"
    named = [loop for loop in loops if isinstance(loop.iter, nodes.Name)]
    if any(_variable_name(loop.iter) == "content" and id(loop) not in inner for loop in named):
        return "openai"
    return "openai" if _macro_loops(tree, message_names) else "string"


def _message_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    names = _aliases(tree, "messages")
    return (loop for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in names))


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return the name and every variable that is set to it, to a slice of it or to a filter of it."""
    known = {name}
    assigns = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    while True:
        found = {
            _variable_name(node.target)
            for node in assigns
            if any(_reads(node.node, alias) for alias in known)
        }
        if found <= known:
            return known
        known |= found


def _macro_loops(tree: nodes.Template, message_names: set[str]) -> bool:
    """Return whether a macro loops over a parameter that receives a message's content."""
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, message_names)
        loops = (loop.iter for loop in macro.find_all(nodes.For))
        if any(isinstance(over, nodes.Name) and over.name in given for over in loops):
            return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    calls = [call for call in tree.find_all(nodes.Call) if _variable_name(call.node) == macro.name]
    given = [pair for call in calls for pair in zip(names, call.args, strict=False)]
    given += [(item.key, item.value) for call in calls for item in call.kwargs]
    return {
        name
        for name, value in given
        if name in names and any(_reads(value, m, "content") for m in message_names)
    }


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Return whether a node reads the variable (or its ``key``), also filtered, tested or sliced."""
    node = _bare(node)
    if key is None:
        return _variable_name(node) == name
    if isinstance(node, nodes.Getitem):
        return (
            _variable_name(node.node) == name and isinstance(node.arg, nodes.Const) and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _variable_name(node.node) == name and node.attr == key


def _bare(node: nodes.Node) -> nodes.Node:
    while isinstance(node, (nodes.Filter, nodes.Test)) or _is_slice(node):
        inner = node.node  # type: ignore[attr-defined]
        if inner is None:
            return node
        node = inner
    return node


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _variable_name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""
