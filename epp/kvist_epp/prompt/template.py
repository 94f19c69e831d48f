"""A model's chat template: compiled once, rendered as transformers and vLLM render it, and bounded.

The environment bounds the steps of a render (``template_environment``). The prompt is bounded by
``GROWTH_LIMIT``. Templates join texts in loops, which copies up to the whole prompt a message, hence
``COPY_LIMIT``. What exceeds them is not rendered, as are templates that raise. Clients cannot send
templates; filters are left to the model's author.

Chats of a shape that has been seen before are rendered by a plan instead (``render_plan``).
"""

from collections.abc import Mapping
from typing import Any, Final

from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist_epp.prompt import chat as chats
from kvist_epp.prompt.chat import MEDIA_MARK, ContentFormat, UnrenderableError
from kvist_epp.prompt.checkpoints import MIN_MESSAGES, Checkpoints
from kvist_epp.prompt.render_plan import PATIENCE, RenderPlans
from kvist_epp.prompt.render_trace import NO_TRACE, TracingEnvironment
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.resumed_render import (
    Checkpoint,
    Progress,
    ResumableEnvironment,
    ResumableTemplate,
    StaleError,
)
from kvist_epp.prompt.template_environment import CompiledTemplate, TooMuchWork
from kvist_epp.prompt.template_loops import detect_content_format
from kvist_epp.prompt.traced_values import Trace, UntraceableError

COPY_LIMIT: Final = 4_000_000_000
"""Bound on messages times bytes of the body: half a second of copying for the worst template."""

GROWTH_LIMIT: Final = 16
"""Maximum ratio of prompt to request size, plus a megabyte: indented tools grow three- to fivefold."""

Variables = Mapping[str, Any]
NONE: Final[Variables] = {}

_PATIENCE_OF_LONG: Final = 4
"""New shapes in a row after which long chats are rendered from their checkpoints, if they have some."""
_CONTINUE: Final = "KVIST-CONTINUES-HERE "
"""Mark at the end of the message to continue; its blank shows whether the template trims."""


