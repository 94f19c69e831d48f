"""``kubectl kvist``: commands about pools as a plugin of kubectl, and their completion.

kubectl runs the program ``kubectl-kvist`` of the PATH, and ``kubectl_complete-kvist`` for the words of the
shell's completion (kubectl 1.26 and newer). A command without options is about the namespace of the
kubeconfig's current context, and about its only pool.
"""

import argparse
import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from .__main__ import build_parser, run
from .commands import COMMANDS

PROGRAM: Final = "kubectl kvist"
PLUGIN_COMMANDS: Final = tuple(
    command for command in COMMANDS if command.words[0] not in ("demo", "sim", "bench") and not command.hidden
)
"""Those about pools and their pickers."""
EPILOG: Final = """\
examples:
  kubectl kvist pools -A            list the pools of the cluster
  kubectl kvist why qwen3-32b       show why a pool runs as it does, and what to do
  kubectl kvist COMMAND --help      show options and examples of a command
"""
DIRECTIVE: Final = ":4"
"""Cobra's last line of a completion: do not offer names of files where nothing matches."""
FILES: Final = ":0"
"""The same, with names of files: after an option that takes one."""
POOLS_SECONDS: Final = 2.0
"""Longest wait for the names of pools while a user waits for a completion."""
_FILE_OPTIONS: Final = ("FILE",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line of ``kubectl kvist`` and return its exit code."""
    options = _parser().parse_args(argv)
    return run(options.command, options)


def complete(argv: Sequence[str] | None = None) -> int:
    """Print what may follow the words of ``kubectl kvist``, one a line, for kubectl's completion.

    The last word is the one that is being written, and may be empty.
    """
    *before, last = list(sys.argv[1:] if argv is None else argv) or [""]
    files = _takes_file(before)
    words = [] if files else [word for word in _candidates(before) if word.startswith(last)]
    print("\n".join([*words, FILES if files else DIRECTIVE]))
    return 0


def _parser() -> argparse.ArgumentParser:
    text = "Pools of kvist in the cluster of your kubeconfig: what they do, and why."
    return build_parser(PROGRAM, PLUGIN_COMMANDS, description=text, epilog=EPILOG, as_plugin=True)


def _command(words: Sequence[str]) -> argparse.ArgumentParser | None:
    """Return the parser of the command in these words; None before there is one."""
    found = _subparsers()
    return next((found[word] for word in words if word in found), None)


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    [actions] = [each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(actions.choices)


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """Return the option with this name that takes a value; None if there is none."""
    found = parser._option_string_actions.get(word)
    return found if found is not None and found.nargs != 0 else None


def _takes_file(words: Sequence[str]) -> bool:
    parser = _command(words)
    option = _option(parser, words[-1]) if parser and words else None
    return option is not None and option.metavar in _FILE_OPTIONS


def _candidates(words: Sequence[str]) -> Iterator[str]:
    parser = _command(words)
    if parser is None:
        yield from _subparsers()
        return
    option = _option(parser, words[-1])
    if option is not None:
        yield from map(str, option.choices or ())
        if option.dest == "pool":
            yield from _pools(parser, words[:-1])
        return
    if any(not each.option_strings and each.dest == "pool" for each in parser._actions):
        yield from _pools(parser, words)
    yield from (name for name in parser._option_string_actions if name.startswith("--"))


def _pools(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the names of pools that the words' options lead to; none where the cluster does not answer."""
    from .cluster_access import list_pools, open_cluster
    from .errors import CommandError

    at = next(i for i, word in enumerate(words) if word in _subparsers())

    async def ask() -> list[str]:
        options = parser.parse_args([*words[:at], *words[at + 1 :]])
        async with asyncio.timeout(POOLS_SECONDS), open_cluster(options) as cluster:
            return [pool["metadata"]["name"] for pool in await list_pools(cluster)]

    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(CommandError, TimeoutError, SystemExit),
    ):
        return asyncio.run(ask())
    return []


if __name__ == "__main__":
    sys.exit(main())
