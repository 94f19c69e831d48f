"""``python -m tests.fuzz.harness TARGET [libFuzzer's options]``: one target under atheris, until stopped."""

import importlib
import sys

import atheris

INSTRUMENTED = ["kvist_epp", "hpack"]


def main(argv: list[str]) -> None:
    """Fuzz the target named first."""
    with atheris.instrument_imports(include=INSTRUMENTED):
        targets = importlib.import_module("tests.fuzz.targets")
    run = targets.TARGETS[argv[1]].run
    atheris.Setup([argv[0], *argv[2:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
