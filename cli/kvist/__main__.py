"""The ``kvist`` command: find the subcommand, run it, and report a missing package in one line."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, Final

from .commands import COMMANDS, GROUPS, Command

EPILOG: Final = """\
examples:
  kvist demo                        compare kvist with round robin on this machine, in under three minutes
  kvist plan -f pool.yaml           show what would run for a pool, and why; needs no cluster
  kvist pools -A                    list the pools of a cluster; kubectl kvist pools -A does the same
  kvist explain -f request.json     ask a running picker where a request would go, and why
  kvist sim engine --port 8000      run a simulated engine with vLLM's API
  kvist bench epp --quick           measure the picker behind a real Envoy
  kvist COMMAND --help              show options and examples of a command
"""
OUR_PACKAGES: Final = ("kvist", "kvist_sim", "kvist_operator", "kvist_epp")
MISSING_EXTRA: Final = 2


class MissingExtraError(Exception):
    """A command needs packages of an extra that is not installed."""

    def __init__(self, command: Command, module: str) -> None:
        words = " ".join(command.words)
        super().__init__(f"kvist {words} needs {module}: pip install 'kvist[{command.extra}]'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; argparse exits 2 on what it cannot read."""
    words = list(sys.argv[1:] if argv is None else argv)
    for command in COMMANDS:
        length = len(command.words)
        if command.options is None and tuple(words[:length]) == command.words:
            return run(command, words[length:])
    options = _parser().parse_args(words)
    return run(options.command, options)


def _parser() -> argparse.ArgumentParser:
    text = "Prefix-aware routing for vLLM: plans, pools, the demo, the simulator, the benchmarks."
    return build_parser("kvist", COMMANDS, description=text, epilog=EPILOG)


def run(command: Command, options: argparse.Namespace | list[str]) -> int:
    """Call the function of a command and return its exit code; a missing package is an error in one line."""
    try:
        return int(_function(command)(options) or 0)
    except MissingExtraError as missing:
        print(f"kvist: {missing}", file=sys.stderr)
        return MISSING_EXTRA


def _function(command: Command) -> Callable[[Any], int | None]:
    module, _, name = command.function.partition(":")
    try:
        found: Callable[[Any], int | None] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        absent = missing.name or ""
        if absent.split(".")[0] in OUR_PACKAGES:
            raise
        raise MissingExtraError(command, absent) from missing
    return found


def build_parser(
    program: str, commands: Iterable[Command], *, description: str, epilog: str, as_plugin: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a program with these commands; ``as_plugin``: it is a plugin of kubectl."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvist {metadata.version('kvist')}")
    top = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups: dict[str, _Subparsers] = {}
    for command in commands:
        first = command.words[0]
        if first in GROUPS and first not in groups:
            groups[first] = _group(top, first, GROUPS[first])
        made = _add(groups.get(first, top), command, program)
        made.set_defaults(command=command, as_plugin=as_plugin)
    return parser


_Subparsers = Any  # argparse has no public name for what add_subparsers returns


def _group(top: _Subparsers, name: str, text: str) -> _Subparsers:
    lines = [
        f"  kvist {' '.join(c.words):<12} {c.summary}"
        for c in COMMANDS
        if c.words[0] == name and not c.hidden
    ]
    parser = top.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["examples:", *lines])
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add(parent: _Subparsers, command: Command, program: str) -> argparse.ArgumentParser:
    examples = command.examples.replace("kvist ", f"{program} ")
    parser: argparse.ArgumentParser = parent.add_parser(
        command.words[-1],
        **({} if command.hidden else {"help": command.summary}),
        description=command.summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.options is not None:
        command.options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
