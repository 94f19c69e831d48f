"""The demo over time: its series, its picture, and the live page beside both runs."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from kvist_sim import load
from kvist_sim.demo.live_page import LivePage, has_display, wait_for_enter
from kvist_sim.demo.picture import COLOURS, GROUND, figure, headline, small_print, write_picture
from kvist_sim.demo.plan import DemoPlan
from kvist_sim.demo.report import KVIST, ROUND_ROBIN, DemoReport
from kvist_sim.demo.series import PREFILL_RATE, run_series
from kvist_sim.load import Outcome, summarise

PLAN = DemoPlan(engines=2, rate=12.0, seconds=10.0)
BEGIN = PLAN.warm_up_seconds + PLAN.lead_in_seconds
END = BEGIN + PLAN.seconds
SVG = "{http://www.w3.org/2000/svg}"
SHORT = ("--engines", "2", "--seconds", "3")


def answered(at: float, ttft: float, *, cached: int = 90, prompt: int = 100) -> Outcome:
    """Return a request that was answered."""
    return Outcome(at, ttft, ttft + 1, load.OK, prompt, cached, 40)


def waiting(at: float) -> Outcome:
    """Return a request without an answer at the end of the run."""
    return Outcome(at, None, END + 8 - at, load.NO_ANSWER, finished=False)


def run(wait: float, cached: int, *, late: bool = False) -> tuple[Outcome, ...]:
    """Return ten requests a second; ``late``: those of the last third get no answer."""
    times = [number / 10 for number in range(int(10 * PLAN.run_seconds))]
    return tuple(
        waiting(at) if late and at > END - PLAN.seconds / 3 else answered(at, wait, cached=cached)
        for at in times
    )


def report() -> DemoReport:
    """Return a report with both runs."""
    outcomes = {KVIST: run(0.04, 90), ROUND_ROBIN: run(6.0, 40, late=True)}
    summaries = {name: summarise(found, begin=BEGIN, end=END) for name, found in outcomes.items()}
    return DemoReport(PLAN, summaries[KVIST], summaries[ROUND_ROBIN], outcomes)


def test_saved_seconds_are_cached_tokens_by_the_rate_of_prefill() -> None:
    """The total equals that of the summary: answered requests of the measured part, the warm-up not counted.
    Points are at the moments of first tokens and never fall."""
    found = [answered(BEGIN - 1, 0.5), answered(BEGIN + 2, 1.5), answered(BEGIN + 1, 0.5), waiting(BEGIN + 3)]
    series = run_series(found, PLAN)
    summary = summarise(found, begin=BEGIN, end=END)

    assert series.saved == (
        (BEGIN, 0.0),
        (BEGIN + 1.5, 90 / PREFILL_RATE),
        (BEGIN + 3.5, 180 / PREFILL_RATE),
    )
    assert series.total_saved == pytest.approx(summary.cached_tokens / PREFILL_RATE)


def test_a_run_without_answers_has_saved_nothing() -> None:
    """There is a total without any point, and no window."""
    series = run_series([waiting(BEGIN)], PLAN)

    assert (series.total_saved, series.windows, series.unanswered) == (0.0, (), 1)


def test_windows_have_medians_and_shares_of_their_requests() -> None:
    """A window of a second covers the requests sent in it; failed requests have no wait."""
    failed = Outcome(5.1, None, 0.1, 503, error="HTTP 503")
    found = [answered(5.0, 0.1), answered(5.2, 0.3, cached=10), answered(5.9, 0.2, cached=0), failed]
    [window] = run_series(found, PLAN).windows

    assert (window.at, window.wait) == (5.5, 0.2)
    assert window.cached_share == pytest.approx(100 / 300)


def test_windows_of_which_most_got_no_answer_are_left_out() -> None:
    """Their few answers are the fast ones: a curve through them would flatter the policy."""
    found = [answered(5.0, 0.1), waiting(5.1), waiting(5.2), answered(6.0, 0.1), waiting(6.1)]
    series = run_series(found, PLAN)

    assert [window.at for window in series.windows] == [6.5]
    assert series.unanswered == 3


def test_the_half_window_at_the_end_is_left_out() -> None:
    """A window that the run's end cuts short has too few requests for a median."""
    plan = replace(PLAN, seconds=10.5)
    cut = plan.run_seconds - 0.25
    series = run_series([answered(cut - 1, 0.1), answered(cut, 0.1)], plan)

    assert len(series.waits) == 2
    assert len(series.windows) == 1


