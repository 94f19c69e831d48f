"""argv → Settings → run until SIGTERM."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from kvist_operator.errors import OperatorError
from kvist_operator.process.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """The ``kvist-operator`` command; 2 for settings that do not work, 1 when it could not start."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["trial"]:
        return _try(words[1:])
    try:
        settings = Settings.from_args(words, os.environ)
    except OperatorError as error:
        return _complain(error, 2)
    # As process 1 of a container a signal without a handler would do nothing, while modules are loaded.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        from kvist_operator.process import serving
    except ImportError as error:
        return _complain(f"{error.name} is not installed: pip install 'kvist[operator]'", 2)
    try:
        asyncio.run(serving.serve(settings, os.environ))
    except OperatorError as error:
        return _complain(error, 1)
    return 0


def _try(words: Sequence[str]) -> int:
    from kvist_operator.process import trial

    try:
        print(trial.main(words, os.environ))  # noqa: T201 - what it was asked for
    except OperatorError as error:
        return _complain(error, 1)
    return 0


def _complain(what: object, code: int) -> int:
    print(f"kvist-operator: {what}", file=sys.stderr)  # noqa: T201 - before there is a log
    return code


if __name__ == "__main__":
    raise SystemExit(main())
