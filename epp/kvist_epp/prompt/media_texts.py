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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from kvist_epp.index.media_marks import DIGITS, ITEM, MARK_SIZE, UNKNOWN
from kvist_epp.prompt.chat import MODALITY
from kvist_epp.prompt.request_types import Chat

MEMORY: Final = 32 << 20
"""Bytes of texts that are kept; those of the media that were not asked for longest are dropped first."""
KEPT: Final = 500
"""Bytes that are kept besides each text."""
CONFIRMING: Final = 12
"""Bytes of the text behind a medium that tell where the medium's own text ends."""
CHANGES: Final = 3
"""After so many changes of its identifier a medium stays unknown: engines of one pool do not agree on it."""
CHANGED: Final = 10_000
"""Media whose changes are counted, before counting begins anew."""
FAR: Final = 256
"""Bytes before a medium's mark that may be the engine's or the template's words for it."""

Medium = tuple[str, bytes]
"""(kind of medium, digest of it and of what changes its tokens: ``DIGITS`` characters)."""


class MediaPrompt(bytes):
    """A prompt with media."""

    texts: "MediaTexts"
    """What has written it, and learns from what the engine makes of it."""
    complete: bool
    """The texts of all media are known; otherwise nothing behind the first unknown one is in the index."""


def media_of(chat: Chat) -> list[Medium]:
    """Return the media of a chat in the order of their parts."""
    settings = chat.media_settings
    found = []
    for message in chat.messages:
        content = message.get("content")
        if type(content) is list:
            found += [_medium(kind, part, settings) for part in content if (kind := _kind(part))]
    return found


def _kind(part: Any) -> str | None:
    """Return the kind of a medium; None for any other part."""
    if type(part) is not dict:
        return None
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in MODALITY if name in part), None)
    return MODALITY.get(kind) if type(kind) is str else None


def _medium(kind: str, part: dict[str, Any], settings: Any) -> Medium:
    named = part.get("uuid")  # is its identifier, whatever its content is
    sent = named if named is not None else {name: part[name] for name in part if name != "cache_control"}
    digest = hashlib.sha256()  # half the time of blake2b where the processor has instructions for it
    for text in _texts((kind, sent, settings)):
        digest.update(text)
        digest.update(b"\0")
    return kind, digest.hexdigest()[:DIGITS].encode()


def _texts(value: Any) -> Iterator[bytes]:
    """Yield all that a JSON value holds, whatever the order of its keys."""
    if type(value) is str:
        yield value.encode(errors="surrogatepass")
    elif type(value) is dict:
        for name in sorted(value):
            yield name.encode(errors="surrogatepass")
            yield from _texts(value[name])
    elif type(value) in (list, tuple):
        for item in value:
            yield from _texts(item)
    else:
        yield repr(value).encode()


class MediaTexts:
    """The texts of the media of one model."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest → text, the least recently asked for first."""
        self._size = 0
        self._digests: dict[bytes, bytes] = {}
        """First mark of a text → the digest of its medium, as learned last."""
        self._changes: dict[bytes, int] = {}
        """Digest → how often engines knew the medium by another identifier."""
        self._shorts: set[bytes] = set()
        """What the template writes for media."""

    def __len__(self) -> int:
        """Return the number of media whose text is known."""
        return len(self._known)

    def place(self, prompt: bytes, media: Sequence[Medium], written: Callable[[str], bytes]) -> MediaPrompt:
        """Return a rendered prompt with the text of each medium in the place of ``written(kind)``."""
        parts: list[bytes] = []
        at, complete = 0, True
        for kind, digest in media:
            short = written(kind)
            place = prompt.find(short, at) if short else -1
            if place < 0:  # the template writes something else, perhaps depending on the conversation
                return self._prompt((*parts, prompt[at:], UNKNOWN, digest), complete=False)
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
        return self._prompt(parts, complete=complete)

    def learn(self, prompt: bytes, engine: bytes) -> bool:
        """Learn from what an engine has of a prompt of ``place``; return False if more of it may tell more.

        ``engine`` is the text of a chain of its blocks from the first one on, perhaps only the first part of
        the prompt, perhaps with the answer.
        """
        learned: list[bytes] = []
        at = seen = 0
        """Bytes of the prompt, and of the engine's text, that are known to be the same."""
        while (unknown := prompt.find(UNKNOWN, at)) >= 0:
            size = unknown - at
            if engine[seen : seen + size] != prompt[at:unknown]:
                if prompt.startswith(engine[seen:], at):
                    return False
                break
            start, at = seen + size, unknown + MARK_SIZE
            digest = prompt[at - DIGITS : at]
            short = max(
                (short for short in self._shorts if prompt.startswith(short, at)), key=len, default=b""
            )
            if not short:  # its place is not known
                return True
            at += len(short)
            end = _end(prompt, at, engine, start)
            if end is None:
                return False
            self._keep(digest, engine[start:end])
            learned.append(digest)
            seen = end
        size = min(len(engine) - seen, (len(prompt) if unknown < 0 else unknown) - at)
        ours, theirs = prompt[at : at + size], engine[seen : seen + size]
        if ours != theirs:
            self._forget(learned, set(_marks(ours)) - set(_marks(theirs)))
        return True

    def _prompt(self, parts: Iterable[bytes], *, complete: bool) -> MediaPrompt:
        prompt = MediaPrompt(b"".join(parts))
        prompt.texts, prompt.complete = self, complete
        return prompt

    def _keep(self, digest: bytes, text: bytes) -> None:
        if self._changes.get(digest, 0) >= CHANGES:
            return
        self._drop(digest)
        self._known[digest] = text
        self._digests[next(_marks(text))] = digest
        self._size += len(text) + KEPT
        while self._size > MEMORY:
            self._drop(next(iter(self._known)))

    def _drop(self, digest: bytes) -> None:
        text = self._known.pop(digest, None)
        if text is not None:
            self._size -= len(text) + KEPT
            self._digests.pop(next(_marks(text)), None)

    def _forget(self, learned: Sequence[bytes], wrong: set[bytes]) -> None:
        """Forget what was learned wrongly, and media that the engine knows by other identifiers: what a URL
        leads to has changed, or how the engine reads it."""
        if len(self._changes) > CHANGED:
            self._changes.clear()
        for mark in wrong:
            if (digest := self._digests.get(mark)) is not None:
                self._changes[digest] = self._changes.get(digest, 0) + 1
                self._drop(digest)
        for digest in learned:
            self._drop(digest)


def _end(prompt: bytes, behind: int, engine: bytes, start: int) -> int | None:
    """Return where the medium's text that begins at ``start`` ends in the text of an engine, ``behind`` being
    the place in the prompt of the text behind it; None: it does not show."""
    mark = engine.find(ITEM, start, start + FAR + MARK_SIZE)
    if mark < 0 or behind >= len(prompt):
        return None
    following = prompt.find(UNKNOWN, behind, behind + CONFIRMING + len(UNKNOWN))
    text = prompt[behind : behind + CONFIRMING] if following < 0 else prompt[behind:following]
    if following >= 0:
        text += engine[start:mark] + ITEM  # the next medium begins as this one does
    end = engine.find(text, mark + MARK_SIZE)
    return end if end >= 0 else None


def _marks(text: bytes) -> Iterator[bytes]:
    """Yield the marks of identified media in a text."""
    at = text.find(ITEM)
    while at >= 0:
        yield text[at : at + MARK_SIZE]
        at = text.find(ITEM, at + MARK_SIZE)
