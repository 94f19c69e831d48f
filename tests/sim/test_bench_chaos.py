"""Tests of the judgement of a chaos run: lost, cut, wrong and healed requests, and the report."""

import io
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvist_sim.bench.chaos.command import scenes
from kvist_sim.bench.chaos.judge import (
    WINDOW,
    ChaosFigures,
    Error,
    Evidence,
    Life,
    Phase,
    Prediction,
    healthy,
    judge,
)
from kvist_sim.bench.chaos.report import ChaosReport, document, table
from kvist_sim.bench.harness.proof import folder, stamped
from kvist_sim.bench.harness.records import PickLog, Record
from kvist_sim.bench.harness.stack import NAME, Secrets, Setup

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
PHASE = Phase("engine killed", begin=10.0, fault=15.0, end=70.0)
FOREVER = [Life(A, 0.0), Life(B, 0.0)]
SETTING = {
    "rate": 200.0,
    "phase_seconds": 60.0,
    "settle_seconds": 30.0,
    "engines": 4,
    "pickers": 3,
    "tls": True,
    "peers": True,
    "full": False,
}


def answered(number: int, began: float, *, upstream: str = A, cached: int = 100) -> Record:
    """A request that went well."""
    return Record(
        f"r-{number}",
        began,
        first=began + 0.1,
        token=began + 0.2,
        ended=began + 1.0,
        status=200,
        whole=True,
        upstream=upstream,
        picked=f"{upstream},{B}",
        attempts=1,
        prompt=200,
        cached=cached,
    )


def told(records: Sequence[Record], *, off: int = 0) -> dict[str, Prediction]:
    """Return correct predictions for records, or predictions that are ``off`` tokens too high."""
    return {record.id: Prediction(record.upstream, record.cached + off) for record in records}


def judged(
    records: Sequence[Record],
    predictions: Mapping[str, Prediction] | None = None,
    lives: Sequence[Life] = FOREVER,
) -> ChaosFigures:
    """Figures of `PHASE`."""
    found = told(records) if predictions is None else predictions
    return judge(PHASE, Evidence(records, found, lives))


def steady(begin: float = 10.0, end: float = 70.0, step: float = 0.05) -> list[Record]:
    """A request every ``step`` seconds."""
    return [answered(number, begin + number * step) for number in range(round((end - begin) / step))]


def test_a_quiet_phase_breaks_nothing() -> None:
    """Every request answered, every prediction right: all figures are those of a good run."""
    found = judged(steady())

    assert (found.sent, found.answered, found.lost, found.cut_by_picker) == (1200, 1200, 0, 0)
    assert (found.before.share, found.after.share, found.healed) == (0.0, 0.0, 0.0)
    assert found.ttft_p50 == pytest.approx(0.2)
    assert found.broken() == []


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_no_answer_and_an_error_both_are_losses(status: int) -> None:
    """A client with an error page has lost its answer as much as one without a byte."""
    bad = replace(answered(9_000, 20.0), status=status, whole=False)
    found = judged([*steady(), bad])

    assert found.lost == 1
    assert any("1 requests lost" in why for why in found.broken())


@pytest.mark.parametrize(
    ("lives", "lost"),
    [
        ([Life(A, 0.0, killed=19.0), Life(A, 22.0)], 0),
        ([Life(A, 0.0, killed=19.0), Life(B, 20.5)], 0),
        ([Life(A, 0.0, killed=20.5), Life(B, 20.2)], 0),
        ([Life(A, 0.0, killed=20.5), Life(B, 19.9)], 1),
        ([Life(A, 0.0, killed=21.5)], 1),
    ],
)
def test_a_loss_needs_a_pod_that_was_healthy_all_the_time(lives: list[Life], lost: int) -> None:
    """A request from 20.0 to 21.0 is lost only when one and the same engine lived through it."""
    found = judged([replace(answered(1, 20.0), status=0)], lives=lives)

    assert (found.lost, found.no_pod) == (lost, 1 - lost)


def test_health_begins_and_ends_with_the_process() -> None:
    """Health covers a process from its first good health check to SIGKILL."""
    assert healthy([Life(A, 5.0, killed=6.0)], 5.0, 5.9)
    assert not healthy([Life(A, 5.0, killed=6.0)], 4.9, 5.9)
    assert not healthy([Life(A, 5.0, killed=6.0)], 5.0, 6.0)


@pytest.mark.parametrize(
    ("upstream", "killed", "by_engine"), [(A, 20.5, 1), (A, 15.0, 0), (A, 30.0, 0), (B, 20.5, 0)]
)
def test_a_cut_is_a_picker_s_unless_that_engine_died_then(
    upstream: str, killed: float, by_engine: int
) -> None:
    """A cut counts as the engine's only if that engine was killed while it was answering."""
    cut = replace(answered(1, 20.0, upstream=upstream), whole=False)
    found = judged([cut], lives=[Life(A, 0.0, killed=killed), Life(B, 0.0)])

    assert (found.cut_by_engine, found.cut_by_picker) == (by_engine, 1 - by_engine)
    assert found.lost == 0


