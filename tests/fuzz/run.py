"""``python -m tests.fuzz.run --seconds 120``: every target for its part of the time, two at once.

Prints executions and coverage of each. Inputs that fail are kept below ``build/fuzz`` and printed; put one
into ``tests/fuzz/regressions/TARGET/`` and the unit tests run it from then on.
"""

import argparse
import base64
import concurrent.futures
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
REGRESSIONS = Path(__file__).parent / "regressions"
AT_ONCE = 2
GRACE_SECONDS = 60
"""For imports, the seeds, and the last input."""


@dataclass(frozen=True)
class Outcome:
    """Result of one target."""

    name: str
    executions: int
    covered: int
    features: int
    corpus: int
    seconds: int
    failures: tuple[Path, ...]
    log: str

    def __str__(self) -> str:
        rate = self.executions // max(self.seconds, 1)
        verdict = f"{len(self.failures)} FAILED" if self.failures else "nothing found"
        return (
            f"{self.name:10} {self.executions:9,} executions ({rate:,}/s), {self.covered:,} edges and"
            f" {self.features:,} features covered, {self.corpus:,} inputs kept: {verdict}"
        )


def fuzz(name: str, seconds: int, runs: int = -1) -> Outcome:
    """One target for so long, or so many runs, from its seeds and what was found before."""
    home = BUILD / name
    corpus, seeds, failed = home / "corpus", home / "seeds", home / "failed"
    for folder in (corpus, seeds, failed):
        folder.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(TARGETS[name].seeds):
        (seeds / str(at)).write_bytes(seed)
    before = set(failed.iterdir())
    folders = [str(folder) for folder in (corpus, seeds, REGRESSIONS / name) if folder.exists()]
    command = [sys.executable, "-m", "tests.fuzz.harness", name, *folders]
    options = [f"-max_total_time={seconds}", f"-runs={runs}", "-max_len=4096", "-timeout=20"]
    options += ["-print_final_stats=1", "-rss_limit_mb=2048", f"-artifact_prefix={failed}/"]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=seconds + GRACE_SECONDS,
    )
    log = done.stdout.decode(errors="replace")
    failures = tuple(sorted(set(failed.iterdir()) - before))
    if done.returncode and not failures:
        raise RuntimeError(f"the harness of {name} did not run:\n{log[-3000:]}")
    return Outcome(
        name=name,
        executions=_last(log, r"stat::number_of_executed_units: (\d+)"),
        covered=_last(log, r"cov: (\d+)"),
        features=_last(log, r"ft: (\d+)"),
        corpus=sum(1 for _ in corpus.iterdir()),
        seconds=seconds,
        failures=failures,
        log=log,
    )


def _last(log: str, pattern: str) -> int:
    found = re.findall(pattern, log)
    return int(found[-1]) if found else 0


def _tell(outcome: Outcome) -> None:
    _say(outcome)
    for path in outcome.failures:
        _say(f"  {path}\n  base64: {base64.b64encode(path.read_bytes()).decode()}")
    if outcome.failures:
        start = outcome.log.find(" === ")
        _say(outcome.log[max(start, 0) :][:4000])


def _say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Exit code 1 when something was found."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=120, help="in all (default: 120)")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} (default: all)")
    options = parser.parse_args(argv)
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"{', '.join(sorted(unknown))}: no such target; there are {', '.join(TARGETS)}")
    each = max(1, options.seconds * min(AT_ONCE, len(names)) // len(names))
    _say(f"{len(names)} targets, {each} s each, {AT_ONCE} at once; inputs below {BUILD}")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, each), names))
    for outcome in outcomes:
        _tell(outcome)
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
