"""Every command of ``kvist``: its words, its options, and the function that does it.

Standard library only; a command's function is named as text and imported when it runs.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PROMPT_KILOBYTES: Final = (1, 8, 40, 160, 450)
SHAPES: Final = ("completion", "chat-2", "chat-40")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    words: tuple[str, ...]
    """As typed: ``("bench", "epp")``."""
    summary: str
    """One line, for the list."""
    examples: str
    function: str
    """``module:name``; called with the parsed options, or with the remaining words when ``options`` is None.
    Returns the exit code."""
    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the options; None = the words after the command go on unread, ``--help`` too."""
    extra: str = "demo"
    """The extra of the distribution that it needs."""


GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sim": "simulated parts, each from outside like the real one",
        "bench": "measurements, as a table and as JSON",
    }
)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=_positive, default=25.0, help="measured time of each of the two runs (default: 25)"
    )
    parser.add_argument("--engines", type=_count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--rate", type=_positive, help="requests per second to the whole pool (default: 6 per engine)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same traffic (default: 0)")
    parser.add_argument("--json", action="store_true", help="only JSON on stdout; progress goes to stderr")


def _bench_epp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shapes, under 90 seconds")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="KB,…",
        help=f"prompt bodies in KB (default: {','.join(map(str, PROMPT_KILOBYTES))})",
    )
    parser.add_argument(
        "--seconds", type=_positive, metavar="N", help="measured time of each cell (default: 2.4, quick: 0.9)"
    )
    parser.add_argument("--transport", choices=("fast", "grpc"), help="only this one (default: both)")
    parser.add_argument("--mode", choices=("buffered", "duplex"), help="only this one (default: both)")
    parser.add_argument("--shape", choices=SHAPES, help="only this one (default: all; quick: the first two)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - is stdout")
    parser.add_argument(
        "--profile", action="store_true", help="show which functions the pickers spend their CPU time in"
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


COMMANDS: Final = (
    Command(
        words=("demo",),
        summary="kvist beside round robin: real Envoy, the picker, simulated engines",
        function="kvist_sim.demo.command:main",
        options=_demo,
        examples="""\
  kvist demo
  kvist demo --engines 6 --seconds 60
  kvist demo --json | python -m json.tool""",
    ),
    Command(
        words=("sim", "engine"),
        summary="an engine that looks like vLLM from outside; takes vLLM's arguments",
        function="kvist_sim.engine.__main__:main",
        examples="""\
  kvist sim engine --port 8000
  kvist sim engine --help""",
    ),
    Command(
        words=("bench", "epp"),
        summary="what the picker costs, behind a real Envoy: both transports, both modes",
        function="kvist_sim.bench.epp:main",
        options=_bench_epp,
        examples="""\
  kvist bench epp --quick
  kvist bench epp --json epp.json
  kvist bench epp --sizes 450 --shape chat-2 --transport fast --mode buffered --profile""",
    ),
    Command(
        words=("bench", "index"),
        summary="the prefix index: ingest, match, memory, picks during ingest",
        function="kvist_sim.bench.index:main",
        examples="""\
  kvist bench index
  kvist bench index --help""",
    ),
)
