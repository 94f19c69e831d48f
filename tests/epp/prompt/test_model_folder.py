"""Promises of ``source``: ``hf://`` against a hub of our own on loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.hub import Hub, hub_with
from tests.models import folders

from kvist_epp.prompt.model import Model

LOAD = """
import sys
from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Model
try:
    model = Model.load(sys.argv[1])
    print(model.why_no_chats or len(model.pieces) > 0)
except ModelFilesError as error:
    print(error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """Serve a hub with one model, whose weights should not be downloaded."""
    home = folders.write("llama3", tmp_path / "published")
    files = {path.name: path.read_bytes() for path in home.iterdir()} | {"model.safetensors": b"weights"}
    with hub_with(files) as address:
        yield address


def load(source: str, endpoint: str, home: Path, **environment: str) -> str:
    """Return what a picker logs of this source at its start, in a process of its own: the hub's client reads
    the environment when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, source],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_model_of_the_hub_is_fetched_without_its_weights(hub: str, tmp_path: Path) -> None:
    """Tokenizer and template only; the second start needs no hub."""
    first = load("hf://kvist/twig@main", hub, tmp_path / "cache")
    fetched = {path.rpartition("/")[2] for path in Hub.served if "/resolve/" in path}
    again = load("hf://kvist/twig@main", hub, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert (first, fetched, again) == ("True", {"tokenizer.json", "tokenizer_config.json"}, "True")


@pytest.mark.parametrize(
    ("source", "environment", "remedy"),
    [
        ("hf://kvist/absent", {}, "HF_TOKEN"),
        ("hf://kvist/twig", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    ],
)
def test_what_the_hub_does_not_give_names_the_remedy(
    hub: str, tmp_path: Path, source: str, environment: dict[str, str], remedy: str
) -> None:
    """A wrong name or a missing token, and an empty cache without a hub."""
    said = load(source, hub, tmp_path / "cache", **environment)
    assert (source in said, remedy in said) == (True, True)


CODED = "its engines write chats in code of their own (mistral)"


@pytest.mark.parametrize(
    ("published", "environment", "expected"),
    [
        (["model.safetensors"], {}, "True"),
        (["consolidated.safetensors"], {}, CODED),
        (["original/consolidated.00.safetensors"], {}, CODED),
        (["params.json"], {"HF_HUB_OFFLINE": "1"}, CODED),
        (["model.safetensors"], {"HF_HUB_OFFLINE": "1"}, "True"),
    ],
)
def test_the_hub_says_whether_weights_are_in_the_format_of_mistral(
    tmp_path: Path, published: list[str], environment: dict[str, str], expected: str
) -> None:
    """Engines use Mistral's tokenizer for its own weights only; offline, the configuration decides."""
    home = folders.write("mistral", tmp_path / "published")
    files = {path.name: path.read_bytes() for path in home.iterdir()} | {"tokenizer.model.v3": b""}
    with hub_with(files | dict.fromkeys(published, b"{}")) as address:
        load("hf://kvist/twig", address, tmp_path / "cache")
        found = load("hf://kvist/twig", address, tmp_path / "cache", **environment)
    assert found == expected


def test_a_hub_that_lists_no_files_is_an_error(tmp_path: Path) -> None:
    """The mode of the tokenizer is not guessed: the error names the flag that settles it."""
    home = folders.write("mistral", tmp_path / "published")
    files = {path.name: path.read_bytes() for path in home.iterdir()} | {"tokenizer.model.v3": b""}
    with hub_with(files, listings=1) as address:
        said = load("hf://kvist/twig", address, tmp_path / "cache")
    assert "set --tokenizer-mode" in said


def test_a_folder_with_no_other_vocabulary_is_of_mistral(tmp_path: Path) -> None:
    """A copy of the tokenizer's file alone is enough; beside another one, weights in any folder decide."""
    home = folders.write_mistral("v13", tmp_path)
    (home / "consolidated.safetensors").unlink()
    alone = Model.load(str(home))
    folders.write("mistral", home)
    beside_another = Model.load(str(home))
    (home / "original").mkdir()
    (home / "original" / "consolidated.00.safetensors").write_text("")
    with_weights = Model.load(str(home))
    sizes = [len(one.pieces) for one in (alone, with_weights)]
    assert (sizes, len(beside_another.pieces) < 20_100) == ([20_100, 20_100], True)
