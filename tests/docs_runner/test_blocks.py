"""Every command of README, guides and examples is run, or states why not."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs_runner.blocks import COMMANDS, REASONS, Block, Step, all_blocks, blocks, commands
from tests.docs_runner.running import WrongError, run
from tests.shapes import ROOT

from kvist_epp.settings.settings import Settings
from kvist_operator.process.settings import OperatorSettings


@pytest.mark.parametrize("block", commands("unit"), ids=lambda block: block.name)
def test_a_quick_block_does_what_it_says(block: Block, tmp_path: Path) -> None:
    """Each command succeeds and prints the output that the document shows."""
    run(block, tmp_path)


def test_every_block_says_its_language_and_its_place() -> None:
    """No fence lacks a language, and every tag is a known one."""
    assert [fault for block in all_blocks() for fault in block.faults()] == []


def test_there_are_commands_of_every_kind() -> None:
    """The search finds blocks of each kind: run here, run with servers, run by a test, and not run."""
    found = [block.where for block in all_blocks() if block.language in COMMANDS]
    assert found.count(("run", "unit")) > 10
    assert {kind for kind, _ in found} == {"run", "run by", "not run"}
    assert ("run", "data-plane") in found
    assert {what for kind, what in found if kind == "not run"} <= set(REASONS)


def test_verbs_that_ci_is_said_to_run_are_a_part_of_what_it_runs() -> None:
    """Each of these targets is a prerequisite of ``make test-all``, which CI runs."""
    [needed] = re.findall(r"^test-all: (.*?) *##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    scripts = [block.text for block in commands("make test-all")]
    verbs = [line.split("#")[0].split() for text in scripts for line in text.splitlines()]

    assert verbs
    assert [words for words in verbs if words[0] != "make" or words[1] not in needed.split()] == []
    assert "make check test-all" in (ROOT / ".ci" / "run").read_text()


def test_a_test_that_runs_a_block_exists() -> None:
    """Every test that a tag names is a test of this suite."""
    there = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = {what for kind, what in (block.where for block in all_blocks()) if kind == "run by"}
    assert named - there == set()


def told() -> Iterator[tuple[str, list[str]]]:
    """Yield every simple command of every block, run or not, split into words."""
    for block in all_blocks():
        if block.language in COMMANDS:
            for step in block.steps():
                for line in step.command.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    yield block.name, [word for word in words if not re.match(r"[A-Z]+=|\d?>|&$", word)]


def test_commands_that_are_not_run_have_flags_that_are() -> None:
    """Pickers and operators accept the flags of all commands."""
    for _, words in told():
        if words[:1] == ["kvist-epp"] and "--config-file" not in " ".join(words):
            Settings.from_args(words[1:]).check()
        if words[:1] == ["kvist-operator"]:
            OperatorSettings.from_args(words[1:])


def test_files_that_are_applied_are_there() -> None:
    """Every file that a command names exists, even if no cluster runs the command."""
    named = [
        (name, words[at + 1])
        for name, words in told()
        if words and words[0] in ("kubectl", "helm", "kvist")
        for at, word in enumerate(words[:-1])
        if word in ("-f", "--filename", "--values")
    ]
    users = ("pool.yaml", "request.json", "-")  # files of the reader, and stdin
    missing = [(name, file) for name, file in named if file not in users and not (ROOT / file).exists()]
    assert len(named) > 20
    assert missing == []


SAMPLE = """\
<!-- not run: needs a GPU -->
```console
$ one \\
    --more
first
…
last
$ two
```

```sh
three
```
<!-- not run: no time -->
```bash
four
```
"""


def test_blocks_are_read(tmp_path: Path) -> None:
    """Blocks have commands over several lines, their output, tags, and errors in language or tag."""
    file = ROOT / "sample.md"
    path = tmp_path / "sample.md"
    path.write_text(SAMPLE)
    first, second, third = [Block(file, b.line, b.language, b.text, b.tag) for b in blocks(path)]

    assert first.where == ("not run", "needs a GPU")
    assert first.steps() == [Step("one \\\n    --more", ("first", "…", "last")), Step("two")]
    assert list(first.faults()) == []
    assert list(second.faults()) == ["sample.md:11: ```sh is none of bash, console, json, text, yaml"]
    [fault] = third.faults()
    assert fault.startswith("sample.md:15: 'no time' is none of needs a GPU")


@pytest.mark.parametrize(
    ("printed", "output", "agrees"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a", "b"), "a\nb\nc\n", False),
        (("a", "…"), "a\nb\nc\n", True),
        (("…", "c"), "a\nb\nc", True),
        (("…", "b"), "a\nb\nc\n", False),
        (("a", "…", "b"), "a\nb\n", True),
        (("a.c",), "abc\n", False),
        ((), "anything", True),
    ],
)
def test_output_is_held_to_what_is_shown(printed: tuple[str, ...], output: str, agrees: bool) -> None:
    """Output is compared line by line; ``…`` stands for any number of lines."""
    assert Step("x", printed).agrees(output) is agrees


@pytest.mark.parametrize("command", ["false", "echo other"])
def test_a_wrong_block_is_reported(command: str, tmp_path: Path) -> None:
    """The error names file, line and command, and has the output."""
    block = Block(ROOT / "README.md", 7, "console", f"$ {command}\nthis\n")
    with pytest.raises(WrongError, match=f"README.md:7: {command}"):
        run(block, tmp_path)
