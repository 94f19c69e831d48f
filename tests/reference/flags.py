"""Reference of the command lines: flags of kvist-epp and kvist-operator, commands of kvist."""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tests.reference.markdown import code, page, prose, table

from kvist.commands import COMMANDS, Command
from kvist_epp.settings.arguments import Program, format_value
from kvist_epp.settings.settings import PROGRAM as PICKER
from kvist_epp.settings.settings import Settings
from kvist_operator.process.settings import PROGRAM as OPERATOR
from kvist_operator.process.settings import OperatorSettings

HEAD: Final = ("flag", "default", "meaning")


def picker_flags() -> str:
    """Return the page of the picker's flags."""
    return _flags(PICKER, Settings, "kvist_epp.settings.settings")


def operator_flags() -> str:
    """Return the page of the operator's flags."""
    return _flags(OPERATOR, OperatorSettings, "kvist_operator.process.settings")


def _flags(program: Program, settings: type, source: str) -> str:
    variable = program.variable("--log-level")
    return page(
        f"Flags of {program.name}",
        source,
        prose(program.description),
        f"Each flag can also be set by an environment variable: `--log-level` by `{variable}`. The "
        "command line wins, and an empty "
        "variable counts as unset. `SECONDS` accepts durations such as `1m30s`. Switches take `true` or "
        "`false`; the name alone "
        "means `true`.",
        table(HEAD, (_flag(field) for field in dataclasses.fields(settings)), "flags"),
        "## Examples",
        f"```text\n{program.epilog.partition('examples:')[2].strip(chr(10)).rstrip()}\n```",
    )


def _flag(field: Any) -> tuple[str, str, str]:
    data = field.metadata
    text = prose(data["help"])
    if data["choices"]:
        text += f" (one of {', '.join(map(code, data['choices']))})"
    if data["old_flag"]:
        text += f" (former name: {code(data['old_flag'])})"
    name = f"{data['flag']} {data['unit']}".strip()
    default = f"{field.default:g}" if isinstance(field.default, float) else format_value(field.default)
    return code(name), code(default), text


def command_line() -> str:
    """Return the page of the commands of ``kvist``."""
    shown = [command for command in COMMANDS if not command.hidden]
    extras = sorted({command.extra for command in shown})
    return page(
        "The kvist command",
        "kvist.commands",
        "A checkout's `make setup` installs every command. With pip, a command needs an extra of the "
        "package: " + ", ".join(code(f"kvist[{extra}]") for extra in extras) + ".",
        table(
            ("command", "what it does"),
            ((f"[`{_name(each)}`](#{_name(each).replace(' ', '-')})", prose(each.summary)) for each in shown),
        ),
        *(part for command in shown for part in _command(command)),
    )


def _name(command: Command) -> str:
    return f"kvist {' '.join(command.words)}"


def _command(command: Command) -> Iterator[str]:
    summary = prose(command.summary)
    yield f"## {_name(command)}\n\n{summary[0].upper()}{summary[1:]}. Extra: `{command.extra}`."
    if command.options is None:
        yield f"Its options: `{_name(command)} --help`."
    else:
        parser = argparse.ArgumentParser(add_help=False)
        command.options(parser)
        rows = list(_options(parser._actions))
        if rows:
            yield table(("option", "meaning"), rows)
    yield f"```text\n{_dedented(command.examples)}\n```"


def _options(actions: Iterable[argparse.Action]) -> Iterator[tuple[str, str]]:
    for action in actions:
        if action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        takes_value = bool(action.option_strings) and action.nargs != 0
        value = f" {_value(action)}" if takes_value else ""
        yield code(f"{names}{value}"), prose(_help(action))


def _value(action: argparse.Action) -> str:
    if action.choices:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("  ") for line in text.strip("\n").splitlines())
