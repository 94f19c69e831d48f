"""Pictures of the policies' table: what is drawn, and how it gets into a page."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvist_sim.bench.route import page as page_of_results
from kvist_sim.bench.route import pictures
from kvist_sim.bench.route.plots import COLOURS, DARK, TEXT, Curve, Panel, Picture, draw, write
from kvist_sim.bench.route.svg import SVG, compact

ROOT = Path(__file__).parents[2]
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
    return page_of_results.stamped(
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
    """Nothing in a file changes unless the figures do, and the file is well-formed."""
    [picture, *_] = pictures.pictures(ROWS)
    first = draw(picture)
    assert first == draw(picture)
    assert ET.fromstring(first).tag.endswith("svg")


def test_one_file_has_the_colours_of_both_pages() -> None:
    """The text is dark on light pages and light on dark ones; no other colour is left on a dark page."""
    for picture in pictures.pictures(ROWS):
        light, _, dark = draw(picture).partition("@media(prefers-color-scheme:dark)")
        assert f"fill:{TEXT}" in light
        assert f"fill:{DARK[TEXT]}" in dark
        assert set(re.findall("#[0-9a-f]{6}", light)) <= set(DARK)
        assert set(re.findall("#[0-9a-f]{6}", dark)) <= set(DARK.values())


def test_text_is_text() -> None:
    """Titles, labels and the legend can be searched and copied."""
    [picture, *_] = pictures.pictures(ROWS)
    texts = {element.text for element in ET.fromstring(draw(picture)).iter(f"{SVG}text")}
    assert {"chat", "kvist", "dynamo", "others", "100%", picture.y_label, picture.x_label} <= texts


def test_a_curve_keeps_its_points() -> None:
    """Coordinates are those of matplotlib, to a tenth of a point; lines of one style are one path."""
    drawing = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">
      <path d="M 1.04 2 L 3.26 1 L 3.26 1 L 4 4.96" style="fill: none; stroke: #000"/>
      <path d="M 0 0 L 0.51 9" style="fill: none; stroke: #000"/>
      <path d="M 0 0 L 9 9" style="fill: none"/></svg>"""
    found = compact(drawing.encode(), {"#000": "#fff"})
    assert re.findall("<path.*>", found) == ['<path class="a0" d="M1 2l2.3-1 .7 4M0 0l.5 9"/>']
    assert ".a0{stroke:#000}" in found
    assert ".a0{stroke:#fff}" in found


def test_every_colour_and_stroke_is_used_once() -> None:
    """No two named policies look alike, on either page."""
    assert len(pictures.NAMED) <= len(COLOURS)
    assert len(set(DARK)) == len(set(DARK.values())) == len(COLOURS) + 2


def test_the_pictures_of_the_documentation_are_small() -> None:
    """All drawings together take less than 300 KB, each with both pages' colours; the demo's picture less
    than 250 KB."""
    files = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert sum(file.stat().st_size for file in files) < 300_000
    assert (ROOT / "docs" / "pictures" / "demo.png").stat().st_size < 250_000
    assert all("prefers-color-scheme:dark" in file.read_text() for file in files)


def test_a_panel_for_each_workload_and_a_curve_for_each_policy() -> None:
    """Sorted by load; a policy with one load has no curve, a workload without curves no panel."""
    rows = [*reversed(ROWS), row("lmetric", 0.5, 1.0), row("kvist", 0.5, 1.0, case="lonely")]
    [goodput, *_] = pictures.pictures(rows)
    [panel] = goodput.panels
    assert panel.title == "chat"
    assert {curve.name for curve in panel.curves} == {"kvist", "dynamo", "random"}
    assert all(list(curve.x) == [0.5, 1.0] for curve in panel.curves)


def test_a_single_seed_has_no_band() -> None:
    """An interval without end is none."""
    rows = [one | {"goodput": {"mean": 0.5, "half": float("inf")}} for one in ROWS]
    [goodput, *_] = pictures.pictures(rows)
    assert all(half == 0.0 for curve in goodput.panels[0].curves for half in curve.half)


def test_a_picture_is_written_and_shown(tmp_path: Path) -> None:
    """The Markdown names the file, with words for readers who do not see it."""
    picture = Picture(
        name="one",
        caption="What it shows",
        panels=[Panel("panel", [Curve("kvist", [1, 2], [3, 4])])],
        x_label="x",
        y_label="y",
        named=("kvist",),
    )
    text = write(picture, tmp_path / "pictures")
    assert [file.name for file in (tmp_path / "pictures").iterdir()] == ["one.svg"]
    assert text == "![What it shows](pictures/one.svg)\n"


def test_the_page_gets_stamp_pictures_and_table(tmp_path: Path) -> None:
    """Between its marks, and nothing else of the page changes."""
    page = tmp_path / "benchmarks.md"
    page.write_text(PAGE)
    page_of_results.write(page, json.loads(json.dumps(found())))
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\n<!-- route -->\nMeasured 2")
    assert text.endswith("<!-- /route -->\nthe rest\n")
    assert text.count(".svg)") == 5
    assert "| chat | 100% | 50.0% ± 1.0% | 50.0% ± 1.0% dynamo |" in text
    assert "| chat † | talk | 2 s, 60 ms | 7.2 |" in text
    assert "| chat | 50% | 75.0 | 75.0 | 75.0 |" in text
    assert "old" not in text


def test_policies_with_fewer_seeds_are_marked() -> None:
    """A policy that was too far behind to go on has a star, and the note says why."""
    rows = [*ROWS, row("lmetric", 1.0, 0.1) | {"seeds": 1}]

    assert "10.0 \\* |" in page_of_results.everybody({"rows": rows})
    assert "Fewer than 2 seeds" in page_of_results.everybody({"rows": rows})
    assert "Fewer" not in page_of_results.everybody({"rows": ROWS})


def test_a_lost_row_says_so(tmp_path: Path) -> None:
    """Lost, and worse than round robin, are in the row."""
    assert "**lost**" in page_of_results.table(found(lost=True))
    assert "**worse than round-robin**" in page_of_results.table(found(harmed="round-robin"))
    assert "**" not in page_of_results.table(found())


def test_a_page_without_a_place_is_refused(tmp_path: Path) -> None:
    """The words say which lines it needs."""
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="<!-- route -->"):
        page_of_results.write(page, found())