_AROUND: Final = ("Before", "Behind")
"""Texts around a medium, to see what a template writes for it."""


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
        environment = ResumableEnvironment()
        tree = environment.parse(source)
        self._variables = meta.find_undeclared_variables(tree)
        constants = {**specials, **{name: defaults[name] for name in defaults if name in self._variables}}
        self._compiled = ResumableTemplate(environment, source, constants)
        self._has_content = "content" in source
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.style = style or detect_content_format(tree)
        """``string`` or ``openai``: how contents are handed over."""
        self._plans = self._traced(source, constants)
        self._checkpoints = Checkpoints(self._run) if environment.is_resumable else None
        self._media_texts: dict[str, str] = {}

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt, with ``media_text`` for each medium; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the template fails or works too long, or a message has an unknown shape.
        """
        if chat.refusal or len(chat.messages) * size > COPY_LIMIT:
            raise UnrenderableError(chat.refusal or "work")
        given, checkpoints = self._given(chat), self._checkpoints_for(chat)
        plans = None if chat.continue_final_message else self._plans
        rendered = known = None
        if plans is not None:
            patience = PATIENCE if checkpoints is None else _PATIENCE_OF_LONG
            rendered = plans.render(chat, given, patience=patience)
        if rendered is None and checkpoints is not None:
            known = checkpoints.find(chat, given)
            if known is None and plans is not None and plans.passed_over:
                rendered = plans.render(chat, given)
        if rendered is None:
            rendered = self._rendered(chat, checkpoints, known)
        if len(rendered) > GROWTH_LIMIT * size + 1_000_000:
            raise UnrenderableError("work")
        return rendered

    def complete(self, chat: Chat) -> str:
        """Return the prompt as the template alone writes it, which plans and checkpoints have to give, too.

        Raises:
            UnrenderableError: as ``render``.
        """
        return self._rendered(chat)

    def media_text(self, kind: str) -> str:
        """Return what stands for each medium of this kind ("image", …) in the prompt; empty: it does not
        show."""
        found = self._media_texts.get(kind)
        if found is None:
            found = self._media_texts[kind] = MEDIA_MARK if self.style == "string" else self._shown(kind)
        return found

    def _shown(self, kind: str) -> str:
        """Return by what a message with a medium is longer than one without, or what is between two texts.

        White space around it belongs to the texts: templates put it where they join parts.
        """
        field = next(name for name in chats.MODALITY if chats.MODALITY[name] == kind)
        texts = [{"type": "text", "text": text} for text in _AROUND]
        try:
            without, shown = (
                self.complete(Chat([{"role": "user", "content": [texts[0], *media, texts[1]]}]))
                for media in ([], [{"type": field, field: {}}])
            )
        except UnrenderableError:
            return ""
        longer = len(shown) - len(without)
        at = next((at for at in range(len(without)) if shown[at : at + 1] != without[at]), len(without))
        if longer > 0 and shown[:at] + shown[at + longer :] == without:
            return shown[at : at + longer].strip()
        return shown.partition(_AROUND[0])[2].partition(_AROUND[1])[0].strip()

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

        return RenderPlans(self.style, self._run, render)

    def _checkpoints_for(self, chat: Chat) -> Checkpoints | None:
        """Return the checkpoints, if this chat can have one."""
        short = len(chat.messages) < MIN_MESSAGES
        if short or chat.continue_final_message or chat.documents is not None:
            return None
        return self._checkpoints

    def _rendered(
        self, chat: Chat, checkpoints: Checkpoints | None = None, known: Checkpoint | None = None
    ) -> str:
        """Return the prompt that the template makes, from a checkpoint on if there are any."""
        messages = seen = chats.template_messages(chat.messages, self.style, reorder_calls=chat.reorder_calls)
        media = chats.have_media(messages)
        if not self._knows_developer:
            messages = chats.merge_developer_messages(messages)
        if not messages:
            raise UnrenderableError("empty")
        if chat.continue_final_message:
            return self._continued(chat, messages)
        if checkpoints is not None and not media and messages is seen:
            return checkpoints.render(chat, self._given(chat), messages, known)
        return self._run(chat, messages)

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

    def _run(self, chat: Chat, messages: list[dict[str, Any]], progress: Progress | None = None) -> str:
        """Run the template. Raises StaleError if it cannot be resumed, and UnrenderableError."""
        try:
            variables = self._context(chat, messages)
            if progress is None:
                return self._compiled.render(variables)
            return self._compiled.render_noted(variables, progress)
        except TooMuchWork:
            raise UnrenderableError("work") from None
        except StaleError:
            raise
        except Exception:  # noqa: BLE001 a template may raise anything; it must never fail a request
            raise UnrenderableError("template") from None

    def _continued(self, chat: Chat, messages: list[dict[str, Any]]) -> str:
        """Return the prompt up to the end of the last message's text, which the model is to continue."""
        if chat.add_generation_prompt or not self._has_content:
            raise UnrenderableError("continue")
        last, text = _marked(messages[-1])
        rendered = self._run(chat, [*messages[:-1], last])
        at = rendered.rfind(_CONTINUE.strip())
        if at < 0 or text.strip() not in rendered:
            raise UnrenderableError("continue")
        trimmed = not rendered.startswith(_CONTINUE, at)
        return rendered[:at].rstrip() if trimmed else rendered[:at]


def requires_system_first(source: str | None) -> bool:
    """Return whether engines take the template for one that refuses system messages between others.

    vLLM renders four messages in an environment without the functions of transformers, and any error counts
    (``AnthropicServingMessages._detect_merge_inline_system``): also that there is no ``strftime_now``.
    """
    if not source:
        return True
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 a template may raise anything
        return True
    return False


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
