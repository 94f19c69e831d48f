"""Flags of the engines that change what a chat becomes, for the picker, which renders the same prompts. Pure.

They come with ``spec.engine.extraArgs``. What the picker cannot have is a note: its prompts would be others
than the engines', so nothing would match.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_operator.engine_flags import flag_names
from kvist_operator.plan.resources import MODEL_MOUNT
from kvist_operator.spec.pool import Pool

from .cluster_facts import Note
from .tokenizer import Tokenizer

FLAGS: Final[Mapping[str, str]] = {
    "chat-template": "chat_template",
    "chat-template-content-format": "chat_template_content_format",
    "default-chat-template-kwargs": "default_chat_template_kwargs",
}
"""Engine's flag → the picker's setting of the same meaning."""
TEMPLATE: Final = "chat-template"
REASON: Final = "ChatFlagUnreadable"
JINJA: Final = frozenset("{}\n")
"""What vLLM tells a template from a path by."""


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Chat settings for the picker, and notes on those that it cannot use."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """By name of the picker's setting; all are texts."""
    notes: tuple[Note, ...] = ()


def chats(pool: Pool, found: Tokenizer) -> ChatFlags:
    """Return the values of flags in ``spec.engine.extraArgs``; the last of a name counts, as for vLLM."""
    if not found.model:
        return ChatFlags()
    given = dict(_given(pool.engine.extra_args))
    why = {flag: problem for flag, value in given.items() if (problem := _problem(flag, value, found))}
    notes = (Note("Precise", REASON, f"spec.engine.extraArgs: --{flag} {text}") for flag, text in why.items())
    settings = {FLAGS[flag]: value for flag, value in given.items() if flag not in why}
    return ChatFlags(settings, tuple(notes))


def _given(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags with their values; an empty one for what a dotted key says."""
    for at, name in flag_names(words):
        if name not in FLAGS:
            continue
        flag, equals, value = words[at].partition("=")
        if "." in flag:
            yield name, ""
        else:
            yield name, value if equals else "".join(words[at + 1 : at + 2])


def _unread(name: str, value: str) -> str:
    """Return the error that the picker itself would report; empty if there is none."""
    told: dict[str, Any] = {name: value}
    try:
        Settings(**told)
    except SettingsError as error:
        return f"is invalid: {error}"
    return ""


def _problem(flag: str, value: str, found: Tokenizer) -> str:
    """Return why the picker cannot read it, and the remedy; empty when it can."""
    if not value:
        return "is written in a form that the picker cannot read: give its value as one word, JSON included"
    if flag != TEMPLATE:
        return _unread(FLAGS[flag], value)
    if JINJA & set(value):
        return ""
    if found.mount is not None and value.startswith(f"{MODEL_MOUNT}/"):
        return ""
    return (
        f"names a file of the engines, {value}, which the picker cannot read, so no prompt will match: set "
        f"the template's text, or a file below {MODEL_MOUNT}/ of a claim or image that the picker mounts too"
    )
