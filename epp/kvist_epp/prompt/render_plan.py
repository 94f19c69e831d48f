"""Render chats of a known shape without running their template.

Chats of one *shape* have the same roles, tools and variables, and their messages the same fields: one text,
parts that are all texts, reasoning, calls of tools and their results. A template does the same with all of
them, as far as it does not look into the texts, and where it does, a ``RenderPlan`` checks that it would see
the same (``render_trace``). The prompt is then the literals between the contents, which are joined: 40 plain
messages take a fifth of the template's time or less, an agent's half of it.

A chat that fails a check, or whose shape is new, is rendered by the template. Shapes that come a second time
get a plan, which is compared with the template on that chat, and on one with other contents, before it is
used (``docs/decisions/0028``).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from kvist_epp.prompt.chat import (
    MEDIA_MARK,
    TEXT_FIELD,
    ContentFormat,
    UnrenderableError,
    call_arguments,
    content_parts,
    ordered_call,
    reasoning_of,
)
from kvist_epp.prompt.request_types import BILLING_HEADER, Chat
from kvist_epp.prompt.template_environment import now
from kvist_epp.prompt.traced_values import Pieces, Step, Trace, TracedText, Value

MAX_PLANS: Final = 512
"""Plans and seen shapes of one template; the least recent give way."""
MAX_CHARACTERS: Final = 16_000_000
"""Bound on the literals of the plans of one template, in characters; tools are most of it."""
MAX_MESSAGES: Final = 128
"""Messages of a chat that gets a plan."""
_MAX_FAILURES: Final = 8
"""Failed checks in a row after which a plan is made anew, and failed attempts after which few are made."""
_MAX_ATTEMPTS: Final = 3
"""Attempts to make a plan for a shape."""
PATIENCE: Final = 32
"""New shapes in a row after which most chats of that length go to the template without a look at their shape:
agents that do different things have a new one at each turn, and to find it takes a fifth of the template's
time."""
LONG: Final = 24
"""Chats of more messages are counted in bands: an agent is in each of them for some turns only."""
_BAND: Final = 16
_MAX_KINDS: Final = 4_096
_LOOKS: Final = 16
"""Then one chat of so many is looked at, and one attempt of so many is made."""

_ROLES: Final = frozenset(("system", "user", "assistant", "tool"))
_SPECIAL: Final = (MEDIA_MARK, BILLING_HEADER)
"""Beginnings of texts that are not rendered as they are."""
_TEXTS: Final = frozenset(kind for kind, field in TEXT_FIELD.items() if field == "text")
"""Types of parts whose text a template gets."""
_MARK: Final = "KVIST-MARK"
"""Put into contents to see whether a plan finds its place."""
_VARIABLE_TYPES: Final = frozenset((str, bool, int))
"""Types of variables that a shape may have."""

MAX_VALUES: Final = 4 * MAX_MESSAGES
"""Texts, names and arguments of a chat that gets a plan."""


class Turn(NamedTuple):
    """A message that is not one text alone. Its values are the texts, then ``id``, ``name`` and ``arguments``
    of each call, then the ``fields``."""

    role: str
    parts: int
    """Texts that a template sees."""
    calls: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    """Fields of each call and of its function, in their order."""
    fields: tuple[str, ...] = ()
    """``tool_call_id`` or ``reasoning``, and ``name``, as far as it has them."""


Speaker = str | Turn
"""A message by its role, if it is one text and nothing else."""
Shape = tuple[Any, ...]
"""Who speaks, tools, ``add_generation_prompt``, ``reorder_calls`` and variables."""


class RenderPlan:
    """Literals, values and checks of the chats of one shape."""

    __slots__ = ("_dates", "_form", "_order", "_steps", "failures", "size", "tools")

    def __init__(self, trace: Trace, rendered: str, tools: object) -> None:
        """``tools`` are kept, because the shape has their identity only."""
        pieces: Pieces = rendered.pieces if type(rendered) is TracedText else (rendered,)
        form, order = [""], []
        for piece in pieces:
            if type(piece) is int:
                order.append(piece)
                form += ("", "")
            else:
                form[-1] += str(piece)
        self._form: list[str] = form
        """Literals, with room for a value between each two."""
        self._order = order
        self._steps: tuple[Step, ...] = tuple(trace.steps)
        self._dates = tuple(trace.dates.items())
        self.tools = tools
        self.failures = 0
        self.size = sum(map(len, form))
        """Characters of the literals."""

    def render(self, contents: Sequence[Value]) -> str | None:
        """Return the prompt; None if the template would look at these contents in another way."""
        values: Sequence[Any] = contents
        if self._steps:
            values = list(contents)
            for function, number, arguments, expected in self._steps:
                result = function(values if number < 0 else values[number], *arguments)
                if expected is None:
                    values.append(result)
                elif result is not expected:
                    return None
        for pattern, shown in self._dates:
            if now(pattern) != shown:
                return None
        parts = self._form.copy()
        parts[1::2] = [values[number] for number in self._order]
        return "".join(parts)


class RenderPlans:
    """The plans of one template."""

    def __init__(
        self,
        style: ContentFormat,
        render: Callable[[Chat, list[dict[str, Any]]], str],
        render_traced: Callable[[Trace, Chat, list[dict[str, Any]]], str],
    ) -> None:
        """``style``: how contents are handed over. ``render`` renders messages by the template,
        ``render_traced`` those with contents that are traced; both may raise anything."""
        self._style = style
        self._render = render
        self._render_traced = render_traced
        self._plans: OrderedDict[Shape, RenderPlan | int] = OrderedDict()
        """The plan of a shape, or the number of attempts to make one; the least recent first."""
        self._size = 0
        self._failed: Counter[bool] = Counter()
        """Attempts in a row that failed, for chats with calls and without: some templates go through the
        arguments of calls, which no plan does, and an attempt takes ten times as long as a render."""
        self.passed_over = False
        """The last chat was not looked at."""
        self._new: Counter[tuple[int, bool, int]] = Counter()
        """New shapes since the last known one, by number of messages, whether the last is the result of a
        call, and identity of the tools: a program whose shapes come again mostly has tools of its own."""

    def render(self, chat: Chat, variables: Mapping[str, Any], *, patience: int = PATIENCE) -> str | None:
        """Return the prompt of a chat; None if its template has to be run.

        ``variables`` are those of the request that the template uses. ``patience``: new shapes in a row after
        which few chats are looked at.
        """
        count = len(chat.messages)
        called = count > 0 and chat.messages[-1].get("role") == "tool"
        kind = count if count < LONG else count // _BAND * _BAND, called, id(chat.tools)
        new = self._new[kind]
        self.passed_over = new >= patience and new % _LOOKS > 0
        if self.passed_over:
            self._new[kind] += 1
            return None
        known = shape_of(chat, variables, self._style)
        if known is None:
            return None
        shape, contents = known
        plan = self._plans.get(shape)
        self._new[kind] = new + 1 if plan is None else 0
        if len(self._new) > _MAX_KINDS:
            self._new.clear()
        if isinstance(plan, RenderPlan):
            try:
                rendered = plan.render(contents)
            except Exception:  # noqa: BLE001 arguments that are nested too deeply for JSON, say
                rendered = None
            if rendered is not None:
                plan.failures = 0
                self._plans.move_to_end(shape)
                return rendered
            plan.failures += 1
            if plan.failures >= _MAX_FAILURES:
                self._set(shape, 0)
        elif plan is None:
            self._set(shape, 0)
        elif plan < _MAX_ATTEMPTS:
            self._set(shape, self._attempt(chat, shape[0], contents) or plan + 1)
        return None

    def _attempt(self, chat: Chat, speakers: Sequence[Speaker], contents: list[Value]) -> RenderPlan | None:
        """Return a plan; None: it cannot be made, or none could for many shapes with calls, or without."""
        calls = any(isinstance(speaker, Turn) and speaker.calls for speaker in speakers)
        failed = self._failed[calls]
        made = None
        if failed < _MAX_FAILURES or failed % _LOOKS == 0:
            made = self._made(chat, speakers, contents)
        self._failed[calls] = failed + 1 if made is None else 0
        return made

    def _set(self, shape: Shape, plan: RenderPlan | int) -> None:
        """Store a plan or a number of attempts; the least recent give way."""
        plans = self._plans
        self._size -= _size(plans.pop(shape, 0))
        plans[shape] = plan
        self._size += _size(plan)
        while len(plans) > MAX_PLANS or (self._size > MAX_CHARACTERS and len(plans) > 1):
            self._size -= _size(plans.popitem(last=False)[1])

    def _made(self, chat: Chat, speakers: Sequence[Speaker], contents: list[Value]) -> RenderPlan | None:
        """Return a plan that does with these contents, and with others, what the template does."""
        trace = Trace(contents)
        try:
            rendered = self._render_traced(trace, chat, self._messages(chat, speakers, trace.contents))
            if trace.spoiled:
                return None
            plan = RenderPlan(trace, rendered, chat.tools)
            for texts in (contents, [_marked(value) for value in contents]):
                if plan.render(texts) != self._render(chat, self._messages(chat, speakers, texts)):
                    return None
        except Exception:  # noqa: BLE001 a template may raise anything
            return None
        finally:
            trace.release()
        return plan

    def _messages(
        self, chat: Chat, speakers: Sequence[Speaker], values: Iterable[Value]
    ) -> list[dict[str, Any]]:
        """Return the messages as ``chat.template_messages`` does, with these values."""
        messages: list[dict[str, Any]] = []
        following = iter(values)
        for speaker in speakers:
            role, count, calls, fields = Turn(speaker, 1) if isinstance(speaker, str) else speaker
            texts = list(islice(following, count))
            parts = _takes_parts(self._style, role)
            content = [{"type": "text", "text": text} for text in texts] if parts else texts[0]
            message: dict[str, Any] = {"role": role, "content": content}
            if calls:
                made = [_call(*names, following) for names in calls]
                reorder = chat.reorder_calls
                message["tool_calls"] = [ordered_call(*call, reorder=reorder) for call in made]
            for field in fields:
                message[field] = next(following)
                if field == "reasoning":
                    message["reasoning_content"] = message[field]
            messages.append(message)
        return messages


def _size(plan: RenderPlan | int) -> int:
    return plan.size if isinstance(plan, RenderPlan) else 0


def _call(
    names: Sequence[str], of_function: Sequence[str], values: Iterator[Value]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call and its function with the next three values, fields in this order."""
    fields = {"id": next(values), "type": "function", "function": {}}
    function = {"name": next(values), "arguments": next(values)}
    return {name: fields[name] for name in names}, {name: function[name] for name in of_function}


