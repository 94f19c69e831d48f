"""The ``kvist`` command from outside: help, version, wrong words, absent extras."""

import argparse
import importlib
import subprocess
import sys

import pytest

from kvist.__main__ import main
from kvist.commands import COMMANDS, Command

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "uvloop", "aiohttp", "zmq", "psutil", "msgspec"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from kvist.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvist", *words], capture_output=True, text=True, check=False
    )


def run_bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no package of any extra can be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, check=False
    )


def options_of(*words: str) -> argparse.Namespace:
    """Return the options with which a command's function would be called."""
    from kvist.__main__ import _parser

    return _parser().parse_args(words)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("sim",),
        ("bench",),
        ("demo",),
        ("bench", "epp"),
        ("bench", "chaos"),
        ("bench", "soak"),
        ("bench", "queue"),
        ("pools",),
        ("why",),
    ],
)
def test_help_shows_examples(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Every level of the command says how it is used."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "examples:\n  kvist " in shown


def test_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    """``kvist --version`` prints the installed version."""
    with pytest.raises(SystemExit):
        main(["--version"])

    assert capsys.readouterr().out == f"kvist {importlib.metadata.version('kvist')}\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("demo", "--engines", "0"),
        ("demo", "--seconds", "-1"),
        ("demo", "--seconds", "nan"),
        ("demo", "--eng", "2"),
        ("demo", "--picture", "demo.jpg"),
        ("pools", "-A", "-n", "serving"),
        ("bench", "epp", "--sizes", "1,none"),
        ("bench", "epp", "--transport", "carrier-pigeon"),
    ],
)
def test_what_cannot_be_read_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong words end with exit code 2 and the usage, before anything starts."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))

    assert ended.value.code == 2
    assert "usage: kvist" in capsys.readouterr().err


def test_options_reach_the_function() -> None:
    """Sizes and seconds are parsed where they are declared."""
    options = options_of("bench", "epp", "--sizes", "1,450", "--seconds", "0.5", "--mode", "duplex")
    assert (options.sizes, options.seconds, options.mode, options.transport) == (
        (1, 450),
        0.5,
        "duplex",
        None,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words))
def test_every_command_has_its_function(command: Command) -> None:
    """The function that a command names exists."""
    module, _, name = command.function.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("words", [("demo",), ("bench", "epp"), ("bench", "index")])
def test_an_absent_extra_is_named(words: tuple[str, ...]) -> None:
    """Without the packages of its extra a command says what to install and exits 2."""
    ended = run_bare(*words)

    assert ended.returncode == 2
    assert ended.stderr.startswith(f"kvist: kvist {' '.join(words)} needs ")
    assert ended.stderr.endswith("pip install 'kvist[demo]'\n")


def test_help_needs_no_extra() -> None:
    """A bare install can still say what there is."""
    ended = run_bare("demo", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_engine_arguments_go_on_unread() -> None:
    """``kvist sim engine`` takes vLLM's arguments, so it is the engine that refuses a wrong one."""
    ended = run("sim", "engine", "--no-such-flag-of-vllm")
    assert ended.returncode == 2
    assert "--no-such-flag-of-vllm" in ended.stderr
