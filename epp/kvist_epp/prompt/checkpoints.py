"""Prompts of long chats are kept, so that the next turn of a conversation is not rendered from the start.

An agent sends all messages so far with each turn, and a template takes 10 to 30 us a message; templates that
look for the call of each tool's result take a time that grows with the square of the messages. So the prompt
of a long chat is kept with a checkpoint before its last answer, from which the next turn is rendered
(``resumed_render``).

A template may look ahead, so that the text before a checkpoint could depend on what follows:

- Many show answers in another way once there is a new question. Where one follows, a checkpoint serves only
  if no answer lies between the question before it and the checkpoint.
- For all else, resumed prompts are compared with complete ones: the first, second, fourth, eighth and so on,
  and one of 256. A kind of chats that fails three times is not resumed any more.

A wrong prompt costs cache hits, never an answer. A chat that would take more work than a render may is
rendered in parts (``docs/decisions/0067``).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.resumed_render import Checkpoint, Progress, StaleError

MIN_MESSAGES: Final = 24
"""Messages of a chat that is worth a checkpoint."""
MAX_BYTES: Final = 128_000_000
"""Bound on the prompts kept for one template: 2,000 conversations of 60 KB."""
_PART: Final = 64
"""Messages that are rendered at once of a chat that is rendered in parts."""
_ASKING: Final = frozenset(("user", "system", "developer"))
_MAX_DIFFERENCES: Final = 3
_COMPARED_EACH: Final = 256
"""One resumed prompt of so many is compared with a complete one, and the first, second, fourth, eighth, …"""
_PATIENCE: Final = 32
"""Checkpoints in a row that could not be used, after which one in sixteen is tried."""
_TRIED_EACH: Final = 16


class _Record:
    """The results of resuming prompts of one kind."""

    __slots__ = ("differences", "resumed", "stale")

    def __init__(self) -> None:
        self.resumed = 0
        self.differences = 0
        self.stale = 0
        """Checkpoints in a row that could not be used."""

    def admits(self) -> bool:
        """Return whether the next prompt is resumed, too."""
        if self.differences >= _MAX_DIFFERENCES:
            return False
        if self.stale < _PATIENCE:
            return True
        self.stale += 1
        return self.stale % _TRIED_EACH == 0

    def is_due(self) -> bool:
        """Count a resumed prompt, and return whether it is to be compared."""
        self.resumed += 1
        return self.resumed % _COMPARED_EACH == 0 or self.resumed & (self.resumed - 1) == 0


Render = Callable[[Chat, list[dict[str, Any]], Progress | None], str]


class Checkpoints:
    """The checkpoints of one template; the least recently used give way."""

    def __init__(self, render: Render) -> None:
        """``render`` renders messages by the template; it raises StaleError and UnrenderableError."""
        self._render = render
        self._kept: OrderedDict[int, Checkpoint] = OrderedDict()
        self._bytes = 0
        self._records: defaultdict[tuple[Any, ...], _Record] = defaultdict(_Record)

    def find(self, chat: Chat) -> Checkpoint | None:
        """Return the latest checkpoint among the messages of a chat."""
        sent, setting = chat.messages, _setting(chat)
        packed: bytes | None = None
        try:
            for place in range(len(sent) - 1, 0, -1):
                if sent[place]["role"] != "assistant":
                    continue
                known = self._kept.get(_key(sent[place - 1], place, setting))
                if known is None or known.setting != setting:
                    continue
                packed = packed or _packed(sent)
                same = known.digest == hash(packed[: known.size])
                if same and (known.tools is chat.tools or known.tools == chat.tools):
                    return known
        except _ODD:
            pass
        return None

    def render(self, chat: Chat, messages: list[dict[str, Any]], known: Checkpoint | None = None) -> str:
        """Return the prompt of a chat, and keep it with a checkpoint.

        ``messages`` are those of the chat as the template sees them, ``known`` is what ``find`` returned. A
        chat that would take more work than a render may is rendered in parts: it returns the beginning of
        the prompt, and the next turns come further.

        Raises:
            UnrenderableError: the template fails or works too long.
        """
        try:
            progress = self._resumed(chat, messages, known) or self._whole(chat, messages)
        except UnrenderableError as reason:
            if not _is_too_long(reason):
                raise
            progress = self._part(chat, messages, known)
            return progress.prompt[: progress.end]
        self._keep(chat, progress, known)
        return progress.prompt

    def _whole(self, chat: Chat, messages: list[dict[str, Any]]) -> Progress:
        progress = Progress(messages, _last_answer(messages))
        self._render(chat, messages, progress)
        return progress

    def _part(self, chat: Chat, messages: list[dict[str, Any]], known: Checkpoint | None) -> Progress:
        """Return the notes of a render of the next few messages, unless a question follows on them."""
        until = _PART if known is None else known.place + _PART
        few = messages[:until]
        later = messages[until:]
        if not later or any(message["role"] in _ASKING for message in later):
            raise UnrenderableError("work")
        progress = self._resumed(chat, few, known) or self._whole(chat, few)
        if progress.end is None:
            raise UnrenderableError("work")
        self._keep(chat, progress, known)
        return progress

    def _resumed(
        self, chat: Chat, messages: list[dict[str, Any]], known: Checkpoint | None
    ) -> Progress | None:
        """Return the notes of a render from a checkpoint on; None: the chat has to be rendered completely."""
        if known is None:
            return None
        mark_at = _last_answer(messages)
        answers = messages[known.place - 1]["role"] not in _ASKING
        """The chat has some between its last question before the checkpoint and the checkpoint."""
        asked = any(message["role"] in _ASKING for message in messages[known.place :])
        kind = (asked, *messages[mark_at])
        record, of_moved = self._records[kind], self._records[("moved", *kind)]
        if (asked and answers) or not record.admits():
            return None
        progress = Progress(messages, mark_at, known, may_move=not answers and of_moved.admits())
        try:
            self._render(chat, messages, progress)
        except (StaleError, UnrenderableError) as reason:
            if _is_too_long(reason):
                raise
            record.stale += 1
            return None
        record.stale = 0
        if progress.moved:
            record = of_moved
        if record.is_due() and self._differs(chat, messages, progress.prompt):
            record.differences += 1
            self._kept.clear()
            self._bytes = 0
            return None
        return progress

    def _differs(self, chat: Chat, messages: list[dict[str, Any]], prompt: str) -> bool:
        """Return whether a complete render gives another prompt; one that works too long gives none."""
        try:
            return self._render(chat, messages, None) != prompt
        except UnrenderableError:
            return False

    def _keep(self, chat: Chat, progress: Progress, replaced: Checkpoint | None) -> None:
        place, setting = progress.mark_at, _setting(chat)
        if progress.end is None or place <= 0:
            return
        try:
            before = _packed(chat.messages[:place])
            key = _key(chat.messages[place - 1], place, setting)
        except _ODD:
            return
        made = Checkpoint(
            key=key,
            setting=setting,
            tools=chat.tools,
            place=place,
            size=len(before),
            digest=hash(before),
            prompt=progress.prompt,
            end=progress.end,
            state=progress.state,
            changes=tuple(progress.changes),
        )
        for old in (key, None if replaced is None else replaced.key):
            self._drop(old)
        self._kept[key] = made
        self._bytes += made.weight
        while self._bytes > MAX_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: int | None) -> None:
        gone = None if key is None else self._kept.pop(key, None)
        if gone is not None:
            self._bytes -= gone.weight


def _is_too_long(reason: Exception) -> bool:
    """Return whether a render was given up since it took more work than it may."""
    return str(reason) == "work"


def _last_answer(messages: list[dict[str, Any]]) -> int:
    """Return the index of the last answer; -1: there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    return -1


