"""Read settings from a command line and the environment; shared by the picker and the operator.

Each field of a settings class names its flag explicitly (``flag``), so that renaming a field renames no flag.
A flag may have an older name: a hidden alias that works on the command line and in the environment.
Standard library only.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from kvist_epp.errors import SettingsError

Field: TypeAlias = dataclasses.Field[Any]

_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|µs|ns|h|m|s)")


@dataclass(frozen=True, slots=True)
class Program:
    """A command: its name and the texts of its help."""

    name: str
    description: str
    epilog: str

    def variable(self, name: str) -> str:
        """Return the environment variable of a flag: ``--grpc-port`` → ``KVIST_EPP_GRPC_PORT``."""
        return f"{self.name}_{name.removeprefix('--')}".replace("-", "_").upper()


def flag(
    name: str,
    default: Any,
    text: str,
    *,
    old_name: str = "",
    choices: tuple[str, ...] | None = None,
    unit: str = "",
) -> Any:
    """Declare a settings field as the flag ``name``, such as ``--grpc-port``.

    ``old_name``: an earlier name of the flag, which still works but is not shown. ``unit``: the placeholder
    of the value in the help; ``SECONDS`` also accepts durations such as ``1m30s``.
    """
    metadata = {"flag": name, "old_flag": old_name, "help": text, "choices": choices, "unit": unit}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(settings: type) -> dict[str, str]:
    """Return the flag of each field of a settings class: ``{"grpc_port": "--grpc-port", …}``."""
    return {f.name: f.metadata["flag"] for f in dataclasses.fields(settings)}


def to_args(settings: Any) -> list[str]:
    """Return the shortest command line that gives these settings.

    A flag with an older name is written by the older name, which pickers of earlier releases know too: during
    an upgrade the operator writes arguments for both.
    """
    return [
        f"{f.metadata['old_flag'] or f.metadata['flag']}={format_value(getattr(settings, f.name))}"
        for f in dataclasses.fields(settings)
        if getattr(settings, f.name) != f.default
    ]


def format_value(value: object) -> str:
    """Return a value as the text that its flag accepts."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_seconds(text: str) -> float:
    """Parse ``30``, ``30s``, ``1m30s`` or ``1.5h`` as seconds; raise ValueError for anything else.

    The units are those of Go's ``time.ParseDuration``, so that values of llm-d's flags work.
    """
    try:
        return float(text)
    except ValueError:
        sign, parts = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
        if not parts or _PART.sub("", parts):
            raise ValueError(f"{text!r} is not a duration; write seconds or 1m30s") from None
        return sign * math.fsum(float(number) * _UNITS[unit] for number, unit in _PART.findall(parts))


def parse(
    fields: Iterable[Field],
    argv: Sequence[str],
    environment: Mapping[str, str],
    program: Program,
) -> dict[str, Any]:
    """Return the value of each field: from ``argv``, else from the environment, else its default.

    An empty variable counts as unset, and so does the variable of a flag that ``argv`` gives. argparse exits
    with 2 on arguments that it cannot read.

    Raises:
        SettingsError: an environment variable has an invalid value.
    """
    given = {word.partition("=")[0] for word in argv}
    if given & {"-h", "--help"}:
        environment = {}
    parser = _Parser(
        prog=program.name,
        description=program.description,
        epilog=program.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for f in fields:
        names = [name for name in (f.metadata["flag"], f.metadata["old_flag"]) if name]
        variables = [] if given.intersection(names) else map(program.variable, names)
        variable = next((name for name in variables if environment.get(name)), "")
        default = _from_environment(variable, environment[variable], f) if variable else f.default
        _add(parser, f, names, default)
    return vars(parser.parse_args(list(argv)))


class _Parser(argparse.ArgumentParser):
    """Reports an error without listing all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the flags\n")


def _add(parser: argparse.ArgumentParser, f: Field, names: Sequence[str], default: Any) -> None:
    options: dict[str, Any] = {"type": _converter(f), "default": default, "dest": f.name}
    if f.metadata["choices"]:
        options["choices"] = f.metadata["choices"]
    elif isinstance(f.default, bool):
        options |= {"nargs": "?", "const": True, "metavar": "true|false"}
    else:
        options["metavar"] = f.metadata["unit"]
    shown = "" if f.default == "" else f" (default: {format_value(f.default)})"
    parser.add_argument(names[0], help=f.metadata["help"].replace("%", "%%") + shown, **options)
    for old_name in names[1:]:
        parser.add_argument(old_name, help=argparse.SUPPRESS, **options)


def _converter(f: Field) -> Callable[[str], Any]:
    if isinstance(f.default, bool):
        return _boolean
    return _duration if f.metadata["unit"] == "SECONDS" else type(f.default)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _duration(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _from_environment(variable: str, text: str, f: Field) -> Any:
    try:
        value = _converter(f)(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SettingsError(f"{variable}: {text!r} is not a valid {type(f.default).__name__}") from error
    if f.metadata["choices"] and value not in f.metadata["choices"]:
        raise SettingsError(f"{variable}: {text!r} is none of {', '.join(f.metadata['choices'])}")
    return value
