"""vLLM's command line: the table of its flags, and a parser that follows its rules.

Sources: ``vllm/engine/arg_utils.py``, ``vllm/entrypoints/launchers/cli_args.py`` and
``vllm/utils/argparse_utils.py`` of 0.32; flags new in 0.33 are marked. What vLLM refuses is refused in the
same words, by argparse itself, with exit code 2.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

_SUFFIXES: Final = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_DOTTED: Final = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=]+?)(\+?)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of ``flags.tsv``."""

    names: tuple[str, ...]
    kind: str
    """Name of the parser for the value: a key of ``_READERS`` with ``optional-`` before or ``-list`` after,
    or bool, switch, append, lora, maybe-str."""
    default: Any
    choices: tuple[str, ...]
    since: str
    """First vLLM release that has the flag."""


@cache
def table() -> tuple[Flag, ...]:
    """Return every flag of ``vllm serve``."""
    text = files("kvist_sim.engine").joinpath("flags.tsv").read_text(encoding="utf-8")
    return tuple(_row(line) for line in text.splitlines() if not line.startswith("#"))


def _row(line: str) -> Flag:
    names, kind, default, choices, since = line.split("\t")
    return Flag(
        names=tuple(names.split(",")),
        kind=kind,
        default=None if default == "-" else json.loads(default),
        choices=() if choices == "-" else tuple(choices.split("|")),
        since=since,
    )


def human(value: str) -> int:
    """Return a number: ``64k`` is 64,000, ``64K`` is 65,536; only lower case allows decimals.

    Raises ValueError.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value.strip())
    if found is None:
        return int(value)
    number, suffix = found.groups()
    return int((float if suffix.islower() else int)(number) * _SUFFIXES[suffix])


def human_or_auto(value: str) -> int:
    """Parse like ``human``; ``auto`` and -1 give -1. Raises ValueError."""
    return -1 if value.strip().lower() in {"-1", "auto"} else human(value)


def _object(value: str) -> dict[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"Value {value} is not a JSON object.")
    return found


def _object_or_text(value: str) -> Any:
    return json.loads(value) if re.fullmatch(r"\s*{.*}\s*", value, re.DOTALL) else value


def _lower(value: str) -> str:
    return value.lower().replace("-", "_")


_object.__name__ = "JSON object"

_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "json": json.loads,
    "object": _object,
    "json-or-str": _object_or_text,
    "human": human,
    "human-or-auto": human_or_auto,
    "lower": _lower,
}


def _optional(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        return None if value in {"", "None"} else reader(value)

    read.__name__ = getattr(reader, "__name__", "value")
    return read


class _Lora(argparse.Action):
    """Parser of ``name=path`` or a JSON object for each adapter."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        setattr(namespace, self.dest, [self._module(parser, value) for value in values if value])

    def _module(self, parser: argparse.ArgumentParser, value: str) -> tuple[str, str]:
        if "=" in value and "," not in value:
            name, _, path = value.partition("=")
            return name, path
        try:
            found = json.loads(value)
            return str(found["name"]), str(found["path"])
        except json.JSONDecodeError:
            parser.error(f"Invalid JSON format for --lora-modules: {value}")
        except (KeyError, TypeError) as problem:
            parser.error(f"Invalid fields for --lora-modules: {value} - {problem}")


