"""The ``kvist-epp`` command: read the settings, run the role until SIGTERM, then drain."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from kvist_epp.compat.llmd import translated
from kvist_epp.errors import KvistError
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import MODEL_HEADER


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvist-epp``; return 2 for invalid settings, 1 if the process failed, otherwise 0."""
    try:
        translation = translated(sys.argv[1:] if argv is None else argv)
        settings = Settings.from_args(translation.argv, os.environ).check()
    except KvistError as error:
        return _complain(error, 2)
    for note in translation.notes:
        _complain(note, 0)
    try:
        serving = _serving(settings.role)
    except ImportError as error:
        return _complain(f"{error.name} is not installed: pip install 'kvist[epp]'", 2)
    try:
        serving.main(settings)
    except (KvistError, OSError) as error:
        return _complain(error, 1)
    return 0


def _serving(role: str) -> ModuleType:
    """Import the module of the role; the filter loads nothing of the picker."""
    return import_module(
        "kvist_epp.model_header.filter_process" if role == MODEL_HEADER else "kvist_epp.app.app"
    )


def _complain(what: object, code: int) -> int:
    print(f"kvist-epp: {what}", file=sys.stderr)  # noqa: T201 - before there is a log
    return code


if __name__ == "__main__":
    raise SystemExit(main())
