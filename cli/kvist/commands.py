"""Every command of ``kvist``: its words, its options, and the function that does it.

Standard library only; a command's function is named as text and imported when it runs.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvist.command import Command
from kvist.values import count, delay, loads, positive, sizes, words

PROMPT_KILOBYTES: Final = (1, 8, 40, 160, 450)
SHAPES: Final = ("completion", "chat-2", "chat-40")


GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sim": "simulated parts, each from outside like the real one",
        "bench": "measurements, as a table and as JSON",
    }
)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=positive, default=25.0, help="measured time of each of the two runs (default: 25)"
    )
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--rate", type=positive, help="requests per second to the whole pool (default: 6 per engine)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same traffic (default: 0)")
    parser.add_argument("--json", action="store_true", help="only JSON on stdout; progress goes to stderr")


def _bench_epp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shapes, under 90 seconds")
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="KB,…",
        help=f"prompt bodies in KB (default: {','.join(map(str, PROMPT_KILOBYTES))})",
    )
    parser.add_argument(
        "--seconds", type=positive, metavar="N", help="measured time of each cell (default: 2.4, quick: 0.9)"
    )
    parser.add_argument("--transport", choices=("fast", "grpc"), help="only this one (default: both)")
    parser.add_argument("--mode", choices=("buffered", "duplex"), help="only this one (default: both)")
    parser.add_argument("--shape", choices=SHAPES, help="only this one (default: all; quick: the first two)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - is stdout")
    parser.add_argument(
        "--baseline",
        metavar="REV",
        help="beside the picker of this git revision: CPU per request then and now",
    )
    parser.add_argument(
        "--write-docs",
        metavar="FILE",
        help="with --baseline: put the comparison into this page (benchmarks.md)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show which functions the pickers spend their CPU time in"
    )


def _bench_chaos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--phase-seconds",
        type=positive,
        default=60.0,
        metavar="N",
        help="length of each phase (default: 60; shorter ones are no proof)",
    )
    parser.add_argument("--rate", type=positive, default=200.0, help="requests per second (default: 200)")
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--only", type=words, metavar="PHASE,…", default=(), help="only these phases, by their names"
    )
    parser.add_argument("--plaintext", action="store_true", help="no TLS between Envoy and the pickers")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same traffic (default: 0)")
    _results(parser)


def _bench_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=positive,
        default=600.0,
        metavar="N",
        help="length of each part (default: 600; shorter ones are no proof)",
    )
    parser.add_argument("--part", choices=("direct", "stack"), help="only this one (default: both)")
    parser.add_argument(
        "--picks", type=positive, default=1000.0, help="direct picks per second (default: 1000)"
    )
    parser.add_argument(
        "--rate", type=positive, default=200.0, help="requests per second through the stack (default: 200)"
    )
    _results(parser)


def _bench_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=count,
        default=50_000,
        metavar="N",
        help="how many wait at once (default: 50000; fewer are no proof)",
    )
    _results(parser)


def _bench_prewarm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("virtual", "sockets"), help="only this one (default: both)")
    parser.add_argument("--seeds", type=count, default=8, metavar="N", help="virtual triples (default: 8)")
    parser.add_argument("--first-seed", type=int, default=3000, metavar="N", help="(default: 3000)")
    parser.add_argument(
        "--seconds", type=positive, default=800.0, metavar="N", help="of virtual time a run (default: 800)"
    )
    parser.add_argument(
        "--slot-seconds", type=positive, default=60.0, metavar="N", help="a pod, over sockets (default: 60)"
    )
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="processes (default: 2)")
    _results(parser)


def _bench_routers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="N", help="measured time of each (default: 60)"
    )
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--rate", type=positive, default=6.0, help="requests per second and engine (default: 6)"
    )
    parser.add_argument(
        "--only", type=words, metavar="ROUTER,…", default=(), help="only these routers, by their names"
    )
    _results(parser)


def _bench_route(parser: argparse.ArgumentParser) -> None:
    names = "comma-separated; default: all"
    parser.add_argument("--workload", type=words, metavar="NAME,…", default=(), help=names)
    parser.add_argument("--policy", type=words, metavar="NAME,…", default=(), help=names)
    parser.add_argument(
        "--load",
        type=loads,
        metavar="SHARE,…",
        default=(0.3, 0.6, 0.8, 1.0, 1.3),
        help="offered, by the capacity of a pool with one shared cache (default: 0.3,0.6,0.8,1,1.3)",
    )
    parser.add_argument("--engines", type=count, default=16, help="simulated engines (default: 16)")
    parser.add_argument(
        "--requests", type=count, default=5_000, metavar="N", help="requests of a run (default: 5000)"
    )
    parser.add_argument("--seeds", type=count, default=8, metavar="N", help="pairs of runs (default: 8)")
    parser.add_argument("--first-seed", type=int, default=1000, metavar="N", help="(default: 1000)")
    parser.add_argument(
        "--screen",
        type=int,
        default=0,
        metavar="N",
        help="after so many seeds only ours, the two best others, if within 10 points or a quarter of the "
        "best's goodput, and round robin and least requests within 10 of ours go on (default: all do)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="keep each run there as it ends, and do not repeat those of the same code",
    )
    parser.add_argument("--pickers", type=count, default=1, metavar="N", help="replicas (default: 1)")
    parser.add_argument(
        "--gossip-delay", type=delay, default=0.1, metavar="SECONDS", help="between them (default: 0.1)"
    )
    parser.add_argument(
        "--event-delay", type=delay, default=0.02, metavar="SECONDS", help="of KV events (default: 0.02)"
    )
    parser.add_argument(
        "--prefill-rate-factor",
        type=positive,
        default=1.0,
        metavar="F",
        help="what routers are told of the engines' prefill rate, by the truth (default: 1)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format instead")
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write every run there too; - is stdout")
    parser.add_argument(
        "--write-docs", metavar="FILE", help="put rows and pictures into this page (benchmarks.md)"
    )


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - is stdout")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the components' logs there (an empty folder)")
    parser.add_argument("--write-docs", metavar="FILE", help="put the result into this page (benchmarks.md)")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--filename", dest="file", required=True, metavar="FILE", help="the pool; - is stdin"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="on this accelerator, whatever the pool says: H100-80GB, NVIDIA-L40S, …"
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="default: table"
    )


def _render(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--filename", dest="file", required=True, metavar="FILE", help="the pool; - is stdin"
    )
    parser.add_argument("--gpu", metavar="NAME", help="on this accelerator, whatever the pool says")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="API",
        help="for a cluster that lacks this API, such as podmonitors; may be given again",
    )
    parser.add_argument(
        "--claim",
        dest="claims",
        action="append",
        default=[],
        metavar="NAME=MODE",
        help="access mode of a claim, such as models=ReadOnlyMany; may be given again",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    _plan(parser)
    parser.add_argument(
        "--with",
        dest="changes",
        action="append",
        required=True,
        metavar="FIELD=VALUE",
        help="a field of the spec and its other value; may be given again",
    )


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
        words=("plan",),
        summary="what would run for a pool, on which accelerators, with how much KV cache, and why",
        function="kvist.plan:plan_main",
        options=_plan,
        extra="operator",
        examples="""\
  kvist plan -f pool.yaml
  kvist plan -f pool.yaml --gpu H100-80GB
  kvist plan -f pool.yaml -o json | jq .memory""",
    ),
    Command(
        words=("render",),
        summary="the objects that the operator would make for a pool, as YAML",
        function="kvist.render:render_main",
        options=_render,
        extra="operator",
        examples="""\
  kvist render -f pool.yaml
  kvist render -f pool.yaml --gpu H100-80GB --without podmonitors | kubectl diff -f -""",
    ),
    Command(
        words=("compare",),
        summary="two plans for a pool side by side, the second with fields changed",
        function="kvist.plan:compare_main",
        options=_compare,
        extra="operator",
        examples="""\
  kvist compare -f pool.yaml --with engine.kvCacheDtype=Model
  kvist compare -f pool.yaml --gpu H200 --with engine.maxModelLen=131072 --with workload.concurrency=4""",
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
        function="kvist_sim.bench.epp.command:main",
        options=_bench_epp,
        examples="""\
  kvist bench epp --quick
  kvist bench epp --json epp.json
  kvist bench epp --baseline 7821c51
  kvist bench epp --sizes 450 --shape chat-2 --transport fast --mode buffered --profile""",
    ),
    Command(
        words=("bench", "index"),
        summary="the prefix index: ingest, match, memory, picks during ingest",
        function="kvist_sim.bench.index.command:main",
        examples="""\
  kvist bench index
  kvist bench index --help""",
    ),
    Command(
        words=("bench", "chaos"),
        summary="steady load while engines, pickers, events, links and certificates fail, one at a time",
        function="kvist_sim.bench.chaos.command:main",
        options=_bench_chaos,
        examples="""\
  kvist bench chaos
  kvist bench chaos --only "engine killed,picker killed" --json chaos.json
  kvist bench chaos --phase-seconds 15 --rate 50""",
    ),
    Command(
        words=("bench", "soak"),
        summary="load for a long time: memory each second, and what is left when it stops",
        function="kvist_sim.bench.soak.command:main",
        options=_bench_soak,
        examples="""\
  kvist bench soak
  kvist bench soak --part direct --seconds 60
  kvist bench soak --json soak.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "queue"),
        summary="tens of thousands wait in one picker: memory, fair shares, priorities, limits",
        function="kvist_sim.bench.queue.command:main",
        options=_bench_queue,
        examples="""\
  kvist bench queue
  kvist bench queue --requests 5000
  kvist bench queue --json queue.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "prewarm"),
        summary="a rolling update, with and without prewarming: time to the first token",
        function="kvist_sim.bench.prewarm.command:main",
        options=_bench_prewarm,
        examples="""\
  kvist bench prewarm
  kvist bench prewarm --part virtual --seeds 2
  kvist bench prewarm --part sockets --slot-seconds 12
  kvist bench prewarm --json prewarm.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "handover"),
        summary="older name of kvist bench prewarm",
        function="kvist_sim.bench.prewarm.command:main",
        options=_bench_prewarm,
        examples="  kvist bench handover",
        hidden=True,
    ),
    Command(
        words=("bench", "routers"),
        summary="the same traffic through other projects' routers, on the same simulated engines",
        function="kvist_sim.bench.routers.command:main",
        options=_bench_routers,
        examples="""\
  kvist bench routers
  kvist bench routers --only kvist,vllm-router --seconds 20
  kvist bench routers --json routers.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "route"),
        summary="routing policies against each other, in virtual time: no sockets, exact for a seed",
        function="kvist_sim.bench.route.command:main",
        options=_bench_route,
        examples="""\
  kvist bench route --workload chat,groups --load 0.8,1 --requests 2000 --engines 8 --seeds 3
  kvist bench route --policy kvist,dynamo,round-robin --json route.json
  kvist bench route --workload system-prompts --policy kvist --requests 100000 --load 0.8 --seeds 1
  kvist bench route --pickers 3 --gossip-delay 0.1 --policy kvist
  kvist bench route --trace conversation_trace.jsonl --load 1""",
    ),
)
