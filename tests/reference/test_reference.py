"""docs/reference says what the code says."""

import pytest
from tests.reference.crds import pools
from tests.reference.generate import FOLDER, MADE
from tests.reference.markdown import prose

from kvist_epp.settings.arguments import flags_of
from kvist_epp.settings.settings import Settings
from kvist_operator.process.settings import OperatorSettings


@pytest.mark.parametrize("name", MADE)
def test_a_page_of_the_reference_is_current(name: str) -> None:
    """Each page is what `make docs` writes from the code."""
    assert (FOLDER / name).read_text() == MADE[name](), "run `make docs`"


def test_the_folder_has_no_other_page() -> None:
    """A page that is no longer written is deleted."""
    assert {path.name for path in FOLDER.iterdir()} == set(MADE)


@pytest.mark.parametrize(
    ("name", "settings"), [("picker-flags.md", Settings), ("operator-flags.md", OperatorSettings)]
)
def test_every_flag_has_a_row(name: str, settings: type) -> None:
    """Each flag begins a row of its page."""
    rows = [line.split("`")[1].split()[0] for line in MADE[name]().splitlines() if line.startswith("| `--")]
    assert rows == list(flags_of(settings).values())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "time after --stall-timeout is spec.engine.env",
            "time after `--stall-timeout` is `spec.engine.env`",
        ),
        ("<pool>: tcp://*:5557 | ``n``", "&lt;pool&gt;: tcp://\\*:5557 \\| `n`"),
        ("a `x|y` stays code", "a `x\\|y` stays code"),
        ("kvist_epp_requests_total, kvist.dev/pool", "`kvist_epp_requests_total`, `kvist.dev/pool`"),
    ],
)
def test_texts_of_the_code_become_markdown(text: str, shown: str) -> None:
    """Names become code, and nothing is read as HTML, emphasis or the end of a cell."""
    assert prose(text) == shown


def test_fields_of_lists_and_maps_have_rows() -> None:
    """The page of pools has fields of objects in lists, enumerations, bounds and defaults."""
    text = pools()
    assert "| `adapters[].name` |" in text
    assert "`Generate`, `Embed`" in text
    assert "| `replicas` | integer, 0 to 10,000 | `1` |" in text
