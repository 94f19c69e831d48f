"""What a request becomes, and the small checks that the readers of all APIs share."""

import enum
from typing import Any, Final

import msgspec

from kvist_epp.errors import BadRequest

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""How a system text begins that some clients send with a value that always changes; the engine drops it."""


class Kind(enum.Enum):
    """Which API a request speaks."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
    """Routed by load: an unknown path, or no POST."""


class Chat(msgspec.Struct, frozen=True):
    """What a chat template is rendered with."""

    messages: list[dict[str, Any]]
    """In the chat API's own shape, as sent."""
    tools: list[dict[str, Any]] | None = None
    """As the template sees them (``chat.functions``)."""
    documents: Any = None
    variables: dict[str, Any] = {}
    """``chat_template_kwargs`` and what the engine derives from ``reasoning_effort``."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reorder_calls: bool = True
    """Tool calls pass the chat API's validation, which puts their fields in its own order."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready to be rendered and routed.

    At most one of ``chat`` and ``prompts`` is set; neither means: by load, and ``why`` says for what reason.
    """

    kind: Kind
    model: str | None = None
    """The served model or LoRA adapter; None only for ``OTHER`` and paths that need none."""
    salt: str | None = None
    """``cache_salt``: part of the index's root."""
    max_tokens: int | None = None
    stream: bool = False
    n: int = 1
    session: str | None = None
    """``session_id`` of the body."""
    size: int = 0
    """Bytes of the body."""
    exact: bool = False
    """The rendering of this shape is proven equal to the engine's (``tests/engine/test_render.py``)."""
    chat: Chat | None = None
    prompts: tuple[str | list[int], ...] = ()
    """Texts, or token ids, of a completion."""
    add_special_tokens: bool = False
    """The engine lets the tokenizer add its own tokens, such as BOS."""
    why: str = ""
    """Why it is routed by load: a short fixed word for a metric, never text of the request."""


def by_load(kind: Kind, model: Any, body: bytes, why: str, **known: Any) -> Request:
    """A request whose prompt stays unknown."""
    return Request(kind=kind, model=checked(model), size=len(body), why=why, **known)


def checked(model: Any) -> str:
    """The model's name.

    Raises:
        BadRequest: absent, empty or no string.
    """
    if type(model) is not str or not model:
        raise BadRequest("field 'model' must be a non-empty string")
    return model


def count(value: Any) -> int | None:
    """A number of tokens or choices; None when the client gave something else."""
    return value if type(value) is int and value >= 0 else None


def text_or_none(value: Any) -> str | None:
    """A string; None for anything else."""
    return value if type(value) is str else None


def variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Template variables as vLLM merges them: null and ``"auto"`` mean unset; an effort implies thinking."""
    if not given and effort is None:
        return {}
    merged = dict(given or {})
    if effort is not None:
        merged["reasoning_effort"] = effort
        merged.setdefault("enable_thinking", effort != "none")
    return {name: value for name, value in merged.items() if value is not None and value != "auto"}
