"""Options of ``kvist bench …``, and parsers of their values, for argparse. Standard library only."""

import argparse
from pathlib import Path
from typing import Final

from kvist.options import count, positive, words

PROMPT_KILOBYTES: Final = (1, 8, 40, 160, 450)
SHAPES: Final = ("completion", "chat-2", "chat-40", "parts-40", "agent-40")


def bench_epp_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench epp``."""
    parser.add_argument(
        "--quick", action="store_true", help="measure fewer sizes and shapes, in about a minute"
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="KB,…",
        help=f"prompt bodies in KB (default: {','.join(map(str, PROMPT_KILOBYTES))})",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help="measured seconds of each cell (default: 2.4, with --quick: 0.9)",
    )
    parser.add_argument(
        "--transport", choices=("fast", "grpc"), help="measure only this transport (default: both)"
    )
    parser.add_argument(
        "--mode", choices=("buffered", "duplex"), help="measure only this mode (default: both)"
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        help="measure only this prompt shape (default: the first three; with --quick: two)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file; - is stdout")
    parser.add_argument(
        "--baseline",
        metavar="REV",
        help="compare the CPU time per request with the picker of this git revision",
    )
    parser.add_argument(
        "--guard",
        action="store_true",
        help="compare with the best revision so far; refuse on a machine that does something else",
    )
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        help="write the tables, or with --baseline the comparison, into this page (benchmarks.md)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show in which functions the pickers spend their CPU time"
    )


def bench_chaos_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench chaos``."""
    parser.add_argument(
        "--phase-seconds",
        type=positive,
        default=60.0,
        metavar="N",
        help="seconds of each phase (default: 60; results of shorter phases are not conclusive)",
    )
    parser.add_argument("--rate", type=positive, default=200.0, help="requests per second (default: 200)")
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--only", type=words, metavar="PHASE,…", default=(), help="names of the phases to run (default: all)"
    )
    parser.add_argument("--plaintext", action="store_true", help="use no TLS between Envoy and the pickers")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the traffic, which is the same for the same seed (default: 0)",
    )
    _results(parser)


def bench_soak_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench soak``."""
    parser.add_argument(
        "--seconds",
        type=positive,
        default=600.0,
        metavar="N",
        help="seconds of each part (default: 600; results of shorter parts are not conclusive)",
    )
    parser.add_argument("--part", choices=("direct", "stack"), help="run only this part (default: both)")
    parser.add_argument(
        "--picks", type=positive, default=1000.0, help="direct picks per second (default: 1000)"
    )
    parser.add_argument(
        "--rate", type=positive, default=200.0, help="requests per second through the stack (default: 200)"
    )
    _results(parser)


def bench_ends_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench ends``."""
    parser.add_argument(
        "--seconds", type=positive, default=5.0, metavar="N", help="seconds of each window (default: 5)"
    )
    _results(parser)


def bench_disaggregation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench disaggregation``."""
    parser.add_argument(
        "--seconds", type=positive, default=2.0, metavar="N", help="seconds of each cell (default: 2)"
    )
    parser.add_argument("--sizes", type=sizes, metavar="KB,…", help="prompts in KB (default: 1,40,450)")
    parser.add_argument(
        "--part",
        choices=("cost", "burst"),
        help="only the cost of each kind of request, or only 200 requests at once (default: both)",
    )
    _results(parser)


def bench_traces_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench traces``."""
    parser.add_argument(
        "--seconds", type=positive, default=1.0, metavar="N", help="seconds of each window (default: 1)"
    )
    parser.add_argument(
        "--rounds", type=count, default=15, metavar="N", help="windows of each way (default: 15)"
    )
    parser.add_argument(
        "--baseline",
        metavar="REV",
        help="also measure the picker of this git revision, in the same rounds; with --instructions: count "
        "requests without traces in both",
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count machine instructions of a replay instead (Valgrind), on a machine as busy as it may be",
    )
    _results(parser)


def bench_rest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench rest``."""
    parser.add_argument("--quick", action="store_true", help="4 and 100 endpoints, one short window each")
    parser.add_argument("--part", choices=("idle", "few", "pages"), help="run only this part (default: all)")
    parser.add_argument(
        "--engines",
        choices=("vllm", "no-metrics", "unreachable"),
        help="kind of engines without requests: vLLM's, servers without its metrics and a list of models, or "
        "addresses without a server (default: all, one after the other)",
    )
    parser.add_argument(
        "--baseline", metavar="REV", help="also measure the picker of this git revision, in the same windows"
    )
    parser.add_argument("--profile", action="store_true", help="show where the picker's CPU time goes")
    _results(parser)


def bench_scale_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench scale``."""
    parser.add_argument(
        "--replicas",
        type=count,
        nargs="+",
        default=(1, 2, 4),
        metavar="N",
        help="numbers of pickers on this machine, one after the other (default: 1 2 4)",
    )
    parser.add_argument(
        "--seconds", type=positive, default=6.0, metavar="N", help="seconds of each window (default: 6)"
    )
    _results(parser)


