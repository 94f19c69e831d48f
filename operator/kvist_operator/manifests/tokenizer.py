"""The picker's tokenizer and chat settings: from the model's source and the engines' flags. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_operator.engine_version import engine_version
from kvist_operator.extra_args import ExtraFlag, read_extra
from kvist_operator.plan import Plan
from kvist_operator.plan.resources import MODEL_MOUNT
from kvist_operator.spec.pool import OBJECT_STORES, Pool, Source
from kvist_operator.spec.pool_reader import LOCATIONS, split_source

from .object_names import Json, Note, Site
from .pods import Mounted, mounted, token

SHARED: Final = frozenset({"ReadOnlyMany", "ReadWriteMany"})
VOLUME: Final = "tokenizer"
REASON: Final = "NoTokenizer"
REMEDY: Final = (
    "set spec.picker.tokenizer, such as hf://org/model; until then only the routing history is matched"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Tokenizer settings for the picker."""

    model: str = ""
    """``--model``; empty = approximate mode."""
    mount: Mounted | None = None
    env: tuple[Json, ...] = ()
    note: Note | None = None
    """Why there is no tokenizer."""


def tokenizer(pool: Pool, plan: Plan, site: Site) -> Tokenizer:
    """Return the tokenizer of ``spec.picker.tokenizer``, else the engines' own, else that of the model."""
    if pool.picker.mode == "Approximate" or not plan.routes_by_prefix:
        return Tokenizer()
    if pool.picker.tokenizer:
        kind, location = split_source(pool.picker.tokenizer, "spec.picker.tokenizer")
        return _at(pool, kind, location, "")
    given = _given(pool)
    name = _value(given.get("tokenizer")).rstrip("/")
    # vLLM's --revision is that of both, unless the tokenizer has one
    revision = _value(given.get("tokenizer-revision")) or pool.model.revision
    if name and re.fullmatch(LOCATIONS[Source.HUB], name):
        return _at(pool, Source.HUB, name, revision)
    found = _of_model(pool, site, revision)
    if not name:
        return found
    if found.mount is not None and f"{name}/".startswith(f"{MODEL_MOUNT}/"):
        return replace(found, model=name)
    return _without(
        f"it cannot read the engines' --tokenizer, {name}: neither a name on the hub nor below {MODEL_MOUNT}"
    )


def _of_model(pool: Pool, site: Site, revision: str) -> Tokenizer:
    model = pool.model
    if model.kind in OBJECT_STORES:
        return _without(f"the picker does not read {model.kind}://")
    if model.kind is Source.PATH:
        return _without(f"the picker's image does not contain {model.location}")
    if model.kind is Source.CLAIM:
        modes = site.claims.get(model.claim)
        if modes is None:
            return _without(f"the access modes of claim {model.claim} are unknown")
        if not modes & SHARED:
            return _without(
                f"claim {model.claim} ({', '.join(sorted(modes))}) can be mounted by one node only"
            )
    return _at(pool, model.kind, model.location, revision)


def _without(why: str) -> Tokenizer:
    return Tokenizer(note=Note("Precise", REASON, f"the picker has no tokenizer: {why}; {REMEDY}"))


def _at(pool: Pool, kind: Source, location: str, revision: str) -> Tokenizer:
    if kind is Source.HUB:
        name = f"hf://{location}@{revision}" if revision else f"hf://{location}"
        return Tokenizer(model=name, env=tuple(token(pool.model)))
    if kind is Source.PATH:
        return Tokenizer(model=location)
    folder = location.partition("/")[2] if kind is Source.CLAIM else ""
    mount = mounted(VOLUME, kind, location, MODEL_MOUNT, whole=True)
    return Tokenizer(model=f"{MODEL_MOUNT}/{folder}".rstrip("/"), mount=mount)


FLAGS: Final[Mapping[str, str]] = {
    "chat-template": "chat_template",
    "chat-template-content-format": "chat_template_content_format",
    "default-chat-template-kwargs": "default_chat_template_kwargs",
    "tokenizer-mode": "tokenizer_mode",
    "reasoning-effort-map": "reasoning_effort_map",
    "anthropic-disabled-thinking-effort": "anthropic_disabled_thinking_effort",
}
"""Engine's flag → the picker's setting of the same meaning."""
SWITCH: Final = "exclude-tools-when-tool-choice-none"
"""Flag without a value, and with the picker's setting of the same name."""
_ABSENT: Final = ("", "None", "null")
"""Values that say as much as no flag."""
TEMPLATE: Final = "chat-template"
UNREADABLE: Final = "ChatFlagUnreadable"
JINJA: Final = frozenset("{}\n")
"""Characters by which vLLM distinguishes a template from a path."""


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """Chat settings for the picker, and notes on those that it cannot use."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by name of the picker's setting."""
    notes: tuple[Note, ...] = ()


def chats(pool: Pool, found: Tokenizer) -> ChatFlags:
    """Return the values of flags in ``spec.engine.extraArgs``; the last of a name counts, as for vLLM."""
    if not found.model:
        return ChatFlags()
    given = _given(pool)
    why = {flag: problem for flag in FLAGS if flag in given and (problem := _problem(given[flag], found))}
    notes = (
        Note("Precise", UNREADABLE, f"spec.engine.extraArgs: --{flag} {text}") for flag, text in why.items()
    )
    settings: dict[str, Any] = {
        FLAGS[flag]: _value(given[flag]) for flag in FLAGS if flag in given and flag not in why
    }
    if SWITCH in given:
        settings[SWITCH.replace("-", "_")] = given[SWITCH].on
    return ChatFlags(settings, tuple(notes))


def _given(pool: Pool) -> dict[str, ExtraFlag]:
    """Return the flags in ``spec.engine.extraArgs`` by name, as vLLM reads them: a flag's beginning is
    enough, and some values say as much as no flag."""
    version = engine_version(pool.engine.image, pool.engine.version)
    found = read_extra(pool.engine.extra_args, version)
    return {each.name: each for each in found if each.key or not each.values or _value(each) not in _ABSENT}


def _value(flag: ExtraFlag | None) -> str:
    """Return the value of a flag; empty without one, and where JSON is given key by key."""
    return "" if flag is None or flag.key else "".join(flag.values[-1:])


def _problem(flag: ExtraFlag, found: Tokenizer) -> str:
    """Return why the picker cannot read it, and the remedy; empty when it can."""
    value = _value(flag)
    if flag.key:
        return "is written in a form that the picker cannot read: give its value as one word, JSON included"
    if flag.name != TEMPLATE:
        settings: dict[str, Any] = {FLAGS[flag.name]: value}
        try:
            Settings(**settings)  # raises what the picker itself would report
        except SettingsError as error:
            return f"is invalid: {error}"
        return ""
    if JINJA & set(value):
        return ""
    if found.mount is not None and value.startswith(f"{MODEL_MOUNT}/"):
        return ""
    return (
        f"names a file of the engines, {value}, which the picker cannot read, so no prompt will match: set "
        f"the template's text, or a file below {MODEL_MOUNT}/ of a claim or image that the picker mounts too"
    )
