"""Begin a template's loop over the messages with a later one.

What a template does before its loop is done for all messages. What it has set by then is compared with what
it had set when the ``Checkpoint`` was made, and what it has written with the prompt that was kept; then
attributes of namespaces get the values that they had at the checkpoint, the prompt up to there is taken from
it, and the loop begins with the message behind it. ``checkpoints`` keeps them, and decides when they serve.

Example: ``{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.role
}}{% endfor %}`` writes ``1user2assistant3tool``. A checkpoint before the third message has the first 14
characters and ``ns.n = 2``; it was made in a state of ``ns.n = 0``.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from jinja2 import nodes, runtime, utils

from kvist_epp.prompt.template_environment import CompiledTemplate
from kvist_epp.prompt.template_loops import compares_messages, main_loop
from kvist_epp.prompt.tool_texts import ToolTextEnvironment
from kvist_epp.prompt.traced_values import LITERALS

_LONG: Final = 256
"""Characters of a text of which the hash is compared."""
_MAX_ITEMS: Final = 64
"""Items of a list or an object that is compared, and of those in it together."""
_SKIPPED: Final = 2
"""Messages that a template may leave out at the beginning of its loop, such as the system prompt."""
_MOST_PAIRS: Final = 20_000
"""Pairs of messages that are compared, in some 2 ms: the next turn of a chat of 4,000 messages has fewer."""
_PLACES: Final = "places"
"""Stands for messages, which are shown by their places in the chat."""


class StaleError(Exception):
    """The template knows something else at the start of its loop than it did when the checkpoint was made."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the prompt of a chat, before one of its messages."""

    key: int
    """Under which it is kept."""
    setting: int
    """A hash of the variables and tools of the chat."""
    place: int
    """Messages before it."""
    digest: int
    """A hash of these messages."""
    prompt: str
    """The prompt of the whole chat."""
    end: int
    """Characters of it before the place."""
    state: tuple[Any, ...]
    """What the template had set at the start of its loop."""
    changes: tuple[tuple[int, str, Any], ...]
    """Attributes of namespaces that the loop had changed: number of the namespace, name and value."""
    weight: int
    """Bytes of its texts and values when it was made."""


