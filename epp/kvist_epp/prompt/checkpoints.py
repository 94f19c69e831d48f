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

A wrong prompt costs cache hits, never an answer (``docs/decisions/0067``).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.resumed_render import Checkpoint, Progress, StaleError
from kvist_epp.prompt.traced_values import LITERALS

MIN_MESSAGES: Final = 24
"""Messages of a chat that is worth a checkpoint."""
MAX_BYTES: Final = 128_000_000
"""Bound on the prompts kept for one template: 2,000 conversations of 60 KB."""
_REACH: Final = 48
"""Messages behind a checkpoint at most, when it is looked for."""
_ASKING: Final = frozenset(("user", "system", "developer"))
_MAX_DIFFERENCES: Final = 3
_COMPARED_EACH: Final = 256
"""One resumed prompt of so many is compared with a complete one, and the first, second, fourth, eighth, …"""
_PATIENCE: Final = 32
"""Checkpoints in a row that could not be used, after which one in sixteen is tried."""
_TRIED_EACH: Final = 16


class _Record:
    """How prompts of one kind came out that were resumed."""

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
        self._kept: OrderedDict[tuple[Any, ...], Checkpoint] = OrderedDict()
        self._bytes = 0
        self._records: defaultdict[tuple[Any, ...], _Record] = defaultdict(_Record)

    def render(self, chat: Chat, messages: list[dict[str, Any]]) -> str:
        """Return the prompt of a chat; ``messages`` are those of the chat as the template sees them.

        Raises:
            UnrenderableError: the template fails or works too long.
        """
        mark_at = _last_answer(messages)
        setting = _setting(chat)
        packed = _packed(chat.messages) if setting is not None and mark_at > 0 else None
        if setting is None or packed is None:
            return self._render(chat, messages, None)
        key, known = self._found(chat, setting, packed)
        progress = None if known is None else self._resumed(chat, messages, mark_at, known)
        if progress is None:
            progress = Progress(messages, mark_at)
            self._render(chat, messages, progress)
        if progress.end is not None:
            self._drop(key)
            self._keep(chat, setting, mark_at, packed, progress)
        return progress.prompt

    def _found(
        self, chat: Chat, setting: tuple[Any, ...], packed: bytes
    ) -> tuple[tuple[Any, ...], Checkpoint | None]:
        """Return the latest checkpoint among the messages of a chat, and its key."""
        sent = chat.messages
        for count in range(len(sent) - 1, max(0, len(sent) - 1 - _REACH), -1):
            if sent[count]["role"] != "assistant":
                continue
            key = (count, _sign(sent[count - 1]), *setting)
            known = self._kept.get(key)
            if (
                known is not None
                and known.digest == hash(packed[: known.size])
                and (known.tools is chat.tools or known.tools == chat.tools)
            ):
                return key, known
        return (), None

    def _resumed(
        self, chat: Chat, messages: list[dict[str, Any]], mark_at: int, known: Checkpoint
    ) -> Progress | None:
        """Return the notes of a render from a checkpoint on; None: the chat has to be rendered completely."""
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
        except (StaleError, UnrenderableError):
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

    def _keep(
        self, chat: Chat, setting: tuple[Any, ...], count: int, packed: bytes, progress: Progress
    ) -> None:
        rest = _packed(chat.messages[count:])
        assert rest is not None, "all messages could be packed"
        assert progress.end is not None, "there is a place to keep"
        size = len(packed) - len(rest)
        key = (count, _sign(chat.messages[count - 1]), *setting)
        self._drop(key)
        made = Checkpoint(
            count,
            size,
            hash(packed[:size]),
            chat.tools,
            progress.prompt,
            progress.end,
            progress.state,
            tuple(progress.changes),
        )
        self._kept[key] = made
        self._bytes += made.weight
        while self._bytes > MAX_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[Any, ...]) -> None:
        gone = self._kept.pop(key, None)
        if gone is not None:
            self._bytes -= gone.weight


def _last_answer(messages: list[dict[str, Any]]) -> int:
    """Return the index of the last answer; -1: there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    return -1


def _setting(chat: Chat) -> tuple[Any, ...] | None:
    """Return what a prompt depends on besides messages and tools; None: it cannot be compared."""
    shown = [(name, type(value), value) for name, value in sorted(chat.variables.items())]
    if chat.documents is not None or not all(kind in LITERALS for _, kind, _ in shown):
        return None
    return chat.add_generation_prompt, chat.reorder_calls, *shown


def _sign(message: dict[str, Any]) -> int:
    """Return a number that tells most messages apart: by the call that they answer, or by their text."""
    called, content = message.get("tool_call_id"), message.get("content")
    if type(content) is list and content and type(content[-1]) is dict:
        content = content[-1].get("text")
    text = content if type(content) is str else ""
    return hash((called if type(called) is str else "", len(text), text[:64], text[-64:]))


_encoder: Final = msgspec.msgpack.Encoder()


def _packed(messages: list[dict[str, Any]]) -> bytes | None:
    """Return messages as bytes, one after the other; None if they hold what MessagePack has no form for."""
    try:
        encoded = _encoder.encode(messages)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return None
    count = len(messages)
    return encoded[1 if count < 16 else 3 if count < 65_536 else 5 :]
