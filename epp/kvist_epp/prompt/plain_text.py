"""The text of a request whose prompt is not known: without a model's files, or where they do not tell it.

It begins alike where prompts do: tools first, then one message after the other, without the punctuation of
JSON and without media. Only the routing history knows such texts; no engine computes them.
"""

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import MALFORMED, MODALITY, TEXT_FIELD
from kvist_epp.prompt.request_types import Chat, Request
from kvist_epp.prompt.tools import kept_text

_MARK: Final = "\0"
"""Begins the text of a chat, which no prompt does: the history of both is one."""
_GROWTH: Final = 4
"""Bytes of a text for each byte of the body, plus 1,000."""
_LEFT_OUT: Final = ("role", "content", "cache_control")
"""Fields of a message or part that are none of its data: clients move the mark of a cached part each turn."""
_TOOLS_KEY: Final = ("plain",)
_STARTS: Final = (b'"messages"', b'"prompt"', b'"input"')


def plain_texts(request: Request, body: bytes) -> list[bytes]:
    """Return a text for each prompt of a request; the body itself if it is not understood."""
    try:
        if request.chat is not None:
            text = "".join(_chat(request.chat)).encode("utf-8", "surrogatepass")
            return [text if len(text) <= _GROWTH * len(body) + 1_000 else _bare(body)]
        if request.prompts:
            return [_completion(prompt) for prompt in request.prompts]
    except MALFORMED:
        pass  # a shape that the engine refuses
    return [_bare(body)]


def _chat(chat: Chat) -> Iterator[str]:
    yield _MARK
    if chat.tools:
        tools = chat.tools
        yield kept_text(tools, _TOOLS_KEY, lambda: _json(tools))
    for message in chat.items if chat.refusal and chat.items is not None else chat.messages:
        content = message.get("content")
        yield f"\n{message.get('role') or message.get('type')}\n"
        if type(content) is str:
            yield content
        elif content is not None:
            yield from map(_part, content)
        if rest := {name: message[name] for name in message if name not in _LEFT_OUT}:
            yield _json(rest)


def _part(part: Any) -> str:
    """Return the text of a part of a content; of media a digest: a picture of a megabyte has few tokens."""
    if type(part) is str:
        return part
    kind = part.get("type")
    if type(text := part.get(TEXT_FIELD.get(kind, kind))) is str:
        return text
    if kind in MODALITY or not MODALITY.keys().isdisjoint(part) or "source" in part:
        return hashlib.blake2b(msgspec.json.encode(part), digest_size=16).hexdigest()
    content = part.get("content")
    within = "".join(map(_part, content)) if type(content) is list else content or ""
    return _json({name: part[name] for name in part if name not in _LEFT_OUT}) + within


def _completion(prompt: str | list[int]) -> bytes:
    """Return the text of a completion; token ids as four bytes each, which is what tokens have on average."""
    if type(prompt) is str:
        return prompt.encode("utf-8", "surrogatepass")
    return array("I", prompt).tobytes()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _bare(body: bytes) -> bytes:
    """Return the body from its messages or prompt on, so that what clients vary comes later."""
    starts = [at for name in _STARTS if (at := body.find(name)) >= 0]
    return body[min(starts) :] if starts else body