class Progress:
    """Notes of one render."""

    def __init__(
        self,
        messages: Sequence[Any],
        mark_at: int,
        resumed: Checkpoint | None = None,
        *,
        may_move: bool = False,
    ) -> None:
        """``mark_at`` is the message before which a checkpoint is wanted. ``may_move``: the places that the
        template has looked up may be others than at the checkpoint ``resumed``."""
        self.prompt = ""
        self.namespaces: list[utils.Namespace] = []
        self.end: int | None = None
        """Characters before the checkpoint; None: there is none."""
        self.state: tuple[Any, ...] = ()
        self.changes: list[tuple[int, str, Any]] = []
        self._messages = messages
        self.mark_at = mark_at
        self._resumed = resumed
        self._may_move = may_move
        self.moved = False
        """The places are others."""
        self.by_value = False
        """The template compares messages: what it writes of one depends on whether a later one is equal."""
        self._written: list[str] = []
        self._place = -1
        self._next = len(messages)
        """Index of the message of the next round of the loop; that of no message before the first."""
        self._before: list[dict[str, Any]] = []
        self._variables: Mapping[str, Any] = {}

    def write(self, context: runtime.Context, pieces: Iterator[str]) -> str:
        """Return what a template writes. Raises StaleError, and whatever the template raises."""
        self._variables = context.vars
        written = self._written
        for piece in pieces:
            written.append(piece)
        prompt = "".join(written)
        if self._place >= 0:
            self.end = len(prompt) - sum(map(len, written[self._place :]))
        elif self._resumed is not None and self._next == len(self._messages):
            raise StaleError  # the loop did not begin
        self.prompt = prompt
        return prompt

    def begin(self, items: Any) -> int:
        """Return the index of the item that the loop begins with, which is 0 unless it is resumed.

        Raises:
            StaleError: it cannot be resumed.
        """
        resumed, first = self._resumed, self._first(items)
        before = [dict(_attributes(space)) for space in self.namespaces]
        state = None if first is None else _state([self._variables, *before], self._messages)
        if first is None or state is None:
            if resumed is not None:
                raise StaleError
            return 0
        self._next, self._before, self.state = first, before, state
        if resumed is None:
            return 0
        if self._is_repeated(resumed.place):
            raise StaleError
        self.moved = state != resumed.state
        if self.moved and not (self._may_move and _moved_behind(resumed, state, first)):
            raise StaleError
        if resumed.place <= first or not resumed.prompt.startswith("".join(self._written)):
            raise StaleError
        for number, name, value in resumed.changes:
            self.namespaces[number][name] = value
        self._written[:] = [resumed.prompt[: resumed.end]]
        self._next = resumed.place
        return resumed.place - first

    def round(self) -> None:
        """Note that a round of the loop begins."""
        if self._next == self.mark_at:
            self._mark()
        self._next += 1

    def _is_repeated(self, place: int) -> bool:
        """Return whether what is before a place may depend on messages behind it, since some are equal, or
        too many to be compared."""
        if not self.by_value:
            return False
        before, later = self._messages[:place], self._messages[place:]
        return len(before) * len(later) > _MOST_PAIRS or any(message in later for message in before)

    def _mark(self) -> None:
        if self._is_repeated(self.mark_at):
            return
        for number, (space, before) in enumerate(zip(self.namespaces, self._before, strict=False)):
            for name, value in _attributes(space).items():
                if name in before and value is before[name]:
                    continue
                if not _is_plain(value):
                    return
                self.changes.append((number, name, value))
        self._place = len(self._written)

    def _first(self, items: Any) -> int | None:
        """Return which message is the first of the loop's items; None if they are not the last messages."""
        if type(items) is not list or not items or len(items) > len(self._messages):
            return None
        first = len(self._messages) - len(items)
        return first if all(map(operator.is_, items, self._messages[first:])) else None


class _OpaqueError(Exception):
    """A value that cannot be compared with that of another render."""


def _state(
    sets: Sequence[Mapping[str, Any]], messages: Sequence[Any]
) -> tuple[tuple[str, tuple[Any, ...]], ...] | None:
    """Return what a template has set, so that it can be compared with what it sets for another chat; None if
    it cannot be."""
    comparison = _Comparison(messages)
    try:
        return tuple([(name, comparison.shown(value)) for each in sets for name, value in each.items()])
    except _OpaqueError:
        return None


