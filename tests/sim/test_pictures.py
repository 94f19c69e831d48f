"""Pictures of the policies' table: what is drawn, and how it gets into a page."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvist_sim.bench.harness.plots import DARK, LIGHT, Curve, Panel, Picture, drawn, write
from kvist_sim.bench.route import page as route_docs
from kvist_sim.bench.route import pictures as route_pictures

PAGE = "# Benchmarks\n\n<!-- route -->\nold\n<!-- /route -->\nthe rest\n"


def row(policy: str, load: float, goodput: float, case: str = "chat") -> dict[str, Any]:
    """A row of the document."""
    interval = {"mean": goodput, "half": 0.01}
    figures = dict.fromkeys(("ttft_p50", "ttft_p90", "hit_ratio"), 0.5)
    return {
        "case": case,
        "load": load,
        "policy": policy,
        "goodput": interval,
        "ahead": interval,
        "seeds": 2,
        **figures,
    }


ROWS = [row(policy, load, 1 - load / 2) for policy in ("kvist", "dynamo", "random") for load in (0.5, 1.0)]


def found(**changed: Any) -> dict[str, Any]:
    """A stamped document."""
    standing = {"case": "chat", "load": 1.0, "best": "dynamo", "lost": False, "harmed": ""}
    loads = [[0.0, [1, 2]], [1.0, [2, 1]]]
    cell = {"case": "hot-prefix", "load": 1.0, "policy": "kvist", "seed": 1}
    return route_docs.stamped(
        {
            "about": {"engines": "4", "seeds": "2", "capacity": "a rate"},
            "rows": ROWS,
            "runs": [{"cell": cell, "loads": loads}],
            "standing": [standing | changed],
            "workloads": [
                {
                    "name": "chat",
                    "summary": "talk",
                    "ttft": 2.0,
                    "tpot": 0.06,
                    "held_out": True,
                    "capacity": 7.25,
                }
            ],
        }
    )


def test_a_drawing_is_the_same_each_time() -> None:
    """Nothing in a file changes unless the figures do, and it is well-formed."""
    [picture, *_] = route_pictures.pictures(ROWS)
    first = drawn(picture, LIGHT, "svg")
    assert first == drawn(picture, LIGHT, "svg")
    assert ET.fromstring(first).tag.endswith("svg")


def test_themes_differ_and_text_has_the_page_s_colour() -> None:
    """Dark letters on light pages, light ones on dark, no background of their own."""
    [picture, *_] = route_pictures.pictures(ROWS)
    light, dark = (drawn(picture, theme, "svg").decode() for theme in (LIGHT, DARK))
    assert LIGHT.text in light
    assert LIGHT.text not in dark
    assert DARK.text in dark


def test_every_colour_and_stroke_is_used_once() -> None:
    """No two named policies look alike."""
    assert len(route_pictures.NAMED) <= len(LIGHT.colours) == len(DARK.colours)
    assert len(set(LIGHT.colours)) == len(LIGHT.colours)


def test_a_panel_for_each_workload_and_a_curve_for_each_policy() -> None:
    """Sorted by load; a policy with one load has no curve, a workload without curves no panel."""
    rows = [*reversed(ROWS), row("lmetric", 0.5, 1.0), row("kvist", 0.5, 1.0, case="lonely")]
    [goodput, *_] = route_pictures.pictures(rows)
    [panel] = goodput.panels
    assert panel.title == "chat"
    assert {curve.name for curve in panel.curves} == {"kvist", "dynamo", "random"}
    assert all(list(curve.x) == [0.5, 1.0] for curve in panel.curves)


def test_a_single_seed_has_no_band() -> None:
    """An interval without end is none."""
    rows = [one | {"goodput": {"mean": 0.5, "half": float("inf")}} for one in ROWS]
    [goodput, *_] = route_pictures.pictures(rows)
    assert all(half == 0.0 for curve in goodput.panels[0].curves for half in curve.half)


def test_both_drawings_are_written_and_shown(tmp_path: Path) -> None:
    """The Markdown names both files, with words for those who do not see them."""
    picture = Picture(
        name="one",
        caption="What it shows",
        panels=[Panel("panel", [Curve("kvist", [1, 2], [3, 4])])],
        x_label="x",
        y_label="y",
        named=("kvist",),
    )
    text = write(picture, tmp_path / "pictures")
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {"one-light.svg", "one-dark.svg"}
    assert 'srcset="pictures/one-dark.svg"' in text
    assert 'alt="What it shows" src="pictures/one-light.svg"' in text


def test_the_page_gets_stamp_pictures_and_table(tmp_path: Path) -> None:
    """Between its marks, and nothing else of the page changes."""
    page = tmp_path / "benchmarks.md"
    page.write_text(PAGE)
    route_docs.write(page, json.loads(json.dumps(found())))
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\n<!-- route -->\nMeasured 2")
    assert text.endswith("<!-- /route -->\nthe rest\n")
    assert text.count("<picture>") == 5
    assert "| chat | 100% | 50.0% ± 1.0% | 50.0% ± 1.0% dynamo |" in text
    assert "| chat † | talk | 2 s, 60 ms | 7.2 |" in text
    assert "| chat | 50% | 75.0 | 75.0 | 75.0 |" in text
    assert "old" not in text


def test_who_ran_fewer_seeds_is_marked() -> None:
    """A policy that was too far behind to go on has a star, and the note says why."""
    rows = [*ROWS, row("lmetric", 1.0, 0.1) | {"seeds": 1}]

    assert "10.0 \\* |" in route_docs.everybody({"rows": rows})
    assert "Fewer than 2 seeds" in route_docs.everybody({"rows": rows})
    assert "Fewer" not in route_docs.everybody({"rows": ROWS})


def test_a_lost_row_says_so(tmp_path: Path) -> None:
    """Lost, and worse than round robin, are in the row."""
    assert "**lost**" in route_docs.table(found(lost=True))
    assert "**worse than round-robin**" in route_docs.table(found(harmed="round-robin"))
    assert "**" not in route_docs.table(found())


def test_a_page_without_a_place_is_refused(tmp_path: Path) -> None:
    """The words say which lines it needs."""
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="<!-- route -->"):
        route_docs.write(page, found())
