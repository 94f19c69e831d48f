"""``kubectl kvist``: which commands it has, and what its completion offers."""

import pytest

from kvist.commands import Command
from kvist.kubectl_plugin import PLUGIN_COMMANDS, complete, main


def offered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """Return the words that are offered after these, and the directive to the shell."""
    assert complete(words) == 0
    *lines, directive = capsys.readouterr().out.splitlines()
    return lines, directive


def test_the_plugin_has_the_commands_about_pools(capsys: pytest.CaptureFixture[str]) -> None:
    """Help has kubectl's spelling, and neither the demo nor the benchmarks."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out

    assert ended.value.code == 0
    assert shown.startswith("usage: kubectl kvist ")
    assert all(f"\n    {name} " in shown for name in ("pools", "why", "plan", "compare"))
    assert "bench" not in shown
    assert "demo" not in shown


@pytest.mark.parametrize("command", PLUGIN_COMMANDS, ids=lambda command: str(command.words[0]))
def test_examples_are_those_of_the_plugin(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's examples can be copied as they are."""
    with pytest.raises(SystemExit):
        main([*command.words, "--help"])

    assert f"kubectl kvist {command.words[0]}" in capsys.readouterr().out.partition("examples:")[2]


def test_commands_options_and_values_are_completed(capsys: pytest.CaptureFixture[str]) -> None:
    """The completion offers what begins like the last word, in cobra's form."""
    assert offered(capsys, "w") == (["why"], ":4")
    assert offered(capsys, "pools", "--all") == (["--all-namespaces"], ":4")
    assert offered(capsys, "pools", "-o", "") == (["table", "wide", "json"], ":4")
    assert offered(capsys, "nonsense", "")[0] == offered(capsys, "")[0]
    assert offered(capsys, "why", "-f", "") == ([], ":0")


def test_a_cluster_that_does_not_answer_offers_no_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Names of pools are left out, and nothing is written to the terminal."""
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/nothing")
    words, directive = offered(capsys, "why", "")

    assert "--namespace" in words
    assert directive == ":4"
    assert capsys.readouterr().err == ""
