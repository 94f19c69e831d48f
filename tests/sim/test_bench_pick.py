"""The bench of picks: small, but the whole of it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvist_sim.bench.index.data import BLOCK_SIZE, chain
from kvist_sim.bench.index.pick import BusyPool, PickFigures, PickReport, main, table


def test_a_row_for_each_case_and_number_of_endpoints(tmp_path: Path) -> None:
    """Look-up and pick are measured apart, and the command writes its section and says if the bound broke."""
    file, page = tmp_path / "pick.json", tmp_path / "benchmarks.md"
    page.write_text("# Page\n<!-- pick -->\nstale\n<!-- /pick -->\n")

    code = main(["--endpoints", "1", "3", "--json", str(file), "--write-docs", str(page)])
    found = json.loads(file.read_text())

    assert [(row["held_by"], row["endpoints"]) for row in found["rows"]] == [
        (case, count) for case in ("all", "storage", "ten", "none") for count in (1, 3)
    ]
    assert all(row["lookup_us"] > 0 and row["pick_us"] > 0 for row in found["rows"])
    assert code == bool(found["broken"])
    assert "prompt held by" in page.read_text()
    assert "stale" not in page.read_text()


@pytest.mark.parametrize(("most", "verdict"), [(70.0, "held"), (90.0, "missed")])
def test_a_thousand_endpoints_cost_at_most_twice_as_much_as_twenty(most: float, verdict: str) -> None:
    """The bound is on picks for a prompt that ten endpoints hold, and is reported above the table."""
    rows = [PickFigures("ten", count, 40.0, us) for count, us in ((20, 40.0), (100, 50.0), (1000, most))]
    report = PickReport(rows, 0.0)
    out = io.StringIO()
    Console(file=out, width=110).print(table(report))

    assert bool(report.broken()) == (verdict == "missed")
    said = " ".join(out.getvalue().split())
    assert f"{most / 40:.1f} times that among 20 when ten hold the prompt (bound 2: {verdict})" in said


def test_picks_under_a_tpot_target_have_a_bound_and_a_section_of_their_own(tmp_path: Path) -> None:
    """The bound is the same, and the table of the ordinary picks stays as it is."""
    rows = [PickFigures("ten", count, 40.0, us) for count, us in ((20, 40.0), (1000, 90.0))]
    assert PickReport(rows, 0.05).broken()
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- pick -->\nkept\n<!-- /pick -->\n<!-- pick-tpot -->\nstale\n<!-- /pick-tpot -->\n")

    main(["--endpoints", "1", "2", "--tpot-target", "0.05", "--write-docs", str(page)])

    assert "kept" in page.read_text()
    assert "under a TPOT target of 0.05 s" in page.read_text()
    assert "stale" not in page.read_text()


def test_the_best_endpoint_holds_the_prompt_and_loads_change() -> None:
    """The first pick goes to a holder, and the request that it sends is in the load of the next one."""
    pool = BusyPool(15, "ten", chain("warm", 64), 0.0)
    found = pool.look()
    picked = [pool.pick(found).best for _ in range(40)]

    assert found.tokens >= 64 * BLOCK_SIZE
    assert set(found.hits) == {f"pool/engine-{number}" for number in range(10)}
    assert picked[0].endpoint.key in found.hits
    assert picked[0].running == 30
    assert max(one.running for one in picked) > 30