def bench_queue_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench queue``."""
    parser.add_argument(
        "--requests",
        type=count,
        default=50_000,
        metavar="N",
        help="requests that are queued at once (default: 50000; results of fewer are not conclusive)",
    )
    _results(parser)


def bench_prewarm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench prewarm`` and its older name ``handover``."""
    parser.add_argument("--part", choices=("virtual", "sockets"), help="run only this part (default: both)")
    parser.add_argument(
        "--seeds",
        type=count,
        default=8,
        metavar="N",
        help="seeds of the virtual part, three runs each (default: 8)",
    )
    parser.add_argument(
        "--first-seed", type=int, default=3000, metavar="N", help="seed of the first run (default: 3000)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=800.0, metavar="N", help="virtual seconds of a run (default: 800)"
    )
    parser.add_argument(
        "--slot-seconds",
        type=positive,
        default=60.0,
        metavar="N",
        help="seconds from one pod's removal to the next one's, in the part over sockets (default: 60)",
    )
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="parallel processes (default: 2)")
    _results(parser)


def bench_routers_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench routers``."""
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="N",
        help="measured seconds of each router (default: 60)",
    )
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--rate", type=positive, default=6.0, help="requests per second and engine (default: 6)"
    )
    parser.add_argument(
        "--only",
        type=words,
        metavar="ROUTER,…",
        default=(),
        help="names of the routers to run (default: all)",
    )
    _results(parser)


def bench_route_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist bench route``."""
    names = "names, separated by commas (default: all)"
    parser.add_argument("--workload", type=words, metavar="NAME,…", default=(), help=names)
    parser.add_argument("--policy", type=words, metavar="NAME,…", default=(), help=names)
    parser.add_argument(
        "--disaggregation",
        action="store_true",
        help="workloads and policies in which one engine computes a prompt and another one answers",
    )
    parser.add_argument(
        "--load",
        type=loads,
        metavar="SHARE,…",
        default=(0.3, 0.6, 0.8, 1.0, 1.3),
        help="offered load, as a share of the capacity of a pool with one shared cache "
        "(default: 0.3,0.6,0.8,1,1.3)",
    )
    parser.add_argument("--engines", type=count, default=16, help="simulated engines (default: 16)")
    parser.add_argument(
        "--requests", type=count, default=5_000, metavar="N", help="requests of a run (default: 5000)"
    )
    parser.add_argument("--seeds", type=count, default=8, metavar="N", help="paired runs (default: 8)")
    parser.add_argument(
        "--first-seed", type=int, default=1000, metavar="N", help="seed of the first run (default: 1000)"
    )
    parser.add_argument(
        "--screen",
        type=int,
        default=0,
        metavar="N",
        help="after N seeds, drop the policies that are far behind: continue with kvist, with the two best "
        "others if they are within 10 points or a quarter of the best goodput, and with round robin and "
        "least requests if they are within 10 points of kvist; with --disaggregation, continue with the best "
        "ratio of each rule with fixed roles (default: 0, drop none)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="store finished runs in this file; runs of the same code that it has are not repeated",
    )
    parser.add_argument(
        "--pickers", type=count, default=1, metavar="N", help="replicas of the picker (default: 1)"
    )
    parser.add_argument(
        "--gossip-delay",
        type=delay,
        default=0.1,
        metavar="SECONDS",
        help="delay of messages between replicas (default: 0.1)",
    )
    parser.add_argument(
        "--event-delay",
        type=delay,
        default=0.02,
        metavar="SECONDS",
        help="delay of KV events (default: 0.02)",
    )
    parser.add_argument(
        "--prefill-rate-factor",
        type=positive,
        default=1.0,
        metavar="F",
        help="prefill rate that routers assume, as a multiple of the engines' real rate (default: 1)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay this trace in Mooncake's format instead of the workloads",
    )
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="parallel processes (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="also write every run to this file; - is stdout")
    parser.add_argument(
        "--write-docs", metavar="FILE", help="write rows and pictures into this page (benchmarks.md)"
    )


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file; - is stdout")
    parser.add_argument(
        "--logs", metavar="FOLDER", help="keep the components' logs in this folder, which must be empty"
    )
    parser.add_argument(
        "--write-docs", metavar="FILE", help="write the result into this page (benchmarks.md)"
    )


def sizes(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers of at least 1."""
    return tuple(count(part) for part in text.split(","))


def delay(text: str) -> float:
    """Parse a number of at least zero."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below zero")
    return value


def loads(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers above zero."""
    return tuple(positive(part) for part in text.split(","))
