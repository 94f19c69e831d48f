"""``spec.engine.extraArgs``: reads words as vLLM's parser does, and refuses what it would refuse. Pure.

Words are read by the flags of one version. For an engine whose version is not known, a flag that the
nearest known version does not have is a doubt instead of an error, since the engine may have it.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from kvist_operator.errors import SpecError

from .engine_flags import AFFECTS_MEMORY, GONE, MERGED, OWNED, SECRETS, SHARED, YIELDING
from .engine_version import EngineVersion
from .flag_table import Flag, dotted, flags, options, short_options, versions_with
from .flag_values import VARIABLE, absent_value, key_problem, value_problem

PATH: Final = "spec.engine.extraArgs"
PLUGINS: Final = {"tool-call-parser": "tool-parser-plugin", "reasoning-parser": "reasoning-parser-plugin"}
"""Flag → the flag that loads more values for it."""
BY_VALUE: Final = {("quantization", "fp8"): "spec.engine.quantization"}
"""Flag and value → the field that sets them; other values of the flag have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraFlag:
    """One flag with its values, as the user wrote it."""

    at: int
    """Position of its word."""
    words: int
    """Number of its words, the values included."""
    word: str
    """The flag's word."""
    name: str
    """Name that vLLM reads; of an unknown flag the word without its dashes."""
    flag: Flag | None
    """None for a flag that this version does not have."""
    key: str
    """Dotted key inside a JSON value: ``a.b`` of ``--hf-overrides.a.b``."""
    values: tuple[str, ...]

    @property
    def spelled(self) -> str:
        """The flag's word up to ``=``."""
        return self.word.partition("=")[0]

    @property
    def path(self) -> str:
        """Field of the word, for messages."""
        return f"{PATH}[{self.at}]"

    @property
    def on(self) -> bool:
        """Whether it is not a spelling that switches a flag off."""
        return self.flag is None or self.spelled.replace("_", "-") not in self.flag.off


def flag_names(words: Sequence[str]) -> list[tuple[int, str]]:
    """Return position and name of each flag, without dashes in front, ``=value`` and dotted key."""
    return [(i, _plain(word)) for i, word in enumerate(words) if re.match(r"-{1,2}[A-Za-z]", word)]


def _plain(word: str) -> str:
    bare = word.lstrip("-").partition("=")[0].partition(".")[0]
    if not word.startswith("--"):
        return short_options().get(bare, short_options().get(bare.rstrip("0123456789"), f"-{bare}"))
    return bare.replace("_", "-")


def read_extra(words: Sequence[str], version: EngineVersion) -> tuple[ExtraFlag, ...]:
    """Return the flags that users add, each checked.

    Raises:
        SpecError: a stray word, an unknown flag of a known version, a flag of the plan in any spelling that
            vLLM accepts, a missing or invalid value; the message names the word and the remedy.
    """
    found: list[ExtraFlag] = []
    for i, word in enumerate(words):
        if not word.strip("-= \t\n"):
            raise SpecError(f"{PATH}[{i}]", f"{word!r} is neither a flag nor a value: leave it out")
    at = 0
    while at < len(words):
        flag = _read_one(words, at, version)
        _check_ownership(flag)
        _check_known(flag, version)
        _check_values(flag)
        found.append(flag)
        at += flag.words
    absent = next(_absent_values(found), None)
    if absent and version.known:
        raise SpecError(absent[0].path, absent[1])
    _check_repeated(found)
    return tuple(found)


def doubts(found: Sequence[ExtraFlag], version: EngineVersion) -> list[str]:
    """Return why a plan with these flags is unverified."""
    unknown = [
        f"{each.spelled} in {PATH} is not a flag of vLLM {dotted(version.flags)}{_nearest(each, version)}"
        for each in found
        if each.flag is None
    ]
    if not version.known:
        unknown += [f"{problem} (vLLM {dotted(version.flags)})" for _, problem in _absent_values(found)]
    touched = dict.fromkeys(each.name for each in found if each.name in AFFECTS_MEMORY)
    return unknown + [f"--{name} in {PATH} changes the memory that was computed" for name in touched]


def check_shared(found: Sequence[ExtraFlag], by_plan: set[str]) -> None:
    """Raise SpecError for a flag that this plan sets, too."""
    adapters = {"max-loras", "max-cpu-loras", "max-lora-rank"} if "enable-lora" in by_plan else set()
    for each in found:
        if each.name in by_plan | adapters and each.name not in (*YIELDING, MERGED):
            raise SpecError(each.path, _owned(each, SHARED.get(each.name, "")))


