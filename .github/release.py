# ruff: noqa: INP001 - a script, no package
"""Steps of the release workflow that no other tool does. Needs only Python 3.11 or newer.

``release.py version [--tag vX.Y.Z]`` prints the version of pyproject.toml, and fails for a tag of another.
``release.py chart --registry R --to FOLDER`` copies the chart with the registry of the images in it.
"""

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EMPTY = '\nregistry: ""\n'


def version() -> str:
    """The one place where it is said."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def chart(registry: str, folder: Path) -> None:
    """The chart as it is published. ValueError: no such registry, or the chart has one already."""
    if not registry or registry != registry.strip() or '"' in registry:
        raise ValueError(f"--registry: {registry!r} is no registry; set the repository's variable REGISTRY")
    shutil.copytree(ROOT / "charts" / "kvist", folder / "kvist")
    values = folder / "kvist" / "values.yaml"
    text = values.read_text()
    if text.count(EMPTY) != 1:
        raise ValueError(f"{values}: no line {EMPTY.strip()!r}")
    values.write_text(text.replace(EMPTY, f'\nregistry: "{registry}"\n'))


def main(argv: list[str]) -> str:
    """Run a command and return the text to print. Raises ValueError."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("version").add_argument("--tag", default="")
    made = verbs.add_parser("chart")
    made.add_argument("--registry", required=True)
    made.add_argument("--to", type=Path, required=True)
    told = parser.parse_args(argv)
    if told.verb == "chart":
        chart(told.registry, told.to)
        return str(told.to / "kvist")
    if told.tag and told.tag != f"v{version()}":
        raise ValueError(f"the tag {told.tag} is not v{version()}, the version of pyproject.toml")
    return version()


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))  # noqa: T201 - for the workflow
    except ValueError as error:
        sys.exit(f"release.py: {error}")
