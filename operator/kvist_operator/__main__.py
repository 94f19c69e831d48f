"""The ``kvist-operator`` command: runs until SIGTERM; ``kvist-operator check`` tests an installation."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from kvist_operator.errors import OperatorError
from kvist_operator.process.settings import OperatorSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 2 for invalid settings, 1 when the operator cannot start, else 0."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["check"], ["trial"]):  # trial: the earlier name
        return _check(words[1:])
    try:
        settings = OperatorSettings.from_args(words, os.environ)
    except OperatorError as error:
        return _fail(error, 2)
    # As process 1 of a container it would ignore a signal without a handler, while modules are loaded.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        from kvist_operator.process import runtime
    except ImportError as error:
        return _fail(f"{error.name} is not installed: pip install 'kvist[operator]'", 2)
    try:
        asyncio.run(runtime.serve(settings, os.environ))
    except OperatorError as error:
        return _fail(error, 1)
    return 0


def _check(words: Sequence[str]) -> int:
    from kvist_operator.process import selftest

    try:
        print(selftest.main(words, os.environ))  # noqa: T201 - the result of the command
    except OperatorError as error:
        return _fail(error, 1)
    return 0


def _fail(error: object, code: int) -> int:
    print(f"kvist-operator: {error}", file=sys.stderr)  # noqa: T201 - before logging is configured
    return code


if __name__ == "__main__":
    raise SystemExit(main())
