"""Prompts of long chats are kept, so that the next turn of a conversation is not rendered from the start.

An agent sends all messages so far with each turn, and a template takes 10 to 30 us a message; templates that
look for the call of each tool's result take a time that grows with the square of the messages. So the prompt
of a long chat is kept with a checkpoint before its last answer, from which the next turn is rendered
(``resumed_render``).

A template may look ahead, so that the text before a checkpoint could depend on what follows:

- Many show answers in another way once there is a new question, or a last answer without calls. Where one
  follows, a checkpoint serves only if no answer lies between the question before it and the checkpoint.
- Some compare whole messages. With these a checkpoint serves only if none before it is equal to one behind.
- For all else, resumed prompts are compared with complete ones: the first, second, fourth, eighth and so on,
  and one of 256, counted anew from each difference. A kind of chats with three differences is given up until
  as many prompts were right: one of 64 is compared.

A wrong prompt costs cache hits, and many of them the trust in endpoints; never an answer. A chat that would
take more work than a render may is rendered in parts (``docs/decisions/0067``).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.resumed_render import Checkpoint, Progress, StaleError
from kvist_epp.prompt.tools import digest_of

MIN_MESSAGES: Final = 24
"""Messages of a chat that is worth a checkpoint."""
MAX_BYTES: Final = 128_000_000
"""Bound on the prompts kept for one template: 2,000 conversations of 60 KB."""
_OVERHEAD: Final = 2_000
"""Bytes of a checkpoint besides its texts."""
_LOOKS: Final = 4
"""Checkpoints of other conversations with the same key, after which one is no longer looked for."""
_PART: Final = 64
"""Messages that are rendered at once of a chat that is rendered in parts."""
_ASKING: Final = frozenset(("user", "system", "developer"))
_MAX_DIFFERENCES: Final = 3
_COMPARED_EACH: Final = 256
"""One resumed prompt of so many is compared with a complete one, and the first, second, fourth, eighth, …"""
_PATIENCE: Final = 32
"""Checkpoints in a row that could not be used, after which few are tried."""
_TRIED_EACH: Final = 16
"""Then one of so many is."""
_CHECKED_EACH: Final = 64
"""One of so many prompts of a kind that is given up is compared, so that it can be taken up again."""


class _Record:
    """The results of resuming prompts of one kind."""

    __slots__ = ("_differences", "_refused", "_resumed", "_stale")

    def __init__(self) -> None:
        self._resumed = 0
        """Prompts since the last difference."""
        self._differences = 0
        """Those that were found, less the prompts that were right since the kind was given up."""
        self._stale = 0
        """Checkpoints in a row that could not be used."""
        self._refused = 0

    def admits(self) -> bool:
        """Return whether the next prompt is resumed, too."""
        if not self._is_given_up() and self._stale < _PATIENCE:
            return True
        self._refused += 1
        return self._refused % (_CHECKED_EACH if self._is_given_up() else _TRIED_EACH) == 0

    def on_stale(self) -> None:
        """Count a checkpoint that could not be used."""
        self._stale += 1

    def on_used(self) -> None:
        """Note that a checkpoint could be used."""
        self._stale = 0

    def is_due(self) -> bool:
        """Count a resumed prompt, and return whether it is to be compared."""
        self._resumed += 1
        count = self._resumed
        return self._is_given_up() or count % _COMPARED_EACH == 0 or count & (count - 1) == 0

    def on_compared(self, *, differs: bool) -> None:
        """Count a prompt that was compared."""
        if differs:
            self._differences = min(self._differences + 1, 2 * _MAX_DIFFERENCES)
            self._resumed = 0
        elif self._is_given_up():
            self._differences -= 1

    def _is_given_up(self) -> bool:
        return self._differences >= _MAX_DIFFERENCES


Render = Callable[[Chat, list[dict[str, Any]], Progress | None], str]


class Checkpoints:
    """The checkpoints of one template; the least recently used give way."""

    def __init__(self, render: Render) -> None:
        """``render`` renders messages by the template; it raises StaleError and UnrenderableError."""
        self._render = render
        self._kept: OrderedDict[int, Checkpoint] = OrderedDict()
        self._bytes = 0
        self.resumed = 0
        """Prompts that were resumed."""
        self.differences = 0
        """Those of them that were not the complete ones."""
        self._records: defaultdict[tuple[Any, ...], _Record] = defaultdict(_Record)

    def find(self, chat: Chat, variables: Mapping[str, Any]) -> Checkpoint | None:
        """Return a checkpoint among the messages of a chat, mostly the latest; ``variables`` are those of the
        request that the template uses."""
        if not self._kept:
            return None
        sent = chat.messages
        looked_at = 0
        try:
            setting = _setting(chat, variables)
            opening = _opening(sent, setting)
            for place in range(len(sent) - 1, 0, -1):
                if sent[place]["role"] != "assistant":
                    continue
                known = self._kept.get(_key(opening, place, sent[place - 1]))
                if known is None:
                    continue
                if known.setting == setting and known.digest == _digest(sent[:place]):
                    return known
                looked_at += 1
                if looked_at == _LOOKS:
                    break
        except _ODD:
            pass
        return None

    def render(
        self,
        chat: Chat,
        variables: Mapping[str, Any],
        messages: list[dict[str, Any]],
        known: Checkpoint | None = None,
    ) -> str:
        """Return the prompt of a chat, and keep it with a checkpoint.

        ``messages`` are those of the chat as the template sees them, ``known`` is what ``find`` returned. A
        chat that would take more work than a render may is rendered in parts: it returns the beginning of
        the prompt, and the next turns come further.

        Raises:
            UnrenderableError: the template fails or works too long.
        """
        until = len(messages)
        try:
            progress = self._resumed(chat, messages, known) or self._whole(chat, messages)
        except UnrenderableError as reason:
            if not _is_too_long(reason):
                raise
            until = _PART if known is None else known.place + _PART
            if until >= len(messages) or _end_a_turn(messages[until:]):
                raise
            few = messages[:until]
            progress = self._resumed(chat, few, known, is_part=True) or self._whole(chat, few)
            if progress.end is None:
                raise
        self._keep(chat, variables, progress, known)
        return progress.prompt if until == len(messages) else progress.prompt[: progress.end]

    def _whole(self, chat: Chat, messages: list[dict[str, Any]]) -> Progress:
        progress = Progress(messages, _last_answer(messages))
        self._render(chat, messages, progress)
        return progress

    def _resumed(
        self,
        chat: Chat,
        messages: list[dict[str, Any]],
        known: Checkpoint | None,
        *,
        is_part: bool = False,
    ) -> Progress | None:
        """Return the notes of a render from a checkpoint on; None: the chat has to be rendered completely."""
        if known is None:
            return None
        mark_at = _last_answer(messages)
        answers = messages[known.place - 1]["role"] not in _ASKING
        """The chat has some between its last question before the checkpoint and the checkpoint."""
        ended = _end_a_turn(messages[known.place :])
        kind = (ended, *messages[mark_at])
        record, of_moved = self._records[kind], self._records[("moved", *kind)]
        if (ended and answers) or not record.admits():
            return None
        progress = Progress(messages, mark_at, known, may_move=not answers and of_moved.admits())
        try:
            self._render(chat, messages, progress)
        except (StaleError, UnrenderableError) as reason:
            if _is_too_long(reason):
                raise
            record.on_stale()
            return None
        self.resumed += 1
        record.on_used()
        if progress.moved:
            record = of_moved
        if record.is_due() and not is_part:
            differs = self._differs(chat, messages, progress.prompt)
            record.on_compared(differs=differs)
            self.differences += differs
            if differs:
                self._drop(known.key)
                return None
        return progress

    def _differs(self, chat: Chat, messages: list[dict[str, Any]], prompt: str) -> bool:
        """Return whether a complete render gives another prompt; one that works too long gives none."""
        try:
            return self._render(chat, messages, None) != prompt
        except UnrenderableError:
            return False

    def _keep(
        self, chat: Chat, variables: Mapping[str, Any], progress: Progress, replaced: Checkpoint | None
    ) -> None:
        place = progress.mark_at
        weight = _OVERHEAD + _weight((progress.prompt, progress.state, progress.changes))
        if progress.end is None or place <= 0 or weight > MAX_BYTES // 8:
            return
        try:
            setting = _setting(chat, variables)
            before = chat.messages[:place]
            key, digest = _key(_opening(chat.messages, setting), place, before[-1]), _digest(before)
        except _ODD:
            return
        for old in (key, None if replaced is None else replaced.key):
            self._drop(old)
        self._kept[key] = Checkpoint(
            key=key,
            setting=setting,
            place=place,
            digest=digest,
            prompt=progress.prompt,
            end=progress.end,
            state=progress.state,
            changes=tuple(progress.changes),
            weight=weight,
        )
        self._bytes += weight
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


def _end_a_turn(messages: list[dict[str, Any]]) -> bool:
    """Return whether there is a question among messages, or an answer without calls: templates may show what
    was before it in another way."""
    return any(
        message["role"] in _ASKING or (message["role"] == "assistant" and not message.get("tool_calls"))
        for message in messages
    )


def _weight(value: Any) -> int:
    """Return the bytes of a text, or of values and those in them."""
    if isinstance(value, (tuple, list)):
        return 64 + sum(map(_weight, value))
    return value.__sizeof__() if type(value) is str else 32


_pack: Final = msgspec.msgpack.Encoder().encode
_ODD: Final = (OverflowError, RecursionError, UnicodeEncodeError, TypeError, AttributeError, KeyError)
"""Raised for values that cannot be packed, and for messages that are no messages."""


def _digest(value: Any) -> int:
    """Return a hash of messages, or of other values of JSON, which tells 1 from true and the order of fields.
    Raises one of ``_ODD``."""
    return hash(_pack(value))


def _setting(chat: Chat, variables: Mapping[str, Any]) -> int:
    """Return a hash of what a prompt depends on besides the messages. Raises one of ``_ODD``."""
    tools = 0 if chat.tools is None else digest_of(chat.tools, _digest)
    return hash((chat.add_generation_prompt, chat.reorder_calls, tools, _digest(dict(variables))))


def _opening(sent: list[dict[str, Any]], setting: int) -> int:
    """Return a number that tells most conversations apart. Raises one of ``_ODD``."""
    return hash((setting, *map(_sign, sent[:2])))


def _key(opening: int, place: int, before: dict[str, Any]) -> int:
    """Return a number that tells most checkpoints apart. Raises one of ``_ODD``."""
    return hash((opening, place, _sign(before)))


def _sign(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return the call that a message answers, and the ends of its text."""
    content = message.get("content")
    if type(content) is list and content and type(content[-1]) is dict:
        content = content[-1].get("text")
    text = content if type(content) is str else ""
    return message.get("tool_call_id"), len(text), text[:64], text[-64:]
