"""The parsed request, and the checks that the parsers of all APIs share."""

import enum
import json
from typing import Any, Final

import msgspec

from kvist_epp.errors import BadRequest

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""Prefix of a system text that some clients send with an ever-changing value; vLLM removes the text."""


class Kind(enum.Enum):
    """The API of a request."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    POOLING = "pooling"
    """Embedding, rerank, score and classification; routed by load."""
    OTHER = "other"
    """An unknown path or method other than POST; routed by load."""


class Chat(msgspec.Struct, frozen=True):
    """The variables that a chat template is rendered with."""

    messages: list[dict[str, Any]]
    """Messages in the shape of the chat API, as sent."""
    tools: list[dict[str, Any]] | None = None
    """Tools as the template sees them (``tools.template_tools``)."""
    documents: Any = None
    variables: dict[str, Any] = {}
    """``chat_template_kwargs`` and what the engine derives from ``reasoning_effort``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reorder_calls: bool = True
    """True if tool calls pass the chat API's validation, which reorders their fields."""
    effort: str | None = None
    """``reasoning_effort`` of the request itself, which is among the variables, too."""
    template_kwargs: dict[str, Any] | None = None
    """``chat_template_kwargs`` as sent, of which ``variables`` was made."""
    thinking_off: bool = False
    """True if a request of the Messages API switches thinking off, which is an effort to templates."""
    tools_unwanted: bool = False
    """True if the request declares tools and forbids to call one (``tool_choice``: none)."""
    parsed_arguments: bool = False
    """True if the arguments of calls were sent as objects, which are printed here without blanks."""
    items: list[dict[str, Any]] | None = None
    """Items of the Responses API, as sent, behind its instructions; several of them may be one message."""
    inline_system: bool = False
    """True if there are system messages between the others, which a template may not take (Claude Code)."""
    media_settings: Any = None
    """What the request says of how media are read, on which their tokens depend; None: nothing."""
    refusal: str = ""
    """Why no template can render it, or its items cannot be messages; empty if one can."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready to be rendered and routed.

    At most one of ``chat`` and ``prompts`` is set; neither, or a chat with a ``refusal``, means that the
    prompt cannot be rendered, for the reason ``why``.
    """

    kind: Kind
    model: str | None = None
    """The served model or LoRA adapter; None for ``OTHER`` and on paths that need none."""
    salt: str | None = None
    """``cache_salt``: part of the index's root."""
    max_tokens: int | None = None
    stream: bool = False
    n: int = 1
    session: str | None = None
    """``session_id`` of the body."""
    size: int = 0
    """Bytes of the body."""
    work: int = 0
    """Bytes of text that the engine computes for a request of kind ``POOLING``; 0 = not known."""
    exact: bool = False
    """True if the rendering of this shape is proven equal to vLLM's (``tests/engine/test_render.py``)."""
    chat: Chat | None = None
    prompts: tuple[str | list[int], ...] = ()
    """Texts, or token ids, of a completion."""
    add_special_tokens: bool = False
    """True if the engine lets the tokenizer add its special tokens, such as BOS."""
    why: str = ""
    """Reason for rendering nothing: a short fixed word for a metric, never text of the request."""


def by_load(kind: Kind, model: Any, body: bytes, why: str, **known: Any) -> Request:
    """Return a request whose prompt is unknown. Raises BadRequest as ``checked`` does."""
    return Request(kind=kind, model=checked(model), size=len(body), why=why, **known)


def checked(model: Any) -> str:
    """Return the model's name.

    Raises:
        BadRequest: the name is absent, empty or not a string.
    """
    if type(model) is not str or not model:
        raise BadRequest("field 'model' must be a non-empty string")
    return model


def count(value: Any) -> int | None:
    """Return a number of tokens or choices, or None for any other value."""
    return value if type(value) is int and value >= 0 else None


def text_or_none(value: Any) -> str | None:
    """Return a string, or None for any other value."""
    return value if type(value) is str else None


def replaces_prompt(given: dict[str, Any] | None) -> bool:
    """Return whether ``chat_template_kwargs`` of the Responses or Messages API name parts of the prompt."""
    return given is not None and not given.keys().isdisjoint(("chat_template", "tools", "conversation"))


def variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Merge template variables as vLLM does: null and ``"auto"`` are unset, an effort implies thinking."""
    if not given and effort is None:
        return {}
    merged = dict(given or {})
    if effort is not None:
        if effort != "auto":  # which an engine's map may make of another; it is no value
            merged["reasoning_effort"] = effort
        merged.setdefault("enable_thinking", effort != "none")
    return {name: value for name, value in merged.items() if value is not None and value != "auto"}


def utf8(body: bytes) -> bytes | None:
    """Return a JSON text as UTF-8 without a byte order mark; None if it is in no encoding of JSON."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return None
