"""The path of a request whose gateway does not send one, as its body implies it.

NGINX Gateway Fabric asks the picker without ``:path`` (its ``endpoint_picker.go``, 2.6). Without a path, no
prompt would be known and all its requests would be routed by load. A wrong guess costs prefix hits, or counts
tokens that no engine computes; the request itself goes to its engine unchanged.
"""

import re
from typing import Any, Final

import msgspec

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
RESPONSES_PATH: Final = "/v1/responses"
MESSAGES_PATH: Final = "/v1/messages"
GENERATE_PATH: Final = "/v1/generate"
POOLING_PATH: Final = "/pooling"
"""For all requests to embedding, rerank, score and classification models, which are parsed alike."""

_ABSENT: Final = msgspec.Raw()


class _Message(msgspec.Struct):
    role: Any = None


class _ApiMembers(msgspec.Struct):
    """The members of a body that tell its API; only roles are decoded."""

    messages: list[_Message] | None = None
    prompt: msgspec.Raw = _ABSENT
    token_ids: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    stop_sequences: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    thinking: msgspec.Raw = _ABSENT
    encoding_format: msgspec.Raw = _ABSENT
    dimensions: msgspec.Raw = _ABSENT
    texts: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    query: msgspec.Raw = _ABSENT
    queries: msgspec.Raw = _ABSENT
    text_1: msgspec.Raw = _ABSENT
    data_1: msgspec.Raw = _ABSENT


_OF_MESSAGES: Final = ("system", "stop_sequences")
"""Members of Anthropic's API that OpenAI's chats do not have."""
_INSIDE_MESSAGES: Final = (("tools", b'"input_schema"'), ("thinking", b'"budget_tokens"'))
"""Members that both have, and what is inside them in Anthropic's API only."""
_ROLES_OF_CHATS: Final = frozenset(("system", "developer", "tool", "function"))
_OF_EMBEDDING: Final = ("encoding_format", "dimensions")
_OF_POOLING: Final = ("texts", "inputs", "query", "queries", "text_1", "data_1")
_LIST_TO_EMBED: Final = re.compile(rb'\s*\[\s*["\d[]')
"""A list of texts, of token ids, or of lists of them. The Responses API takes lists of objects."""

_decoder: Final = msgspec.json.Decoder(_ApiMembers)


def implied_path(body: bytes) -> str:
    """Return the path to which a client would send ``body``; empty if it could be any.

    ``messages`` without a sign of Anthropic's API are OpenAI's. Clients of embeddings name a format or
    dimensions (OpenAI's library always does), or have a list to embed.
    """
    try:
        sent = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""

    def has(*names: str) -> bool:
        return any(_is_set(getattr(sent, name)) for name in names)

    if has(*_OF_EMBEDDING, *_OF_POOLING):
        return POOLING_PATH
    if sent.messages is not None:
        if any(type(one.role) is str and one.role in _ROLES_OF_CHATS for one in sent.messages):
            return CHAT_PATH
        inside = any(mark in bytes(getattr(sent, name)) for name, mark in _INSIDE_MESSAGES)
        return MESSAGES_PATH if inside or has(*_OF_MESSAGES) else CHAT_PATH
    if has("input"):
        return POOLING_PATH if _LIST_TO_EMBED.match(sent.input) else RESPONSES_PATH
    if has("prompt"):
        return COMPLETION_PATH
    return GENERATE_PATH if has("token_ids") else ""


def _is_set(value: msgspec.Raw) -> bool:
    """Return whether a member is there, and not null."""
    encoded = memoryview(value)
    return encoded.nbytes > 4 or bytes(encoded) not in {b"", b"null"}