def _marked(value: Value) -> Value:
    """Return a text with something more in its middle, unless it is empty, or an object with a field more."""
    if isinstance(value, dict):
        return {**value, _MARK: [_MARK]}
    middle = len(value) // 2
    return f"{value[:middle]}{_MARK}{value[middle:]}" if value else value


def _takes_parts(style: ContentFormat, role: str) -> bool:
    """Return whether a template gets contents of this role as parts: it never does those of tools."""
    return style == "openai" and role != "tool"


def shape_of(
    chat: Chat, variables: Mapping[str, Any], style: ContentFormat = "string"
) -> tuple[Shape, list[Value]] | None:
    """Return the shape of a chat and its values; None if it gets no plan.

    ``variables`` are those of the request that the template uses, ``style`` is how it gets contents.
    """
    messages = chat.messages
    if not messages or len(messages) > MAX_MESSAGES or chat.documents is not None:
        return None
    speakers: tuple[Speaker, ...]
    values: list[Any]
    try:
        speakers = tuple([message["role"] for message in messages])
        if not _ROLES.issuperset(speakers):
            return None
        values = [message.get("content") for message in messages]
        if {*map(type, values)} == {str} and {*map(len, messages)} == {2}:  # texts, and nothing else
            for text in values:
                if text.startswith(_SPECIAL):
                    return None
        else:
            values = []
            speakers = tuple([_speaker(message, style, values) for message in messages])
            if len(values) > MAX_VALUES:
                return None
    except (KeyError, TypeError, UnrenderableError, _Odd):  # no role, or one that cannot be hashed, say
        return None
    shown = tuple([(name, type(value), value) for name, value in variables.items()]) if variables else ()
    if not _VARIABLE_TYPES.issuperset([kind for _, kind, _ in shown]):
        return None
    tools = 0 if chat.tools is None else id(chat.tools)
    return (speakers, tools, chat.add_generation_prompt, chat.reorder_calls, shown), values


