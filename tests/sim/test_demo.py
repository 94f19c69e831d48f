"""The demo: the traffic both policies get, what it reports, and the whole of it with real processes."""

import dataclasses
import io
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from rich.console import Console

from kvist_sim import load
from kvist_sim.demo.plan import DemoPlan
from kvist_sim.demo.report import DemoReport, Display, document, figures, table
from kvist_sim.demo.run import engine_command, traffic
from kvist_sim.launch import EnginePorts, endpoints_file, engine_ports

GOOD = load.Summary(
    seconds=25.0,
    requests=600,
    errors=0,
    unfinished=0,
    requests_per_second=24.0,
    output_tokens_per_second=960.0,
    ttft_p50=0.1,
    ttft_p90=0.2,
    ttft_p99=0.4,
    latency_p50=1.0,
    latency_p90=1.2,
    prompt_tokens=1_000,
    cached_tokens=900,
)
SLOW = dataclasses.replace(
    GOOD, unfinished=50, output_tokens_per_second=480.0, ttft_p50=5.0, ttft_p90=9.0, cached_tokens=300
)
SHORT = ("--engines", "2", "--seconds", "3")


def shown(report: DemoReport) -> str:
    """The table as a terminal of 100 columns shows it."""
    console = Console(file=io.StringIO(), width=100)
    console.print(table(report))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_both_policies_get_the_same_traffic() -> None:
    """Warm-up first, then Poisson arrivals; byte for byte the same each time."""
    plan = DemoPlan(engines=2, rate=12)
    first, again = (list(itertools.islice(traffic(plan), 60)) for _ in range(2))

    assert first == again
    assert [a.at for a in first] == sorted(a.at for a in first)
    assert {a.group for a in first[: plan.shape.groups]} == set(range(plan.shape.groups))


def test_the_table_says_what_is_compared_and_by_how_much() -> None:
    """One sentence above the figures, both policies beside each other, the ratio in words."""
    text = shown(DemoReport(DemoPlan(), GOOD, SLOW))

    said = " ".join(text.split())
    assert "twice: once kvist picked the engine, once Envoy took turns (round robin)" in said
    assert "Prefill saved: prompt tokens from cache / 15,928 tokens/s, the rate of one engine." in said
    assert "100 ms" in text
    assert "50 x faster" in text
    assert "2.0 x more" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_document_is_json_with_both_runs() -> None:
    """Programs get plan, both summaries and versions."""
    found = json.loads(json.dumps(document(DemoReport(DemoPlan(), GOOD, SLOW))))

    assert (found["kvist"]["cached_share"], found["round_robin"]["cached_share"]) == (0.9, 0.3)
    rate = found["prefill_tokens_per_second"]
    assert found["kvist"]["prefill_gpu_seconds_saved"] == found["kvist"]["cached_tokens"] / rate
    assert found["plan"]["engines"] == 4


@pytest.mark.parametrize(
    ("kvist", "why"),
    [
        (GOOD, None),
        (dataclasses.replace(GOOD, errors=6), None),
        (dataclasses.replace(GOOD, errors=7), "kvist: 7 of 600 requests failed"),
        (dataclasses.replace(GOOD, requests=9, unfinished=9), "kvist: none of 9 requests was answered"),
    ],
)
def test_a_run_with_errors_is_a_failed_run(kvist: load.Summary, why: str | None) -> None:
    """Fast answers do not make up for failed ones."""
    assert DemoReport(DemoPlan(), kvist, SLOW).failure() == why


def test_engines_get_arguments_of_vllm() -> None:
    """Events, replay and cache size are asked for as one would ask vLLM."""
    words = engine_command(EnginePorts(8000, 5557, 5657), "/models/m")
    events = json.loads(words[words.index("--kv-events-config") + 1])

    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5657")
    assert "--enable-prompt-tokens-details" in words


def test_the_picker_receives_every_engine() -> None:
    """The endpoints file names each engine with its three ports."""
    engines = engine_ports(3)
    listed = endpoints_file(engines)["endpoints"]

    assert [entry["port"] for entry in listed] == [engine.http for engine in engines]
    assert len({entry["name"] for entry in listed}) == 3


def test_live_figures_are_of_the_latest_answers() -> None:
    """The live figures cover the latest answers."""
    outcomes = [load.Outcome(0.0, 0.25, 1.0, 200, prompt_tokens=10, cached_tokens=5)] * 3
    bad = load.Outcome(0.0, None, 1.0, 503, error="HTTP 503")
    state = load.Progress(outcomes=[*outcomes, bad], sent=6, running=2)

    assert figures(state) == "   4 answers · TTFT 0.25 s · cached 50% · 1 errors"


def test_cancelled_requests_are_not_among_the_live_figures() -> None:
    """Requests cancelled at the end have no usage; the share of cached tokens stays that of the answers."""
    answer = load.Outcome(0.0, 0.25, 1.0, 200, prompt_tokens=10, cached_tokens=5)
    cancelled = load.Outcome(0.0, None, 8.0, load.NO_ANSWER, finished=False)
    state = load.Progress(outcomes=[answer] + [cancelled] * 200)

    assert figures(state) == "   1 answers · TTFT 0.25 s · cached 50% · 0 errors"


def test_progress_off_a_terminal_is_plain_lines() -> None:
    """In a log file there are no control characters."""
    console = Console(file=io.StringIO(), width=100)
    display = Display(console)
    with display.start("kvist", "Envoy"):
        pass
    with display.load("kvist", 3.0) as bar:
        bar.update(1.0, load.Progress(), "warm-up")

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert "started Envoy" in text


@contextmanager
def demo(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A running ``kvist demo``; killed at the end if a test failed."""
    command = [sys.executable, "-m", "kvist", "demo", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.timeout(180)
def test_a_whole_demo_puts_kvist_ahead() -> None:
    """Real Envoy, picker and engines: more tokens from cache, no errors, only JSON on stdout."""
    with demo(*SHORT, "--json") as running:
        out, err = running.communicate()

    assert running.returncode == 0, err
    found = json.loads(out)
    assert (found["kvist"]["errors"], found["round_robin"]["errors"]) == (0, 0)
    assert found["kvist"]["cached_share"] > found["round_robin"]["cached_share"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_stopped_demo_leaves_no_process_behind(number: signal.Signals, code: int) -> None:
    """Ctrl-C, SIGTERM and SIGKILL in the middle of the load end engines, picker and Envoy."""
    with demo(*SHORT) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "started Envoy" in line:
                break
        family = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(number)
        _, err = running.communicate()

    assert len(family) >= 4
    assert running.returncode == code
    assert ("stopped" in err) == (number is not signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def test_a_component_that_fails_is_named() -> None:
    """Without an Envoy to run, the demo says what is missing and exits 1."""
    program = "import sys, kvist_sim.envoy as e; e.find_envoy = lambda: '/nonexistent/envoy'; "
    program += "from kvist.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", program, "demo", *SHORT], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert "demo failed: envoy" in ended.stderr
