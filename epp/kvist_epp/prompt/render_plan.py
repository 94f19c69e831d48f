"""Render chats of a known shape without running their template.

Chats of one *shape* have the same roles, tools and variables, and each message is a role and one text, or
parts that are all texts. A template does the same with all of them, as far as it does not look into the
texts, and where it does, a ``RenderPlan`` checks that it would see the same (``render_trace``). The prompt is
then the literals between the contents, which are joined: 40 messages take a tenth of the template's time.

A chat that fails a check, or whose shape is new, is rendered by the template. Shapes that come a second time
get a plan, which is compared with the template on that chat, and on one with other contents, before it is
used (``docs/decisions/0028``).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat
from kvist_epp.prompt.render_trace import Pieces, Step, Trace, TracedText
from kvist_epp.prompt.request_types import BILLING_HEADER, Chat
from kvist_epp.prompt.template_environment import now

MAX_PLANS: Final = 512
"""Plans and seen shapes of one template; the least recent give way."""
MAX_BYTES: Final = 16_000_000
"""Bound on the literals of the plans of one template, in characters; tools are most of it."""
MAX_MESSAGES: Final = 128
"""Messages of a chat that gets a plan."""
_MAX_FAILURES: Final = 8
"""Failed checks in a row after which a plan is made anew."""
_MAX_ATTEMPTS: Final = 3
"""Attempts to make a plan for a shape."""

_ROLES: Final = frozenset(("system", "user", "assistant", "tool"))
_SPECIAL: Final = (MEDIA_MARK, BILLING_HEADER)
"""Beginnings of texts that are not rendered as they are."""
_TEXTS: Final = ("text", "input_text", "output_text")
"""Types of parts whose text a template gets."""
_MARK: Final = "KVIST-MARK"
"""Put into contents to see whether a plan finds its place."""
_FIELDS: Final = frozenset((str, bool, int))

Speaker = str | tuple[str, int]
"""Role of a message, and the number of its parts where a template sees another number of them than one."""
Shape = tuple[Any, ...]
"""Who speaks, tools, ``add_generation_prompt``, and variables."""


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

    def render(self, contents: Sequence[str]) -> str | None:
        """Return the prompt; None if the template would look at these contents in another way."""
        values: Sequence[str] = contents
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

    def render(self, chat: Chat, variables: Mapping[str, Any]) -> str | None:
        """Return the prompt of a chat; None if its template has to be run.

        ``variables`` are those of the request that the template uses.
        """
        known = shape_of(chat, variables, self._style)
        if known is None:
            return None
        shape, contents = known
        plan = self._plans.get(shape)
        if isinstance(plan, RenderPlan):
            rendered = plan.render(contents)
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
            self._set(shape, self._made(chat, shape[0], contents) or plan + 1)
        return None

    def _set(self, shape: Shape, plan: RenderPlan | int) -> None:
        """Store a plan or a number of attempts; the least recent give way."""
        plans = self._plans
        self._size -= _size(plans.pop(shape, 0))
        plans[shape] = plan
        self._size += _size(plan)
        while len(plans) > MAX_PLANS or (self._size > MAX_BYTES and len(plans) > 1):
            self._size -= _size(plans.popitem(last=False)[1])

    def _made(self, chat: Chat, speakers: Sequence[Speaker], contents: list[str]) -> RenderPlan | None:
        """Return a plan that does with these contents, and with others, what the template does."""
        trace = Trace(contents)
        try:
            rendered = self._render_traced(trace, chat, self._messages(speakers, trace.contents))
            if trace.spoiled:
                return None
            plan = RenderPlan(trace, rendered, chat.tools)
            for texts in (contents, [_marked(text) for text in contents]):
                if plan.render(texts) != self._render(chat, self._messages(speakers, texts)):
                    return None
        except Exception:  # noqa: BLE001 a template may raise anything
            return None
        finally:
            trace.release()
        return plan

    def _messages(self, speakers: Sequence[Speaker], contents: Iterable[str]) -> list[dict[str, Any]]:
        """Return the messages as ``chat.template_messages`` does, with these contents."""
        messages: list[dict[str, Any]] = []
        following = iter(contents)
        for speaker in speakers:
            role, count = (speaker, 1) if isinstance(speaker, str) else speaker
            texts = list(islice(following, count))
            parts = self._style == "openai" and role != "tool"
            content = [{"type": "text", "text": text} for text in texts] if parts else texts[0]
            messages.append({"role": role, "content": content})
        return messages


def _size(plan: RenderPlan | int) -> int:
    return plan.size if isinstance(plan, RenderPlan) else 0


def _marked(text: str) -> str:
    """Return a text with something more in its middle, unless it is empty."""
    middle = len(text) // 2
    return f"{text[:middle]}{_MARK}{text[middle:]}" if text else text


def shape_of(
    chat: Chat, variables: Mapping[str, Any], style: ContentFormat = "string"
) -> tuple[Shape, list[str]] | None:
    """Return the shape of a chat and its contents; None if it gets no plan.

    ``variables`` are those of the request that the template uses, ``style`` is how it gets contents.
    """
    messages = chat.messages
    if len(messages) > MAX_MESSAGES or chat.documents is not None:
        return None
    try:
        speakers: tuple[Speaker, ...] = tuple([message["role"] for message in messages])
        contents = [message["content"] for message in messages]
        if not _ROLES.issuperset(speakers):
            return None
        if {*map(len, messages)} != {2} and not all(map(_only_content, messages)):
            return None
    except (KeyError, TypeError):  # a field is absent, or a role cannot be hashed
        return None
    if {*map(type, contents)} != {str}:
        found = _texts_of_parts(messages, style)
        if found is None:
            return None
        speakers, contents = found
    for content in contents:
        if content.startswith(_SPECIAL):
            return None
    shown = tuple([(name, type(value), value) for name, value in variables.items()]) if variables else ()
    if not _FIELDS.issuperset([kind for _, kind, _ in shown]):
        return None
    tools = 0 if chat.tools is None else id(chat.tools)
    return (speakers, tools, chat.add_generation_prompt, shown), contents


def _only_content(message: dict[str, Any]) -> bool:
    """Return whether a template sees nothing of a message but its role and its content.

    An answer that a client library sends back has all fields of the API, most of them null or empty.
    """
    if len(message) == 2:
        return True
    if message["role"] == "tool" and "tool_call_id" in message:
        return False
    if message.get("tool_calls") or type(message.get("name")) is str or type(message.get("task")) is str:
        return False
    return message.get("reasoning") is None and message.get("reasoning_content") is None


def _texts_of_parts(
    messages: list[dict[str, Any]], style: ContentFormat
) -> tuple[tuple[Speaker, ...], list[str]] | None:
    """Return who speaks, and the texts that a template of this style gets; None where a part is no text.

    A template that takes one text gets the parts joined by newlines, and so does any template of a tool's
    answer; another one gets them as they are.
    """
    speakers: list[Speaker] = []
    texts: list[str] = []
    for message in messages:
        role, content = message["role"], message["content"]
        as_parts = style == "openai" and role != "tool"
        if type(content) is str:
            found = [content]
        elif type(content) is list:
            found = []
            for part in content:
                text = part.get("text") if type(part) is dict and part.get("type") in _TEXTS else None
                # other fields of a part are seen by templates that take parts
                if type(text) is not str or text.startswith(_SPECIAL) or (as_parts and len(part) != 2):
                    return None
                found.append(text)
        else:
            return None
        if as_parts:
            speakers.append(role if len(found) == 1 else (role, len(found)))
            texts += found
        else:
            speakers.append(role)
            texts.append("\n".join(found))
    return (tuple(speakers), texts) if len(texts) <= MAX_MESSAGES else None
