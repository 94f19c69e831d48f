"""Parse the path and body of a request into what routing needs, once.

Only the fields that decide the prompt, the root of the index or the cost are decoded; everything else is
skipped. A value of an unexpected type never refuses a request that the engine might accept: it is routed by
load. Only requests that the engine would reject too are rejected: a body that is not JSON or names no model.

The shapes are vLLM 0.33's (``vllm.entrypoints.openai``, ``.anthropic``, ``.scale_out``).
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvist_epp.errors import BadRequest
from kvist_epp.prompt import messages_api, pooling_requests, responses_api
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.implied_path import (
    CHAT_PATH,
    COMPLETION_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    implied_path,
)
from kvist_epp.prompt.request_types import (
    Chat,
    Kind,
    Request,
    by_load,
    checked,
    count,
    text_or_none,
    utf8,
    variables,
)
from kvist_epp.prompt.tools import parse_tools

__all__ = ["Chat", "Kind", "Request", "parse"]


_CHAT: Final = Kind.CHAT
_COMPLETION: Final = Kind.COMPLETION  # look-ups in an Enum take 1,500 instructions each


class ChatBody(msgspec.Struct):
    """``POST /v1/chat/completions``, the fields that matter."""

    messages: list[dict[str, Any]]
    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    cache_salt: str | None = None
    session_id: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: str | None = None
    truncate_prompt_tokens: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class CompletionBody(msgspec.Struct):
    """Read the body of ``POST /v1/completions``."""

    prompt: str | list[Any] | None = None
    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = 16
    cache_salt: str | None = None
    session_id: Any = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class SinglePromptBody(CompletionBody):
    """Read such a body with one prompt, as text or token ids: no id is looked at again afterwards."""

    prompt: str | list[int] | None = None


class GenerateBody(msgspec.Struct):
    """``POST /inference/v1/generate``: token ids, and optionally a model."""

    token_ids: list[int]
    model: str | None = None
    stream: Any = None
    cache_salt: str | None = None
    features: Any = None
    sampling_params: dict[str, Any] | None = None


def parse(path: str, body: bytes, *, method: str = "POST") -> Request:
    """Parse one request.

    ``path`` is without the query; anything before ``/v1/`` is a gateway's prefix and ignored. A path or
    method that the gateway does not tell is empty: the body implies the path, and none is rejected for it.

    Raises:
        BadRequest: a known path with a body that is not JSON, or without a model that the path needs; names
            the field.
    """
    if not path and method in _POST:
        try:
            return parse(implied_path(body) or _NO_PATH, body)
        except BadRequest:
            return Request(kind=Kind.OTHER, size=len(body), why="shape")
    read = _READERS.get(path) or _READERS.get(path[path.rfind("/v1/") :])
    if read is None or method not in _POST:
        return Request(kind=Kind.OTHER, size=len(body), why="path")
    kind, reader = read
    try:
        return reader(body)
    except _UNREADABLE:
        plain = utf8(body)
    if plain is not None and plain is not body:  # engines read other encodings and byte order marks, too
        with contextlib.suppress(*_UNREADABLE):
            return reader(plain)
    return _by_load(kind, body, needs_model=reader is not _generate)


def _by_load(kind: Kind, body: bytes, *, needs_model: bool) -> Request:
    """Parse a body that the strict decoder rejected; the engine's own parser is more tolerant."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("body is not JSON", reason="bad-json") from None
    model = document.get("model") if isinstance(document, dict) else None
    if not needs_model and model is None and isinstance(document, dict):
        return Request(kind=kind, size=len(body), why="shape", salt=_loose_salt(document))
    return by_load(kind, model, body, "shape", salt=_loose_salt(document))


def _loose_salt(document: Any) -> str | None:
    return text_or_none(document.get("cache_salt")) if isinstance(document, dict) else None


def _chat(body: bytes) -> Request:
    sent = _chat_decoder.decode(body)
    why = _chat_refusal(sent)
    try:
        tools = parse_tools(sent.tools)
    except UnrenderableError as reason:
        why = str(reason)
    if why:
        unread = Chat(sent.messages, refusal=why)
        return by_load(Kind.CHAT, sent.model, body, why, salt=sent.cache_salt, chat=unread)
    limit = sent.max_tokens if sent.max_completion_tokens is None else sent.max_completion_tokens
    return Request(
        kind=_CHAT,
        model=checked(sent.model),
        salt=sent.cache_salt,
        max_tokens=count(limit),
        stream=sent.stream is True,
        n=count(sent.n) or 1,
        session=text_or_none(sent.session_id),
        size=len(body),
        exact=True,
        add_special_tokens=sent.add_special_tokens,
        chat=Chat(
            sent.messages,
            tools,
            sent.documents,
            variables(sent.chat_template_kwargs, sent.reasoning_effort),
            sent.add_generation_prompt,
            sent.continue_final_message,
            effort=sent.reasoning_effort,
            template_kwargs=sent.chat_template_kwargs,
            tools_unwanted=sent.tool_choice == "none",
            media_settings=_media_settings(sent),
        ),
    )


