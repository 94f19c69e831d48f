"""The texts of pictures, sound and video in prompts, learned from the events of engines. Pure.

A chat template writes a short text for each medium. The engine makes placeholder tokens of it, as many as the
medium's size needs, and the hash of its blocks covers an identifier that the engine computes from the decoded
content. Neither follows from the request without the model's processor. But the events of the first request
with a medium show both: in the index its identifier and tokens follow the text before it, and are followed by
the text behind it.

Worked example, ``<vs>`` and ``<ve>`` being the template's tokens around a picture:

    rendered by the template     …user <vs><pad><ve>What is it?<|im_end|>…
    matched, medium unknown      …user [UNKNOWN digest]<vs><pad><ve>What is it?<|im_end|>…
    in the index                 …user <vs>[ITEM identity]<pad><pad><pad><ve>What is it?<|im_e
    learned for this digest                <vs>[ITEM identity]<pad><pad><pad><ve>

From then on this text takes the place of the template's in each prompt with that medium, so that prompts with
media are matched to their end. An unknown medium ends a match; its digest keeps apart in the routing history
what differs only in its media.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvist_epp.index.media_marks import DIGITS, ITEM, MARK_SIZE, TOKEN, UNKNOWN
from kvist_epp.index.routing_history import shared_size
from kvist_epp.prompt.chat import UnrenderableError, medium_kind
from kvist_epp.prompt.request_types import Chat

MEMORY: Final = 32 << 20
"""Bytes of texts that are kept; those of the media that were not asked for longest are dropped first."""
KEPT: Final = 500
"""Bytes that are kept besides each text."""
CONFIRMING: Final = 12
"""Bytes of the text behind a medium that tell where the medium's own text ends."""
CHANGES: Final = 3
"""After so many changes of its text a medium stays unknown: engines of one pool do not agree on it."""
CHANGED: Final = 1_000
"""Changes that are counted, before counting begins anew."""
ATTEMPTS: Final = 16
"""Texts of an engine that one prompt is compared with; each shows more of it than the one before."""
MOST: Final = 1_000
"""Media in one request; with more it is matched by its plain text."""
FAR: Final = 256
"""Bytes before a medium's mark that may be the engine's or the template's words for it."""


class Medium(NamedTuple):
    """A medium of a request."""

    kind: str
    digest: bytes
    """``DIGITS`` characters, of what was sent and of what else changes its tokens."""
    lasting: bool = True
    """False if only a URL was sent, whose content may change."""


class MediaPrompt(bytes):
    """A prompt with media."""

    texts: "MediaTexts"
    """What has written it, and learns from what the engine makes of it."""
    media: Sequence[Medium]
    complete: bool
    """The texts of all media are known; otherwise nothing behind the first unknown one is in the index."""
    attempts: int
    """How often it was compared with the text of an engine."""

    @property
    def lasting(self) -> bool:
        """Whether what was sent for each medium is always the same medium."""
        return all(medium.lasting for medium in self.media)