def panels(made: Figure) -> dict[str, Axes]:
    """Return the panels by their titles."""
    return {axes.get_title(loc="left"): axes for axes in made.axes}


def curves(axes: Axes) -> dict[str, list[float]]:
    """Return the values of each run's curve."""
    names = {colour: name for name, colour in COLOURS.items()}
    return {names[str(line.get_color())]: list(map(float, line.get_ydata())) for line in axes.lines}  # type: ignore[arg-type]


def test_the_picture_has_the_series_of_both_runs() -> None:
    """Three panels, each with both runs in their colours and their figures at the right."""
    made, found = figure(report()), report()
    waits, shares, saved = panels(made).values()

    assert set(curves(waits)) == set(curves(shares)) == set(curves(saved)) == {KVIST, ROUND_ROBIN}
    assert set(curves(waits)[KVIST]) == {0.04}
    assert set(curves(shares)[ROUND_ROBIN]) == {40.0}
    assert curves(saved)[KVIST][-1] == pytest.approx(found.kvist.cached_tokens / PREFILL_RATE)
    texts = {text.get_text() for axes in made.axes for text in axes.texts}
    unanswered = found.round_robin.unfinished
    assert {"40 ms", "6.00 s", "90 %", "40 %", f"{unanswered} requests still\nwait at the end"} <= texts
    assert waits.get_yscale() == "log"
    assert "log scale" in waits.get_title(loc="left")


def test_the_picture_says_what_it_shows() -> None:
    """Headline, legend, units, and the setting with the formula and what is simulated."""
    made, found = figure(report()), report()
    written = {text.get_text() for text in made.texts}

    assert headline(found) == "First token after 40 ms instead of 6.00 s"
    assert headline(found) in written
    assert small_print(PLAN) in written
    assert f"prompt tokens read from a cache / {PREFILL_RATE:,.0f} tokens/s" in small_print(PLAN)
    assert "the engines are simulated" in small_print(PLAN)
    [legend] = made.legends
    assert [text.get_text().partition(":")[0] for text in legend.get_texts()] == [KVIST, ROUND_ROBIN]
    assert any("GPU-seconds" in title for title in panels(made))
    assert {axes.get_xlabel() for axes in made.axes} == {"seconds after the traffic began", ""}


def test_a_run_that_is_not_faster_is_not_called_so() -> None:
    """The headline only says `instead of` where the difference can be noticed."""
    same = replace(report(), round_robin=report().kvist)

    assert headline(same) == "First token after 40 ms with kvist, 40 ms with round robin"


def test_a_png_is_of_the_size_that_is_promised(tmp_path: Path) -> None:
    """1600 by 900 pixels on a light ground, in less than 250 KB."""
    file = tmp_path / "demo.png"
    write_picture(report(), file)
    with Image.open(file) as found:
        assert found.size == (1600, 900)
        assert found.convert("RGB").getpixel((2, 2)) == tuple(bytes.fromhex(GROUND[1:]))
    assert file.stat().st_size < 250_000


def test_an_svg_is_the_same_each_time_and_has_text(tmp_path: Path) -> None:
    """The headline can be searched, and nothing in the file changes unless the figures do."""
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in (first, second):
        write_picture(report(), file)

    assert first.read_bytes() == second.read_bytes()
    texts = {"".join(each.itertext()) for each in ET.parse(first).iter(f"{SVG}text")}
    assert headline(report()) in texts