class _Comparison:
    """Shows the values of one render so that they are equal to those of another one that mean the same."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages
        self._places: dict[int, int] = {}
        self._left = _MAX_ITEMS

    def shown(self, value: Any) -> tuple[Any, ...]:
        """Return a kind, and what tells the value from others of it. Raises _OpaqueError."""
        kind = type(value)
        if kind is str and len(value) > _LONG:
            return kind, hash(value)
        if kind is float:
            return kind, repr(value)
        if kind in LITERALS:
            return kind, value
        if kind in (runtime.Macro, utils.Namespace) or isinstance(value, runtime.Undefined):
            return (kind,)
        if kind not in (list, tuple, dict):
            raise _OpaqueError
        if not self._places:
            self._places = {id(message): at for at, message in enumerate(self._messages)}
        items = [value] if kind is dict else value
        first = len(self._messages) - len(items)
        if 0 <= first <= _SKIPPED and all(map(operator.is_, items, self._messages[first:])):
            return kind, _PLACES, first
        if items and all(id(item) in self._places for item in items):
            return (_PLACES, *[self._places[id(item)] for item in items])
        self._left -= len(value)
        if self._left < 0:
            raise _OpaqueError
        if kind is dict:
            return (kind, *[(name, self.shown(item)) for name, item in value.items()])
        return (kind, *map(self.shown, value))


def _moved_behind(resumed: Checkpoint, state: tuple[Any, ...], first: int) -> bool:
    """Return whether a state differs from that of a checkpoint only in numbers and places of messages, all of
    which lie at the end of what is before the checkpoint, or behind it.

    Then the last question, say, is another one now, but no answer before the checkpoint lies behind either.
    """
    least = resumed.place - 1 - first
    if len(state) != len(resumed.state):
        return False
    for (name, now), (known, was) in zip(state, resumed.state, strict=True):
        if (name, now) == (known, was):
            continue
        if name != known or now[0] != was[0] or now[0] not in (int, _PLACES):
            return False
        if min(max(now[1:]), max(was[1:])) < least:
            return False
    return True


class ResumableEnvironment(ToolTextEnvironment):
    """An environment that notes how its template gets on, and can begin its loop with a later message."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: Progress | None = None
        """That of the render under way, if it is noted."""
        self.is_resumable = False
        """The template has a main loop."""
        self._by_value = False
        """It compares messages."""
        self.filters["_begun"] = self._begun
        self.filters["_rounded"] = self._rounded
        self.globals["namespace"] = self._namespace

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        loop = main_loop(source)
        if loop is not None:
            self.is_resumable = True
            self._by_value = compares_messages(source)
            line = loop.lineno
            loop.iter = nodes.Filter(loop.iter, "_begun", [], [], None, None, lineno=line)
            item = nodes.Name(loop.target.name, "load", lineno=line)  # type: ignore[attr-defined]
            each = nodes.Filter(item, "_rounded", [], [], None, None, lineno=line)
            loop.body.insert(0, nodes.ExprStmt(each, lineno=line))
        return super()._generate(source, name, filename, defer_init)

    def _begun(self, items: Any) -> Any:
        """Return the items of the main loop; all of them are charged."""
        if self.progress is None:
            return items
        self.progress.by_value = self._by_value
        start = self.progress.begin(items)
        return _Later(items, start) if start else items

    def _rounded(self, _message: Any) -> None:
        if self.progress is not None:
            self.progress.round()

    def _namespace(self, *values: Any, **attributes: Any) -> utils.Namespace:
        made = utils.Namespace(*values, **attributes)
        if self.progress is not None:
            self.progress.namespaces.append(made)
        return made


class ResumableTemplate(CompiledTemplate):
    """A template that can begin its main loop with a later message."""

    def __init__(self, environment: ResumableEnvironment, source: str, constants: Mapping[str, Any]) -> None:
        super().__init__(environment, source, constants)
        self._resumable = environment
        self._template.root_render_func.__globals__["LoopContext"] = _loop_context

    def render_noted(self, variables: Mapping[str, Any], progress: Progress) -> str:
        """Render, and note how far the template gets. Raises StaleError, and whatever the template raises."""
        self._resumable.progress = progress
        try:
            return self.render(variables, progress.write)
        finally:
            self._resumable.progress = None


class _Later:
    """The items of a loop that begins with one of the later ones."""

    __slots__ = ("items", "start")

    def __init__(self, items: list[Any], start: int) -> None:
        self.items, self.start = items, start

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items[self.start :])


def _loop_context(iterable: Any, *arguments: Any) -> runtime.LoopContext:
    """Return the ``loop`` variable of a loop; that of a resumed one counts the rounds that were left out."""
    loop = runtime.LoopContext(iterable, *arguments)
    if type(iterable) is _Later:
        loop.index0 = iterable.start - 1
        loop._current = iterable.items[iterable.start - 1]
    return loop


def _attributes(space: utils.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = space._Namespace__attrs
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value can be handed to another render: it is no message, and nothing that changes."""
    kind = type(value)
    if kind in LITERALS:
        return True
    return kind in (list, tuple) and all(map(_is_plain, value))
