"""A model's chat template: compiled once, rendered as transformers and vLLM render it, and bounded.

The environment bounds the steps of a render (``template_environment``). The prompt is bounded by
``GROWTH_LIMIT``. Templates join texts in loops, which copies up to the whole prompt a message, hence
``COPY_LIMIT``. What exceeds them is routed by load, as are templates that raise. Clients cannot send
templates; filters are left to the model's author.

Chats of a shape that has been seen before are rendered by a plan instead (``render_plan``).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jinja2 import meta, nodes

from kvist_epp.prompt import chat as chats
from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat, UnrenderableError
from kvist_epp.prompt.render_plan import RenderPlans
from kvist_epp.prompt.render_trace import NO_TRACE, TracingEnvironment
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template_environment import CompiledTemplate, TemplateEnvironment, TooMuchWork
from kvist_epp.prompt.traced_values import Trace, UntraceableError

COPY_LIMIT: Final = 4_000_000_000
"""Bound on messages times bytes of the body: half a second of copying for the worst template."""

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
        environment = TemplateEnvironment()
        tree = environment.parse(source)
        self._variables = meta.find_undeclared_variables(tree)
        constants = {**specials, **{name: defaults[name] for name in defaults if name in self._variables}}
        self._compiled = CompiledTemplate(environment, source, constants)
        self._has_content = "content" in source
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.style = style or detect_content_format(tree)
        """``string`` or ``openai``: how contents are handed over."""
        self._plans = self._traced(source, constants)

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt up to the first media item; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the template fails or works too long, or a message has an unknown shape.
        """
        if len(chat.messages) * size > COPY_LIMIT:
            raise UnrenderableError("work")
        rendered = None
        if self._plans is not None and not chat.continue_final_message:
            rendered = self._plans.render(chat, self._given(chat))
        if rendered is None:
            rendered = self._rendered(chat)
        if len(rendered) > GROWTH_LIMIT * size + 1_000_000:
            raise UnrenderableError("work")
        return rendered

    def _traced(self, source: str, constants: Variables) -> RenderPlans | None:
        """Return an empty set of plans; None if the template has parts that cannot be traced."""
        environment = TracingEnvironment()
        try:
            compiled = CompiledTemplate(environment, source, constants)
        except UntraceableError:
            return None

        def render(trace: Trace, chat: Chat, messages: list[dict[str, Any]]) -> str:
            environment.trace = trace
            try:
                return compiled.render(self._context(chat, messages))
            finally:
                environment.trace = NO_TRACE

        return RenderPlans(self.style, lambda chat, messages: self._run(chat, messages, media=False), render)

    def _rendered(self, chat: Chat) -> str:
        messages = chats.template_messages(chat.messages, self.style, reorder_calls=chat.reorder_calls)
        media = chats.have_media(messages)
        if not self._knows_developer:
            messages = chats.merge_developer_messages(messages)
        if not messages:
            raise UnrenderableError("empty")
        if chat.continue_final_message:
            return self._continued(chat, messages, media=media)
        return self._run(chat, messages, media=media)

    def _given(self, chat: Chat) -> Variables:
        """Return the variables of the request that the template uses."""
        return {name: chat.variables[name] for name in chat.variables if name in self._variables}

    def _context(self, chat: Chat, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._given(chat),
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def _run(self, chat: Chat, messages: list[dict[str, Any]], *, media: bool) -> str:
        try:
            rendered = self._compiled.render(self._context(chat, messages))
        except TooMuchWork:
            raise UnrenderableError("work") from None
        except Exception:  # noqa: BLE001 a template may raise anything; it must never fail a request
            raise UnrenderableError("template") from None
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