class _Odd(Exception):
    """A message that is left to the template."""


def _speaker(message: dict[str, Any], style: ContentFormat, values: list[Value]) -> Speaker:
    """Return the shape of one message, and add its values.

    An answer that a client library sends back has all fields of the API, most of them null or empty: a
    template sees nothing of these. Raises _Odd.
    """
    role: str = message["role"]
    texts = _texts(message.get("content"), style, role)
    values += texts
    calls: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    fields: dict[str, Any] = {}
    if role == "assistant":
        calls += [_call_fields(call, values) for call in message.get("tool_calls") or ()]
        if (reasoning := reasoning_of(message)) is not None:
            fields["reasoning"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    if type(message.get("name")) is str:
        fields["name"] = message["name"]
    if type(message.get("task")) is str or not all(type(value) is str for value in fields.values()):
        raise _Odd
    values += fields.values()
    if len(texts) == 1 and not calls and not fields:
        return role
    return Turn(role, len(texts), tuple(calls), tuple(fields))


def _texts(content: Any, style: ContentFormat, role: str) -> list[str]:
    """Return the texts that a template gets of a content: the parts, or one text of their lines. Raises _Odd
    or UnrenderableError where a part is no text, or has fields that the template would see."""
    parts = _takes_parts(style, role)
    texts: list[str] = []
    for part in content_parts(content):
        text = part
        if type(part) is dict:
            text = part.get("text") if part.get("type") in _TEXTS else None
            if parts and len(part) != 2:
                raise _Odd
        if type(text) is not str or text.startswith(_SPECIAL):
            raise _Odd
        texts.append(text)
    if parts:
        return texts
    return ["\n".join(filter(None, texts) if style == "string" else texts)]


def _call_fields(call: dict[str, Any], values: list[Value]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields of a call and of its function, and add its id, name and arguments. Raises _Odd."""
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or len(call) != 3 or len(function) != 2 or call.get("type") != "function":
        raise _Odd
    sent = call["id"], function["name"], function["arguments"]
    if {*map(type, sent)} != {str}:
        raise _Odd
    values += (sent[0], sent[1], call_arguments(sent[2]))
    return tuple(call), tuple(function)