def media_of(chat: Chat, model: str | None = None) -> list[Medium]:
    """Return the media of a chat in the order of their parts; ``model``: the name in the request, perhaps of
    an adapter.

    Raises:
        UnrenderableError: there are too many.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for message in chat.messages:
        content = message.get("content")
        if type(content) is list:
            found += [(kind, part) for part in content if (kind := medium_kind(part))]
    if len(found) > MOST:
        raise UnrenderableError("media")
    if not found:
        return []
    # half the time of blake2b where the processor has instructions for it
    settings = hashlib.sha256(_encoder.encode((model, chat.media_settings))).digest()
    return [_medium(kind, part, settings) for kind, part in found]


def _medium(kind: str, part: dict[str, Any], settings: bytes) -> Medium:
    named = part.get("uuid")  # is its identifier, whatever its content is
    sent = {name: part[name] for name in part if name != "cache_control"} if named is None else named
    digest = hashlib.sha256(settings)
    digest.update(_encoder.encode((kind, named is None, sent)))
    lasting = named is not None or not _has_url(part)
    return Medium(kind, digest.hexdigest()[:DIGITS].encode(), lasting)


def _has_url(part: dict[str, Any]) -> bool:
    """Return whether a part names a place where its content is found, and does not hold it."""
    values = [one for value in part.values() for one in (value.values() if type(value) is dict else (value,))]
    return any(
        type(one) is str and one[:6].lower().startswith(("http:", "https:", "file:")) for one in values
    )


_encoder: Final = msgspec.json.Encoder(order="sorted")


class MediaTexts:
    """The texts of the media of one model."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest → text, the least recently asked for first."""
        self._size = 0
        self._changes: dict[bytes, int] = {}
        """Digest → how often the text of the medium turned out to be another one."""
        self._shorts: set[bytes] = set()
        """What the template writes for media."""

    def __len__(self) -> int:
        """Return the number of media whose text is known."""
        return len(self._known)

    def place(self, prompt: bytes, media: Sequence[Medium], written: Callable[[str], bytes]) -> MediaPrompt:
        """Return a rendered prompt with the text of each medium in the place of ``written(kind)``."""
        parts: list[bytes] = []
        at, complete = 0, True
        for kind, digest, _ in media:
            short = written(kind)
            place = prompt.find(short, at) if short else -1
            if place < 0:  # the template writes something else, perhaps depending on the conversation
                return self._prompt((*parts, prompt[at:], UNKNOWN, digest), media, complete=False)
            text = self._known.get(digest)
            if text is None:
                complete = False
                self._shorts.add(short)
                parts += (prompt[at:place], UNKNOWN, digest, short)
            else:
                self._known.move_to_end(digest)
                parts += (prompt[at:place], text)
            at = place + len(short)
        parts.append(prompt[at:])
        return self._prompt(parts, media, complete=complete)

    def learn(self, prompt: MediaPrompt, engine: bytes) -> bool:
        """Learn from what an engine has of a prompt of ``place``; return False if more of it may tell more.

        ``engine`` is the text of a chain of its blocks from the first one on, perhaps only the first part of
        the prompt, perhaps with the answer.
        """
        prompt.attempts += 1
        at = seen = 0
        """Bytes of the prompt, and of the engine's text, that are known to be the same."""
        learned: list[bytes] = []
        while (unknown := prompt.find(UNKNOWN, at)) >= 0:
            size = unknown - at
            if engine[seen : seen + size] != prompt[at:unknown]:
                if prompt.startswith(engine[seen:], at):
                    return prompt.attempts >= ATTEMPTS
                break
            start, at = seen + size, unknown + MARK_SIZE
            digest = prompt[at - DIGITS : at]
            short = max(
                (short for short in self._shorts if prompt.startswith(short, at)), key=len, default=b""
            )
            if not short:  # its place is not known
                return True
            at += len(short)
            end = _end(prompt, at, short, engine, start)
            if end is None:
                return prompt.attempts >= ATTEMPTS
            self._keep(digest, engine[start:end])
            learned.append(digest)
            seen = end
        size = min(len(engine) - seen, (len(prompt) if unknown < 0 else unknown) - at)
        ours, theirs = prompt[at : at + size], engine[seen : seen + size]
        if ours != theirs:
            self._forget(prompt, at + shared_size(ours, theirs, 0), learned)
        return True

    def _prompt(self, parts: Iterable[bytes], media: Sequence[Medium], *, complete: bool) -> MediaPrompt:
        prompt = MediaPrompt(b"".join(parts))
        prompt.texts, prompt.media, prompt.complete, prompt.attempts = self, media, complete, 0
        return prompt

    def _keep(self, digest: bytes, text: bytes) -> None:
        if self._changes.get(digest, 0) >= CHANGES:
            return
        self._drop(digest)
        self._known[digest] = text
        self._size += len(text) + KEPT
        while self._size > MEMORY:
            self._drop(next(iter(self._known)))

    def _drop(self, digest: bytes) -> None:
        text = self._known.pop(digest, None)
        if text is not None:
            self._size -= len(text) + KEPT

    def _forget(self, prompt: MediaPrompt, differs: int, learned: Sequence[bytes]) -> None:
        """Forget the text of the medium before the place where a prompt differs from the engine's: what a URL
        leads to has changed, or how the engine reads it, or the text was taken for longer or shorter."""
        wrong, at = None, 0
        for medium in prompt.media:
            text = self._known.get(medium.digest)
            place = -1 if text is None or medium.digest in learned else prompt.find(text, at)
            if text is not None and 0 <= place <= differs:
                wrong, at = medium.digest, place + len(text)
        for digest in {*learned[-1:], *([] if wrong is None else [wrong])}:
            self._drop(digest)
            self._changes[digest] = self._changes.get(digest, 0) + 1
        if sum(self._changes.values()) > CHANGED:
            self._changes.clear()


def _end(prompt: bytes, behind: int, short: bytes, engine: bytes, start: int) -> int | None:
    """Return where the medium's text that begins at ``start`` ends in the text of an engine; None: it does
    not show. ``behind``: place in the prompt of the text behind it, ``short``: what the template wrote."""
    mark = engine.find(ITEM, start, start + FAR + MARK_SIZE)
    if mark < 0 or behind >= len(prompt):
        return None
    following = prompt.find(UNKNOWN, behind, behind + CONFIRMING + len(UNKNOWN))
    text = prompt[behind : behind + CONFIRMING] if following < 0 else prompt[behind:following]
    if following >= 0:
        text += engine[start:mark] + ITEM  # the next medium begins as this one does
    last = short.rpartition(TOKEN)[2] if TOKEN in short else b""  # the template's text behind the placeholder
    end = engine.find(last + text, mark + MARK_SIZE)
    return end + len(last) if end >= 0 else None
