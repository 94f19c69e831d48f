"""Runs in a file, so that hours of them may be cut in pieces: a line each, as they come.

A kept run counts as long as the code that made it is what it was: the world and the policies, for ours the
picker's parts too.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

import kvist_epp
import kvist_sim
from kvist_sim.virtual.report import OURS
from kvist_sim.virtual.runner import NO_TIERS, Cell, Job, Result

SIM: Final = Path(kvist_sim.__file__).parent
EPP: Final = Path(kvist_epp.__file__).parent
WORLD: Final = (
    *("virtual/clock.py", "virtual/engine.py", "virtual/fleet.py", "virtual/ideal.py", "virtual/jobs.py"),
    *("virtual/judge.py", "virtual/noting_pool.py", "virtual/overlaps.py", "virtual/policy.py"),
    *(
        "engine/tiers.py",
        "virtual/hardware.py",
        "virtual/legs.py",
        "virtual/loads.py",
        "virtual/traffic.py",
        "virtual/world.py",
        "engine/blocks.py",
        "engine/timing.py",
    ),
    *("virtual/workloads", "virtual/policies"),
)
"""What every run goes through, below ``SIM``."""
PICKER: Final = (
    *(
        "index",
        "load",
        "endpoints",
        "scheduling",
        "flowcontrol",
        "director",
        "prefix_stats",
        "disaggregation",
    ),
    *("engines", "replicas"),
)
"""What ours also does, below ``EPP``."""


class Line(msgspec.Struct):
    """One line of the file."""

    code: str
    """Hash of what made it."""
    job: str
    """Engines, requests, setting."""
    result: Result


class Kept:
    """The file; made when absent."""

    def __init__(self, path: Path, job: Job) -> None:
        """Raises ``ValueError`` naming the first line that is none."""
        self._path, self._job = path, repr(job)
        self._found = dict(self._read()) if path.exists() else {}

    def _read(self) -> Iterator[tuple[Cell, Result]]:
        for number, text in enumerate(self._path.read_bytes().splitlines(), 1):
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{self._path}, line {number}: {error}") from error
            if (line.job, line.code) == (self._job, code(line.result.cell.policy)):
                yield line.result.cell, line.result

    def of(self, asked: Sequence[Cell]) -> list[Result]:
        """Return the results of these cells that are kept."""
        return [self._found[cell] for cell in asked if cell in self._found]

    def add(self, result: Result) -> None:
        """One more line."""
        self._found[result.cell] = result
        line = Line(code(result.cell.policy), self._job, result)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


@lru_cache
def code(policy: str) -> str:
    """Hash of the files that decide a run of this policy."""
    digest = sha256()
    for path in _files(ours=policy == NO_TIERS or policy.split("-", maxsplit=1)[0] == OURS):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _files(*, ours: bool) -> list[Path]:
    roots = [SIM / name for name in WORLD]
    if ours:
        roots += [SIM / "virtual/ours.py", *(EPP / name for name in PICKER)]
    return sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py")))