def _is_flag(word: str) -> bool:
    """Return whether argparse takes a word for a flag: not a negative number, nothing with a space."""
    name = word.partition("=")[0]
    return bool(re.match(r"--?[^\W\d]", name)) and " " not in name


def _read_one(words: Sequence[str], at: int, version: EngineVersion) -> ExtraFlag:
    word = words[at]
    if not _is_flag(word):
        raise SpecError(f"{PATH}[{at}]", _stray(words, at, version))
    spelled, equals, value = word.partition("=")
    option, _, key = spelled.partition(".")
    inline = [value] if equals else []
    if option.startswith("--"):
        option = option.replace("_", "-")
    elif option.startswith("-O"):
        inline, option = [*filter(None, [option[2:]]), *inline], "--optimization-level"
    name, flag = _find(option, f"{PATH}[{at}]", version)
    following = list(takewhile(lambda each: not _is_flag(each), words[at + 1 :]))
    if inline or (flag and flag.kind == "switch"):
        following = []
    elif flag and flag.takes != "many":
        following = following[:1]
    return ExtraFlag(
        at=at,
        words=1 + len(following),
        word=word,
        name=name,
        flag=flag,
        key=key,
        values=(*inline, *following),
    )


def _find(option: str, path: str, version: EngineVersion) -> tuple[str, Flag | None]:
    """Return name and flag of a spelling: exact, or the beginning of one flag only."""
    known = options(version.flags)
    if option in known:
        return known[option].name, known[option]
    if option.startswith("--"):
        # argparse takes the beginning of a flag for it; an owned one is refused before the ambiguity
        longer = {flag.name: flag for text, flag in known.items() if text.startswith(option)}
        owner = next((name for name in longer if name in OWNED), "")
        if owner or len(longer) == 1:
            return owner or next(iter(longer)), longer[owner or next(iter(longer))]
        if longer and option[2:] not in GONE:
            names = ", ".join(f"--{name}" for name in sorted(longer)[:4])
            raise SpecError(path, f"{option} is the beginning of several flags ({names}): write it out")
        return option[2:], None
    name = short_options().get(option[1:].rstrip("0123456789"), "")
    return name or option, flags(version.flags).get(name)


def _stray(words: Sequence[str], at: int, version: EngineVersion) -> str:
    word = words[at]
    if word.startswith("-") and " " in word:
        flag, _, value = word.partition(" ")
        return f"{word!r} is one word with a space: write {flag!r} and {value.strip()!r} as two entries"
    before = next((w for w in reversed(words[:at]) if _is_flag(w)), "")
    if before:
        _, meant = _find(before.partition("=")[0].partition(".")[0].replace("_", "-"), PATH, version)
        takes = "no value" if meant and meant.kind == "switch" else "one value"
        return f"{word!r} belongs to no flag, since {before.partition('=')[0]} takes {takes}: leave it out"
    close = difflib.get_close_matches(f"--{word}", options(version.flags), n=1)
    return f"{word!r} belongs to no flag: " + (f"did you mean {close[0]}?" if close else "leave it out")


def _check_ownership(each: ExtraFlag) -> None:
    if each.name in SECRETS and VARIABLE not in "".join(each.values):
        problem = f"{each.spelled} puts a secret into the pool, where many can read it: {SECRETS[each.name]}"
        raise SpecError(each.path, problem)
    field = next((BY_VALUE[each.name, value] for value in each.values if (each.name, value) in BY_VALUE), "")
    if field:
        raise SpecError(each.path, _owned(each, field))
    for candidate in _readings(each.name) if each.flag is None else (each.name,):
        if candidate in OWNED:
            raise SpecError(each.path, _owned(each, OWNED[candidate]))
        if candidate in GONE:
            raise SpecError(each.path, f"--{candidate} is gone from vLLM: {GONE[candidate]}")


def _readings(name: str) -> list[str]:
    """Return the flags that an unknown name may stand for: itself, or the one that it switches off."""
    stripped = [name.removeprefix(prefix) for prefix in ("no-", "disable-") if name.startswith(prefix)]
    return [name, *stripped, *(f"enable-{rest}" for rest in stripped)]