class Parser(argparse.ArgumentParser):
    """argparse with vLLM's additions: ``_`` for ``-`` in names, dotted JSON keys, ``-O3``, ``--config``."""

    def read(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. Raises SystemExit with code 2 after an error message, as vLLM does."""
        given = list(args)
        if given[:1] == ["serve"]:
            given = given[1:]
        return self.parse_args(_joined(_spelled(self._with_config(given))))

    def _with_config(self, args: list[str]) -> list[str]:
        """Put the flags of the YAML file before those of the command line, which override them."""
        if "--config" not in args:
            return args
        at = args.index("--config")
        if at + 1 == len(args):
            self.error("argument --config: expected one argument")
        model = 0 if args[0].startswith("-") else 1
        return [*args[:model], *self._from_file(args[at + 1]), *args[model:at], *args[at + 2 :]]

    def _from_file(self, name: str) -> list[str]:
        import yaml

        try:
            found = yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as problem:
            self.error(f"argument --config: cannot read {name}: {type(problem).__name__}")
        if not isinstance(found, dict):
            self.error(f"argument --config: {name} is not a mapping")
        return [word for key, value in found.items() for word in self._words(f"--{key}", value)]

    def _words(self, flag: str, value: Any) -> list[str]:
        if isinstance(value, bool):
            negated = f"--no-{flag[2:]}"
            return [flag] if value else [negated] if negated in self._option_string_actions else []
        if isinstance(value, list):
            return [flag, *map(str, value)] if value else []
        return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr instead of three hundred flags."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _spelled(args: list[str]) -> list[str]:
    """Underscores of names become dashes (not in JSON keys or values), ``-O3`` a flag and a value."""
    out: list[str] = []
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            head, dot, keys = name.partition(".")
            out.append(head.replace("_", "-") + dot + keys + equals + value)
        elif arg.startswith("-O"):
            out += ["--optimization-level", *filter(None, [arg[2:].removeprefix("=")])]
        else:
            out.append(arg)
    return out


def _joined(args: list[str]) -> list[str]:
    """``--x.a.b 1 --x.c+ v`` becomes ``--x '{"a": {"b": 1}, "c": ["v"]}'``, at the end."""
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    remaining = iter(args)
    for arg in remaining:
        found = _DOTTED.fullmatch(arg)
        if found is None:
            rest.append(arg)
            continue
        flag, keys, more, value = found.groups()
        text = value if value is not None else next(remaining, "")
        leaf = text.split(",") if more else _leaf(text)
        _merge(objects.setdefault(flag, {}), keys.split("."), leaf)
    return rest + [word for flag, value in objects.items() for word in (flag, json.dumps(value))]


def _leaf(text: str) -> Any:
    for reader in (json.loads, human):
        try:
            return reader(text)
        except ValueError:
            continue
    return text


def _merge(target: dict[str, Any], keys: list[str], leaf: Any) -> None:
    for key in keys[:-1]:
        inner = target.get(key)
        target[key] = target = inner if isinstance(inner, dict) else {}
    old = target.get(keys[-1])
    target[keys[-1]] = old + leaf if isinstance(old, list) and isinstance(leaf, list) else leaf


def parser(prog: str = "kvist sim engine") -> Parser:
    """Return a parser of vLLM's flags; the caller may add its own."""
    made = Parser(prog=prog, usage=f"{prog} [serve] [MODEL] [any option of vllm serve] [--sim-…]")
    made.add_argument("model_tag", nargs="?")
    for flag in table():
        _add(made, flag)
    return made


def _add(made: Parser, flag: Flag) -> None:
    if flag.kind == "bool":
        made.add_argument(*flag.names, action=argparse.BooleanOptionalAction, default=flag.default)
    elif flag.kind == "switch":
        made.add_argument(*flag.names, action="store_true")
    elif flag.kind == "append":
        made.add_argument(*flag.names, action="append", default=[])
    elif flag.kind == "lora":
        made.add_argument(*flag.names, action=_Lora, nargs="+", default=None)
    else:
        made.add_argument(*flag.names, **_value(flag))


def _value(flag: Flag) -> dict[str, Any]:
    kind = flag.kind.removeprefix("optional-").removeprefix("maybe-").removesuffix("-list")
    optional = flag.kind.startswith("optional-")
    found: dict[str, Any] = {"default": flag.default}
    found["type"] = _optional(_READERS[kind]) if optional else _READERS[kind]
    if flag.choices:
        found["choices"] = [*map(_READERS[kind], flag.choices), *([None] if optional else [])]
    if flag.kind.endswith("-list"):
        found["nargs"] = "+"
    if flag.kind.startswith("maybe-"):
        found |= {"nargs": "?", "const": True}
    return found