def test_the_error_is_of_the_hundred_that_begin_half_a_minute_after_the_fault() -> None:
    """The error covers the hundred requests that begin half a minute after the fault, and no earlier ones."""
    records = steady()
    early = told([r for r in records if r.began < 45.0], off=50) | told(
        [r for r in records if r.began >= 45.0]
    )
    late = told(records) | told([r for r in records if 45.0 <= r.began < 50.0], off=1)

    assert judged(records, early).after.share == 0.0
    assert judged(records, early).healed == pytest.approx(30.0, abs=0.1)
    assert judged(records, late).after == Error(10_100, 10_000, WINDOW, WINDOW)
    assert judged(records, late).broken() == ["prediction off by 1.00% 30 s after the fault"]


def test_a_request_without_a_prediction_is_not_counted_as_right() -> None:
    """Retried, unpicked or answered elsewhere: no pair; too few pairs and the error says nothing."""
    records = steady()
    window = [r for r in records if r.began >= 45.0][:WINDOW]
    for record in window[:5]:
        record.attempts = 2
    for record in window[5:11]:
        record.upstream = B
    found = judged(records, told(records) | {r.id: Prediction(A, 100) for r in window})

    assert found.after.judged == WINDOW - 11
    assert found.after.share == float("inf")
    assert found.retried == 5


def test_too_short_a_phase_proves_nothing() -> None:
    """Without requests after the half minute there is no verdict, and that is a failure."""
    found = judged(steady(end=30.0))

    assert found.broken() == ["no request began 30 s after the fault"]


def report() -> ChaosReport:
    """Two phases, one of them bad."""
    bad = [replace(answered(n, 20.0), status=503, error="HTTP 503") for n in range(3)]
    phase = replace(PHASE, steps=[(0.0, "engine-0 SIGKILL"), (6.5, "engine-0 healthy again")])
    good = judge(phase, Evidence(steady(), told(steady()), FOREVER))
    return ChaosReport([good, judged(bad)], SETTING, {"API watch cut": "elsewhere"})


def test_the_table_fits_a_terminal_and_names_every_phase() -> None:
    """110 columns, nothing cut off, and a verdict in each line."""
    console = Console(file=io.StringIO(), width=110)
    console.print(table(report()))
    text = console.file.getvalue()  # type: ignore[attr-defined]

    assert max(len(line) for line in text.splitlines()) <= 110
    assert "…" not in text
    assert (text.count(" ok"), text.count("BROKEN")) == (1, 1)
    assert "engine-0 healthy again" in text


def test_the_document_is_json_and_names_broken_bounds() -> None:
    """Programs read the same: an error that says nothing is null, and examples say what happened."""
    found = json.loads(json.dumps(stamped(document(report()), report()), allow_nan=False))

    assert found["phases"][1]["after"]["share"] is None
    assert len(found["phases"][1]["examples"]) == 3
    assert found["broken"][0] == "engine killed: 3 requests lost"


def test_phases_are_chosen_by_name_and_kept_in_order() -> None:
    """All by default; what cannot be run in this setup is not there, and a wrong name says what is."""
    every = [scene.name for scene in scenes((), Setup())]

    assert (every[0], len(every)) == ("quiet", 8)
    assert [scene.name for scene in scenes(("picker killed", "quiet"), Setup())] == ["quiet", "picker killed"]
    assert "certificates" not in [scene.name for scene in scenes((), Setup(tls=False))]
    with pytest.raises(SystemExit, match="no phase engine; there are: quiet, engine killed"):
        scenes(("engine",), Setup())


def test_logs_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    """A folder that is not empty is refused; one that is given stays, another goes."""
    with folder(str(tmp_path / "new")) as given:
        (given / "picker.log").write_text("line")
    with pytest.raises(SystemExit, match="not empty"), folder(str(given)):
        pass
    with folder(None) as own:
        pass

    assert given.exists()
    assert not own.exists()


def test_a_picker_s_log_is_read_in_order_and_only_whole_lines(tmp_path: Path) -> None:
    """A line that a killed picker left incomplete is skipped; reading continues where it ended."""
    file = tmp_path / "picker.log"
    line = '{"ts":"t","level":"info","event":"request","id":"%s","endpoint":"e","matched_tokens":%d}\n'
    file.write_text(line % ("a", 1) + '{"event":"listening"}\n' + (line % ("b", 2))[:40])
    log = PickLog(file)
    first = [(one.id, one.matched_tokens) for one in log.read()]
    with file.open("a") as end:
        end.write(line % ("c", 3) + line % ("d", 4))

    assert first == [("a", 1)]
    assert [one.id for one in log.read()] == ["d"]
    assert list(log.read()) == []


def test_a_rotated_certificate_replaces_all_files_at_once(tmp_path: Path) -> None:
    """One link changes, as in a mounted Secret, so that certificate and key always belong together."""
    secrets = Secrets(tmp_path, ["picker-0"])
    folder = secrets.folder("picker-0")
    before = (folder / "tls.crt").read_bytes()
    fresh = secrets.rotate("picker-0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    assert (folder / "tls.crt").read_bytes() != before
    assert ssl.PEM_cert_to_DER_cert((folder / "tls.crt").read_text()) == fresh
    assert (folder / "ca.crt").read_bytes() == (tmp_path / "ca.pem").read_bytes()
    assert secrets.gateway().name == NAME