def _setting(chat: Chat) -> tuple[Any, ...]:
    """Return what a prompt depends on besides messages and tools."""
    if not chat.variables:
        return chat.add_generation_prompt, chat.reorder_calls
    shown = [(name, type(value), value) for name, value in sorted(chat.variables.items())]
    return (chat.add_generation_prompt, chat.reorder_calls, *shown)


def _key(before: dict[str, Any], place: int, setting: tuple[Any, ...]) -> int:
    """Return a number that tells most checkpoints apart: by the message before them, which is the result of a
    call or has a text."""
    called, content = before.get("tool_call_id"), before.get("content")
    if type(content) is list and content:
        content = content[-1].get("text")
    text = content if type(content) is str else ""
    return hash((place, setting, called, len(text), text[:64], text[-64:]))


_encoder: Final = msgspec.msgpack.Encoder()
_ODD: Final = (OverflowError, RecursionError, UnicodeEncodeError, TypeError, AttributeError, KeyError)
"""Raised for values that cannot be packed or hashed, and for messages that are no messages."""


def _packed(messages: list[dict[str, Any]]) -> bytes:
    """Return messages as bytes, one after the other. Raises one of ``_ODD``."""
    count = len(messages)
    return _encoder.encode(messages)[1 if count < 16 else 3 if count < 65_536 else 5 :]