def demo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvist demo`` to its end, without a display."""
    clean = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return subprocess.run(
        [sys.executable, "-m", "kvist", "demo", *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=clean | environment,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--picture", "/nowhere/demo.png"),
            "kvist: --picture /nowhere/demo.png: cannot be written: name a file",
        ),
        (
            ("--picture", "demo.jpg"),
            "argument --picture: demo.jpg is no picture: write a name that ends in .png",
        ),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_runs(
    words: tuple[str, ...], said: str
) -> None:
    """The error is one line with the option and the remedy, and exit code 2."""
    ended = demo(*words)

    assert ended.returncode == 2
    assert said in ended.stderr
    assert "started" not in ended.stderr


def test_a_missing_extra_is_one_line_with_the_remedy() -> None:
    """Without matplotlib ``--picture`` says what to install, before anything starts."""
    program = "import importlib.util as u, sys; find = u.find_spec; "
    program += "u.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more); "
    program += "from kvist.__main__ import main; sys.exit(main(['demo', '--picture']))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert ended.stderr == "kvist: kvist demo --picture needs matplotlib: pip install 'kvist[plots]'\n"


def test_a_browser_is_only_opened_where_there_is_a_display() -> None:
    """Text browsers would take the terminal, so without a display only the address is printed."""
    assert not has_display({"PATH": "/usr/bin"})
    assert has_display({"DISPLAY": ":0"})
    assert has_display({"WAYLAND_DISPLAY": "wayland-0"})
    assert has_display({"BROWSER": "firefox"})


def test_the_address_of_the_page_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pickers have the page at the same address, so it is named and opened once."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    page, said = LivePage(), list[str]()
    page.show(said.append)
    page.show(said.append)

    assert said == [f"  live page: {page.url} (no display here: open it in your browser)"]


async def test_enter_ends_the_wait() -> None:
    """The page stays until a line can be read from the terminal, and no longer."""
    theirs, ours = pty.openpty()
    with os.fdopen(ours, "r") as terminal:
        task = asyncio.create_task(wait_for_enter(terminal))
        await asyncio.sleep(0.05)
        assert not task.done()
        os.write(theirs, b"\n")
        await asyncio.wait_for(task, 5)
    os.close(theirs)


class Watched:
    """Asks for the page of a running demo, by the address that the demo prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self.ready: dict[str, bool] = {}
        """Whether the live page was there, by the policy whose load went on."""

    def read(self) -> None:
        """Read progress to its end; ask for the page when Envoy of each run has started."""
        assert self._process.stderr is not None
        url = ""
        for line in self._process.stderr:
            self.lines.append(line)
            if found := re.search(r"live page: (http\S+)", line):
                url = found[1]
            if "started Envoy" in line:
                self.ready[line.split("started")[0].strip()] = self._answers(url)
            if "Enter ends the demo" in line:
                self.ready["after"] = self._answers(url)
                break

    @staticmethod
    def _answers(url: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return b'<h2 id="h-endpoints"' in answer.read()
        return False


@contextlib.contextmanager
def watched_demo(folder: Path) -> Iterator[tuple[Watched, int, subprocess.Popen[str]]]:
    """Start ``kvist demo --watch`` on a terminal; yield its progress, the terminal and the process."""
    theirs, ours = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-m", "kvist", "demo", "--watch", "--json", *SHORT]
    with subprocess.Popen(
        command, stdin=ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=clean
    ) as process:
        try:
            yield Watched(process), theirs, process
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", ["enter", "interrupt"])
def test_a_watched_demo_has_a_page_during_both_runs_and_draws_a_picture(end: str, tmp_path: Path) -> None:
    """The live page is at the printed address while Envoy takes turns, while kvist picks, and until Enter or
    Ctrl-C; then the demo ends with exit code 0, and the picture of both runs is there."""
    with watched_demo(tmp_path) as (watched, terminal, process):
        output: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: output.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        watched.read()
        if end == "enter":
            os.write(terminal, b"\n")
        else:
            process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
        reader.join()

    assert code == 0, "".join(watched.lines)
    assert watched.ready == {ROUND_ROBIN: True, KVIST: True, "after": True}
    found: dict[str, Any] = json.loads(output[0])
    assert found["kvist"]["cached_share"] > found["round_robin"]["cached_share"]
    with Image.open(tmp_path / "kvist-demo.png") as picture:
        assert picture.size == (1600, 900)
