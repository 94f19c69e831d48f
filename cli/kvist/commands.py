"""Every subcommand of ``kvist``: its words, help, options and function.

Standard library only; a subcommand's function is named as text and imported when it runs.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvist import bench_options, options

GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sim": "run a simulated component, such as an engine with vLLM's API",
        "bench": "run a benchmark; print a table and write JSON",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of ``kvist``: its words, help, options and function."""

    words: tuple[str, ...]
    """Words as typed: ``("bench", "epp")``."""
    summary: str
    """One line for lists of commands."""
    examples: str
    function: str
    """``module:name``; called with the parsed options, or with the remaining words when ``options`` is None.
    Returns the exit code."""
    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the options; None = the words after the command go on unread, ``--help`` too."""
    extra: str = "demo"
    """The extra of the distribution that it needs."""
    hidden: bool = False
    """Accepted, but left out of the lists of ``--help``: an older name."""


COMMANDS: Final = (
    Command(
        words=("demo",),
        summary="compare kvist with round robin, with a real Envoy, the picker and simulated engines",
        function="kvist_sim.demo.command:main",
        options=options.demo_options,
        examples="""\
  kvist demo
  kvist demo --watch
  kvist demo --engines 6 --seconds 60 --picture
  kvist demo --json | python -m json.tool""",
    ),
    Command(
        words=("plan",),
        summary="show what would run for a pool, on which accelerators, with how much KV cache, and why",
        function="kvist.pool_commands:plan_main",
        options=options.plan_options,
        extra="operator",
        examples="""\
  kvist plan -f pool.yaml
  kvist plan -f pool.yaml --gpu H100-80GB
  kvist plan -f pool.yaml -o json | jq .memory""",
    ),
    Command(
        words=("render",),
        summary="print the objects that the operator would create for a pool, as YAML",
        function="kvist.pool_commands:render_main",
        options=options.render_options,
        extra="operator",
        examples="""\
  kvist render -f pool.yaml
  kvist render -f pool.yaml --gpu H100-80GB --without podmonitors | kubectl diff -f -""",
    ),
    Command(
        words=("compare",),
        summary="show two plans for a pool side by side: with changed fields, or running and new",
        function="kvist.pool_commands:compare_main",
        options=options.compare_options,
        extra="operator",
        examples="""\
  kvist compare -f pool.yaml --with engine.kvCacheDtype=Model
  kubectl get kvp qwen -o yaml | kvist compare -f -
  kvist compare -f pool.yaml --gpu H200 --with engine.maxModelLen=131072 --with workload.concurrency=4""",
    ),
    Command(
        words=("pools",),
        summary="list the pools of a cluster: planned and reported KV cache, replicas, hit rate, advice",
        function="kvist.status_commands:pools_main",
        options=options.pools_options,
        extra="operator",
        examples="""\
  kvist pools
  kvist pools -A
  kvist pools -n serving -o wide
  kvist pools -A -o json | jq '.pools[] | select(.state != "Ready")'""",
    ),
    Command(
        words=("why",),
        summary="show why a pool runs as it does: problems, advice, conditions, the reasons of its plan",
        function="kvist.status_commands:why_main",
        options=options.why_options,
        extra="operator",
        examples="""\
  kvist why qwen3-32b
  kvist why qwen3-32b -n serving --context production
  kubectl get kvp qwen3-32b -o yaml | kvist why -f -""",
    ),
    Command(
        words=("top",),
        summary="show a running pool as a live table: endpoints, load, cache hits, queue, what is wrong",
        function="kvist.top_command:top_main",
        options=options.top_options,
        examples="""\
  kvist top
  kvist top --pool qwen --namespace serving
  kvist top --address http://10.0.0.7:9090 --interval 1
  kvist top --once -o json | jq .hit_rate""",
    ),
    Command(
        words=("explain",),
        summary="show where a request would go, or why a request went where it did, and what came true",
        function="kvist.explain_command:main",
        options=options.explain_options,
        extra="operator",
        examples="""\
  kvist explain -f request.json                        # where it would go; asks localhost:9090
  kvist explain -f - --path /v1/completions < body.json
  kvist explain 5c3fd1e2-91b4-4c1b-8a52-0e7a4fd5bb3c   # why it went there: its x-request-id
  kvist explain REQUEST-ID --address http://10.0.0.7:9090 -o json
  kvist explain REQUEST-ID --pool qwen3-32b --namespace serving""",
    ),
    Command(
        words=("sim", "engine"),
        summary="run a simulated engine with vLLM's API and arguments",
        function="kvist_sim.engine.__main__:main",
        examples="""\
  kvist sim engine --port 8000
  kvist sim engine --help""",
    ),
    Command(
        words=("bench", "epp"),
        summary="measure the CPU time and latency of the picker behind a real Envoy, by transport and mode",
        function="kvist_sim.bench.epp.command:main",
        options=bench_options.bench_epp_options,
        examples="""\
  kvist bench epp --quick
  kvist bench epp --json epp.json
  kvist bench epp --baseline 7821c51
  kvist bench epp --quick --guard
  kvist bench epp --sizes 450 --shape chat-2 --transport fast --mode buffered --profile""",
    ),
    Command(
        words=("bench", "index"),
        summary="measure the prefix index: ingestion, matching, memory, picks during ingestion",
        function="kvist_sim.bench.index.command:main",
        examples="""\
  kvist bench index
  kvist bench index --help""",
    ),
    Command(
        words=("bench", "ends"),
        summary="measure one endpoint behind gateways that report how requests end, and that do not",
        function="kvist_sim.bench.ends:main",
        options=bench_options.bench_ends_options,
        examples="""\
  kvist bench ends
  kvist bench ends --seconds 2 --json ends.json
  kvist bench ends --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "disaggregation"),
        summary="measure what a request in two legs costs the picker, and 200 of them at once",
        function="kvist_sim.bench.disaggregation.command:main",
        options=bench_options.bench_disaggregation_options,
        examples="""\
  kvist bench disaggregation
  kvist bench disaggregation --part cost --sizes 450 --seconds 5
  kvist bench disaggregation --part burst --json burst.json
  kvist bench disaggregation --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "traces"),
        summary="measure what OpenTelemetry traces cost the picker: off, and with several shares sampled",
        function="kvist_sim.bench.traces:main",
        options=bench_options.bench_traces_options,
        examples="""\
  kvist bench traces
  kvist bench traces --rounds 30 --baseline d84b393
  kvist bench traces --instructions --write-docs docs/benchmarks.md
  kvist bench traces --instructions --baseline 93d577c
  kvist bench traces --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "rest"),
        summary="measure the CPU of a picker without requests, and per request at a low rate",
        function="kvist_sim.bench.rest.command:rest",
        options=bench_options.bench_rest_options,
        examples="""\
  kvist bench rest --quick
  kvist bench rest --baseline bbf266e --part idle
  kvist bench rest --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "scale"),
        summary="measure what a picker of 1,000 endpoints needs, and what more replicas do",
        function="kvist_sim.bench.rest.command:scaled",
        options=bench_options.bench_scale_options,
        examples="""\
  kvist bench scale --replicas 1
  kvist bench scale --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "chaos"),
        summary="run a steady load while engines, pickers, events, links and certificates fail one by one",
        function="kvist_sim.bench.chaos.command:main",
        options=bench_options.bench_chaos_options,
        examples="""\
  kvist bench chaos
  kvist bench chaos --only "engine killed,picker killed" --json chaos.json
  kvist bench chaos --phase-seconds 15 --rate 50""",
    ),
    Command(
        words=("bench", "soak"),
        summary="run a load for a long time; record memory each second, and state that is left at the end",
        function="kvist_sim.bench.soak.command:main",
        options=bench_options.bench_soak_options,
        examples="""\
  kvist bench soak
  kvist bench soak --part direct --seconds 60
  kvist bench soak --json soak.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "queue"),
        summary="queue tens of thousands of requests in one picker: memory, fairness, priorities, limits",
        function="kvist_sim.bench.queue.command:main",
        options=bench_options.bench_queue_options,
        examples="""\
  kvist bench queue
  kvist bench queue --requests 5000
  kvist bench queue --json queue.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "prewarm"),
        summary="measure TTFT during a rolling update, with and without prewarming",
        function="kvist_sim.bench.prewarm.command:main",
        options=bench_options.bench_prewarm_options,
        examples="""\
  kvist bench prewarm
  kvist bench prewarm --part virtual --seeds 2
  kvist bench prewarm --part sockets --slot-seconds 12
  kvist bench prewarm --json prewarm.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "handover"),
        summary="former name of kvist bench prewarm",
        function="kvist_sim.bench.prewarm.command:main",
        options=bench_options.bench_prewarm_options,
        examples="  kvist bench handover",
        hidden=True,
    ),
    Command(
        words=("bench", "routers"),
        summary="send the same traffic through other projects' routers, to the same simulated engines",
        function="kvist_sim.bench.routers.command:main",
        options=bench_options.bench_routers_options,
        examples="""\
  kvist bench routers
  kvist bench routers --only kvist,vllm-router --seconds 20
  kvist bench routers --json routers.json --write-docs docs/benchmarks.md""",
    ),
    Command(
        words=("bench", "route"),
        summary="compare routing policies in virtual time; the same seed gives the same result",
        function="kvist_sim.bench.route.command:main",
        options=bench_options.bench_route_options,
        examples="""\
  kvist bench route --workload chat,groups --load 0.8,1 --requests 2000 --engines 8 --seeds 3
  kvist bench route --policy kvist,dynamo,round-robin --json route.json
  kvist bench route --workload system-prompts --policy kvist --requests 100000 --load 0.8 --seeds 1
  kvist bench route --pickers 3 --gossip-delay 0.1 --policy kvist
  kvist bench route --trace conversation_trace.jsonl --load 1""",
    ),
)