def _owned(each: ExtraFlag, field: str) -> str:
    remedy = f"set {field} instead" if field else "gateway, picker and plan depend on it; leave it out"
    plain = each.spelled.partition(".")[0].replace("_", "-")
    exact = each.flag is None or plain in (f"--{each.name}", *each.flag.also, *each.flag.off)
    meant = "" if exact else f" (which vLLM reads as --{each.name})"
    return f"{each.spelled}{meant} is set by the plan: {remedy}"


def _check_known(each: ExtraFlag, version: EngineVersion) -> None:
    if each.flag is not None or not version.known:
        return
    having = versions_with(f"--{each.name}" if each.spelled.startswith("--") else each.spelled)
    problem = f"{each.spelled} is not a flag of vLLM {version}"
    if having and having[0] > version.flags:
        problem += f"; it came with {dotted(having[0])}: leave it out, or use that image"
    elif having:
        problem += f"; {dotted(having[-1])} was the last with it: leave it out"
    else:
        problem += _nearest(each, version) or ": leave it out"
    raise SpecError(each.path, problem)


def _nearest(each: ExtraFlag, version: EngineVersion) -> str:
    word = f"--{each.name}" if each.spelled.startswith("--") else each.spelled
    close = difflib.get_close_matches(word, options(version.flags), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _check_values(each: ExtraFlag) -> None:
    flag = each.flag
    if flag is None:
        return
    if each.key:
        _check_key(each, flag)
    elif flag.kind == "switch":
        if "=" in each.word:
            off = f", or {flag.off[-1]} to switch it off" if flag.off else ""
            problem = f"{each.spelled} takes no value: write {each.spelled} alone{off}"
            raise SpecError(each.path, problem)
    elif not each.values and flag.takes != "maybe":
        raise SpecError(each.path, f"{each.spelled} lacks its value: add it as the next entry")
    else:
        for value in each.values:
            problem = value_problem(flag, value, separate="=" not in each.word)
            if problem:
                raise SpecError(each.path, f"{each.spelled}: {problem}")


def _check_key(each: ExtraFlag, flag: Flag) -> None:
    if flag.kind not in ("json", "object", "json-or-text"):
        problem = f"{each.spelled}: --{flag.name} takes no JSON, so it has no keys; write --{flag.name}"
        raise SpecError(each.path, problem)
    if not each.values:
        raise SpecError(each.path, f"{each.spelled} lacks its value: add it as the next entry")


def _absent_values(found: Sequence[ExtraFlag]) -> Iterator[tuple[ExtraFlag, str]]:
    """Yield flags with a choice, or a key of an object, that the version does not have, and say which."""
    given = {each.name for each in found}
    for each in found:
        if each.flag is None or PLUGINS.get(each.name) in given:
            continue
        if each.key:
            problems = [key_problem(each.flag, [each.key.partition(".")[0].removesuffix("+")])]
        else:
            problems = [absent_value(each.flag, value) for value in each.values]
        yield from ((each, f"{each.spelled}: {problem}") for problem in problems if problem)


def _check_repeated(found: Sequence[ExtraFlag]) -> None:
    seen: set[str] = set()
    for each in found:
        if each.name in seen and not each.key and (each.flag is None or each.flag.takes != "each"):
            problem = f"--{each.name} is given twice, and vLLM takes the last: leave one out"
            raise SpecError(each.path, problem)
        seen.add(each.name)


def merge_json(found: Sequence[ExtraFlag], name: str, planned: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the keys that a plan sets for a JSON flag, and the user's.

    Raises:
        SpecError: the user sets one of the plan's keys, for which ``field`` is there, or no JSON object.
    """
    merged = dict(planned)
    for each in found:
        if each.name != name:
            continue
        for keys, value in _leaves(each):
            if keys[0] in planned:
                problem = f"the plan sets {keys[0]} in --{name}, because of {field}: leave the key out"
                raise SpecError(each.path, problem)
            inner = merged
            for key in keys[:-1]:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[keys[-1]] = value
    return merged


def _leaves(each: ExtraFlag) -> Iterator[tuple[list[str], Any]]:
    text = each.values[0]
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if each.key.endswith("+"):
        yield each.key.removesuffix("+").split("."), text.split(",")
    elif each.key:
        yield each.key.split("."), value
    elif isinstance(value, dict):
        yield from (([key], below) for key, below in value.items())
    else:
        raise SpecError(each.path, f"{each.spelled}: {text!r:.60} is not a JSON object")
