"""Sample a picker's CPU time, so that neither waiting nor the profiler itself is counted.

``python -m kvist_sim.bench.epp.profiler FILE ARGUMENT…`` is a picker that samples itself from SIGUSR1 on and
writes what it saw when it ends. (cProfile counts waiting as work and makes small functions look large.)
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

INTERVAL_SECONDS: Final = 0.001
"""CPU time between samples; the kernel rounds it up to its tick."""
TOP: Final = 25
PLUMBING_SHARE: Final = 0.95
"""Share of samples below a function above which it is left out as mere plumbing."""
_OWN, _ALL = "own", "all"


class Sampler:
    """Counts functions: at the top of the stack (own), and anywhere on it (all)."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()
        self.all: Counter[str] = Counter()

    def begin(self, *_: object) -> None:
        """Start the clock; a handler of SIGUSR1."""
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_SECONDS, INTERVAL_SECONDS)

    def take(self, _: int, frame: FrameType | None) -> None:
        """One sample; the handler of SIGPROF."""
        names = [_name(found) for found in _stack(frame)]
        self.own[names[0] if names else "?"] += 1
        self.all.update(set(names))

    def write(self, file: Path) -> None:
        """Stop the clock and save."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        file.write_text(json.dumps({_OWN: self.own, _ALL: self.all}))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_name}"


def profiled(folder: Path, picker: str) -> list[str]:
    """Return the command that runs a profiled picker of this name, without its arguments."""
    return [sys.executable, "-m", "kvist_sim.bench.epp.profiler", str(_file(folder, picker))]


def begin(pid: int) -> None:
    """Start the sampling of a profiled picker."""
    os.kill(pid, signal.SIGUSR1)


def profiles(folder: Path, pickers: Sequence[str]) -> Iterator[str]:
    """Return a page per picker: the functions with most CPU time of their own."""
    for picker in pickers:
        found = json.loads(_file(folder, picker).read_text())
        yield f"picker {picker}: where its CPU time goes\n{page(found[_OWN], found[_ALL])}"


def page(own: dict[str, int], every: dict[str, int]) -> str:
    """Return shares in per cent, of the function itself and with all it calls; sorted by each."""
    total = max(1, sum(own.values()))
    work = {name: count for name, count in every.items() if count <= PLUMBING_SHARE * total}
    lines = [f"{total} samples"]
    for title, counts in (("by own time", own), ("with all it calls", work)):
        lines.append(f"   own     all  function, {title}")
        lines += [_row(name, own, every, total) for name, _ in Counter(counts).most_common(TOP)]
    return "\n".join(lines)


def _row(name: str, own: dict[str, int], every: dict[str, int], total: int) -> str:
    return f"{100 * own.get(name, 0) / total:6.1f}  {100 * every.get(name, 0) / total:6.1f}  {name}"


def _file(folder: Path, picker: str) -> Path:
    return folder / f"{picker.replace(' ', '-')}.profile"


def main(file: Path, arguments: Sequence[str]) -> int:
    """Run a picker and return its exit code."""
    from kvist_epp.__main__ import main as picker

    sampler = Sampler()
    signal.signal(signal.SIGPROF, sampler.take)
    signal.signal(signal.SIGUSR1, sampler.begin)
    try:
        return picker(arguments)
    finally:
        sampler.write(file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
