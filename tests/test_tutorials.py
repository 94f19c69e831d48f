"""Tutorials and guides have commands that tests run elsewhere."""

from pathlib import Path

from tests.docs_runner.blocks import Step, blocks, commands
from tests.shapes import ROOT

TUTORIAL = ROOT / "docs" / "tutorials" / "cluster.md"
NAME = "test_the_cluster_tutorial_has_the_commands_that_the_cluster_tier_runs"


def commands_of(steps: list[Step]) -> list[str]:
    """Return the commands without comments, one for each line of a script."""
    lines = (line for step in steps for line in step.command.replace("\\\n", " ").splitlines())
    return [" ".join(line.split("    #")[0].split()) for line in lines if line.strip()]


def test_the_cluster_tutorial_has_the_commands_that_the_cluster_tier_runs() -> None:
    """Each command of the tutorial is one of README's or of the first example's, in their order, and all of
    them but those that only README explains are there."""
    run = {block.file.relative_to(ROOT): block for block in commands("e2e")}
    readme, example = run[Path("README.md")], run[Path("examples/01-minimal/README.md")]
    known = [*commands_of(readme.steps())[:1], *commands_of(example.steps())]
    typed = [
        command
        for block in blocks(TUTORIAL)
        if block.where == ("run by", NAME)
        for command in commands_of(block.steps())
    ]
    assert typed == known


def test_the_commands_of_the_envoy_guide_are_those_of_the_readme() -> None:
    """The guide starts engines and picker with README's commands, which a test runs."""
    guide, readme = (
        [block.text for block in blocks(ROOT / name) if block.where[0] != "run"]
        for name in ("docs/guides/attach-envoy.md", "README.md")
    )
    assert guide == readme


def test_the_pool_of_the_tutorial_is_the_example() -> None:
    """The YAML that the page shows is the file that its commands apply."""
    [shown] = [block.text for block in blocks(TUTORIAL) if block.language == "yaml"]
    assert shown == (ROOT / "examples" / "01-minimal" / "pool.yaml").read_text()