def _media_settings(sent: ChatBody) -> Any:
    settings = (sent.mm_processor_kwargs, sent.media_io_kwargs)
    return None if settings == (None, None) else settings


def _chat_refusal(sent: ChatBody) -> str:
    """Return why the prompt of this chat cannot be rendered here, or an empty string."""
    given = sent.chat_template_kwargs
    if sent.chat_template is not None or (given and not given.keys().isdisjoint(_RESERVED)):
        return "request-template"
    return _token_refusal(sent.truncate_prompt_tokens, sent.kv_transfer_params)


def _token_refusal(truncate: Any, transfer: dict[str, Any] | None) -> str:
    if truncate is not None:
        return "truncation"
    if transfer is not None and transfer.get("prompt_token_ids") is not None:
        return "forwarded-tokens"
    return ""


def _completion(body: bytes) -> Request:
    sent: CompletionBody
    prompts: tuple[str | list[int], ...]
    try:
        sent = _single_prompt_decoder.decode(body)
        prompts = () if sent.prompt is None or sent.prompt == [] else (sent.prompt,)
    except msgspec.ValidationError:
        sent = _completion_decoder.decode(body)
        prompts = _several(sent.prompt)
    why = _completion_refusal(sent) or ("" if prompts else "shape")
    if why:
        return by_load(Kind.COMPLETION, sent.model, body, why, salt=sent.cache_salt)
    return Request(
        kind=_COMPLETION,
        model=checked(sent.model),
        salt=sent.cache_salt,
        max_tokens=count(sent.max_tokens),
        stream=sent.stream is True,
        n=count(sent.n) or 1,
        session=text_or_none(sent.session_id),
        size=len(body),
        exact=True,
        prompts=prompts,
        add_special_tokens=sent.add_special_tokens,
    )


def _completion_refusal(sent: CompletionBody) -> str:
    if sent.suffix is not None:
        return "suffix"
    if sent.prompt_embeds is not None:
        return "embeds"
    return _token_refusal(sent.truncate_prompt_tokens, sent.kv_transfer_params)


def _several(prompt: str | list[Any] | None) -> tuple[str | list[int], ...]:
    """Return several texts, or several lists of token ids; empty for anything else."""
    if type(prompt) is not list:
        return ()
    if _all(prompt, str) or all(type(item) is list and item and _all(item, int) for item in prompt):
        return tuple(prompt)
    return ()


def _all(items: list[Any], kind: type) -> bool:
    return set(map(type, items)) == {kind}


def _generate(body: bytes) -> Request:
    sent = _generate_decoder.decode(body)
    why = "media" if sent.features is not None else "" if sent.token_ids else "shape"
    sampling = sent.sampling_params or {}
    return Request(
        kind=Kind.COMPLETION,
        model=sent.model,
        salt=sent.cache_salt,
        max_tokens=count(sampling.get("max_tokens")),
        stream=sent.stream is True,
        size=len(body),
        exact=not why,
        prompts=() if why else (sent.token_ids,),
        why=why,
    )


_UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_POST: Final = ("POST", "")
"""The method of all requests that compute something; a gateway may not tell it."""
_NO_PATH: Final = "/"
_RESERVED: Final = frozenset(
    ("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "continue_final_message")
)
"""Template variables that replace the prompt's own parts: the engine rejects or distrusts them."""

_chat_decoder: Final = msgspec.json.Decoder(ChatBody)
_completion_decoder: Final = msgspec.json.Decoder(CompletionBody)
_single_prompt_decoder: Final = msgspec.json.Decoder(SinglePromptBody)
_generate_decoder: Final = msgspec.json.Decoder(GenerateBody)


_READERS: Final[dict[str, tuple[Kind, Callable[[bytes], Request]]]] = {
    CHAT_PATH: (Kind.CHAT, _chat),
    COMPLETION_PATH: (Kind.COMPLETION, _completion),
    RESPONSES_PATH: (Kind.RESPONSES, responses_api.parse_responses),
    MESSAGES_PATH: (Kind.MESSAGES, messages_api.parse_messages),
    GENERATE_PATH: (Kind.COMPLETION, _generate),
    **dict.fromkeys(pooling_requests.PATHS, (Kind.POOLING, pooling_requests.parse_pooling)),
}
