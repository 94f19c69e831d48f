"""Run ``kvist bench index``: speed and size of the prefix index, and delay of picks during ingestion."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvist_epp.index.byte_index import Index
from kvist_epp.index.routing_history import RoutingHistory
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import WIDTH, publish
from kvist_sim.bench.index.answers import measure_answers
from kvist_sim.bench.index.data import (
    BLOCK_BYTES,
    EVENT_BLOCKS,
    ROOT,
    Chain,
    chain,
    chains,
    uneven_chain,
)

BLOCKS: Final = 400_000
"""At scale 1; memory is measured at several sizes around it, as a dictionary's slack depends on it."""
MEMORY_PARTS: Final = (0.5, 1.0, 1.7, 2.5)
PROMPTS_KB: Final = (45, 180, 450)
PROMPTS: Final = 20
ROUNDS: Final = 3
REPEATS: Final = 5
"""A time is the best of so many (long ones: of ``ROUNDS``): other processes are not the index."""
SHARERS: Final = 16
FIRST_BLOCKS: Final = 1500
"""Different first blocks of prompts, of many sizes."""
FORK_BLOCKS: Final = 16
"""Blocks of a prompt of 1 KB."""
RATE: Final = 100_000.0
"""Blocks per second during picks."""
SECONDS: Final = 6.0

Figures = dict[str, Any]


def measure_ingest(blocks: int) -> Figures:
    """Blocks per second taken in: new ones, and the same again from a second and a foreign publisher."""
    data = list(chains(blocks))
    foreign = [Chain([name ^ 1 for name in one.hashes], one.blocks) for one in data]
    runs = [_ingest(data, foreign) for _ in range(ROUNDS)]
    return {key: blocks / min(run[key] for run in runs) for key in runs[0]}


def _ingest(data: list[Chain], foreign: list[Chain]) -> dict[str, float]:
    index = Index()
    sources = {"distinct": data, "shared": data, "foreign": foreign}
    return {key: _seconds(_store, source, index, index.publisher(key)) for key, source in sources.items()}


def measure_removal(blocks: int) -> Figures:
    """Blocks per second evicted, the last of a chain first: in one call for each chain, and one by one."""
    data = list(chains(blocks))
    steps = {"batched": EVENT_BLOCKS, "single": 1}
    return {key: blocks / min(_removal(data, step) for _ in range(ROUNDS)) for key, step in steps.items()}


def _removal(data: list[Chain], step: int) -> float:
    index = Index()
    publisher = index.publisher("engine-0/0")
    _store(data, index, publisher)
    names = [name for one in data for name in reversed(one.hashes)]
    return _seconds(_remove, [names[at : at + step] for at in range(0, len(names), step)], index, publisher)


def measure_forget(blocks: int) -> Figures:
    """Microseconds until a restarted engine's blocks no longer match, and blocks per second swept after."""
    index = Index()
    publisher = index.publisher("engine-0/0")
    _store(chains(blocks), index, publisher)
    at_once = _seconds(index.forget, publisher) * 1e6
    return {"forget_us": at_once, "swept_per_second": blocks / _seconds(index.sweep, blocks)}


def measure_match(kilobytes: int, *, prompts: int, holders: int = 10) -> Figures:
    """Microseconds for a prompt all of which so many publishers hold, one of ``prompts`` in the tree."""
    length = kilobytes * 1000 // BLOCK_BYTES
    data, index = [chain(number, length) for number in range(prompts)], Index()
    for number in range(holders):
        _store(data, index, index.publisher(f"engine-{number}/0"))
    texts = [one.prompt for one in data]
    assert index.match(ROOT, texts[0]).of(holders - 1).bytes == length * BLOCK_BYTES
    each = [_best(index.match, ROOT, text) * 1e6 for text in texts]
    return {"blocks": length, "us": sum(each) / len(each)}


def measure_fork(first_blocks: int) -> Figures:
    """Microseconds for one of so many prompts of 1 KB with different first blocks, and for a new one."""
    index = Index()
    data = [uneven_chain(number, FORK_BLOCKS) for number in range(first_blocks)]
    _store(data, index, index.publisher("engine-0/0"))
    known = [one.prompt for one in data[:: max(1, first_blocks // 200)]]
    new = [uneven_chain(f"new {number}", FORK_BLOCKS).prompt for number in range(len(known))]
    assert all(index.match(ROOT, text).best for text in known)
    assert not any(index.match(ROOT, text).best for text in new)
    return {
        "known_us": _best(_match, known, index) / len(known) * 1e6,
        "new_us": _best(_match, new, index) / len(new) * 1e6,
    }


def measure_history(kilobytes: int) -> Figures:
    """Microseconds to note and to match a prompt, two thirds of which earlier prompts share."""
    length = kilobytes * 1000 // BLOCK_BYTES
    shared, history = chain("shared", length * 2 // 3).prompt, RoutingHistory()
    prompts = [shared + chain(number, length // 3).prompt for number in range(20)]
    noted = [_seconds(history.note, "engine", ROOT, prompt) * 1e6 for prompt in prompts]
    matched = [_best(history.match, ROOT, prompt) * 1e6 for prompt in prompts]
    return {"note_us": sorted(noted)[10], "match_us": sorted(matched)[10]}


def measure_memory(blocks: int, publishers: int, kind: str = "shared") -> Figures:
    """Return the resident bytes of a fresh process, the blocks' 64 bytes of text included."""
    argv = [sys.executable, "-m", "kvist_sim.bench.index.memory", str(blocks), str(publishers), kind]
    grown = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)["bytes"]
    return {
        "blocks": blocks,
        "publishers": publishers,
        "bytes_per_distinct_block": grown / blocks,
        "bytes_per_held_block": grown / blocks / publishers,
    }


def measure_zmq(what: str, amount: float, *, seconds: float = 0, evict: bool = True) -> Figures:
    """Through sockets, in a process of its own: ``ingest`` of so many blocks, or ``picks`` at such a rate."""
    spec = json.dumps({"what": what, "amount": amount, "evict": evict, "seconds": seconds})
    argv = [sys.executable, "-m", "kvist_sim.bench.index.zmq_ingest", spec]
    result: Figures = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    return result


def run(scale: float = 1.0, *, say: Callable[[str], None] = lambda _: None) -> Figures:
    """All of it; ``scale`` below 1 measures less. Rates are per second, times as their names say."""
    blocks = max(EVENT_BLOCKS, int(BLOCKS * scale) // EVENT_BLOCKS * EVENT_BLOCKS)
    say("ingest and removal")
    result: Figures = {
        "scale": scale,
        "ingest": measure_ingest(blocks),
        "removal": measure_removal(blocks),
        "forget": measure_forget(blocks),
    }
    say("match")
    prompts = max(2, int(PROMPTS * scale))
    result["match"] = {str(size): measure_match(size, prompts=prompts) for size in PROMPTS_KB}
    result["holders"] = {
        str(number): measure_match(45, prompts=prompts, holders=number)["us"] for number in (10, 1000)
    }
    result["fork"] = measure_fork(FIRST_BLOCKS)
    result["history"] = measure_history(450)
    say("memory")
    result["memory"] = {
        "distinct": [measure_memory(int(blocks * part), 1) for part in MEMORY_PARTS],
        "shared": measure_memory(blocks // 2, SHARERS),
        "foreign": measure_memory(blocks // 8, SHARERS, "foreign"),
    }
    say("answers")
    result["answers"] = measure_answers(blocks // 4)
    say("ZMQ")
    result["zmq"] = {
        "stored": measure_zmq("ingest", blocks, evict=False),
        "stored_and_evicted": measure_zmq("ingest", blocks),
        "picks_idle": measure_zmq("picks", 0, seconds=max(1, SECONDS * scale)),
        "picks_during_ingest": measure_zmq("picks", RATE, seconds=max(1, SECONDS * scale)),
    }
    return result


def table(result: Figures) -> Table:
    """Return the figures beside their aims."""
    shown = Table("what", "measured", "aim", box=box.SIMPLE_HEAD, pad_edge=False)
    for what, measured, aim in _rows(result):
        shown.add_row(what, measured, aim)
    return shown


def _rows(result: Figures) -> list[tuple[str, str, str]]:
    ingest, removal, zmq = result["ingest"], result["removal"], result["zmq"]
    distinct = max(one["bytes_per_distinct_block"] for one in result["memory"]["distinct"])
    holders, history, picks = result["holders"], result["history"], zmq["picks_during_ingest"]
    fork, answers = result["fork"], result["answers"]
    return [
        ("ingest, new blocks", _rate(ingest["distinct"]), "1.00 M/s"),
        ("ingest, held by another pod", _rate(ingest["shared"]), ""),
        ("ingest, held under other hashes", _rate(ingest["foreign"]), ""),
        ("removal, a chain in a call", _rate(removal["batched"]), "1.00 M/s"),
        ("removal, block by block", _rate(removal["single"]), ""),
        ("forget, until nothing matches", f"{result['forget']['forget_us']:.0f} us", ""),
        ("sweep after it", _rate(result["forget"]["swept_per_second"]), ""),
        *[
            (f"match, {size} KB", f"{one['us']:.0f} us", _match_aim(size))
            for size, one in result["match"].items()
        ],
        (
            "match, 45 KB, 10 and 1,000 holders",
            f"{holders['10']:.0f} and {holders['1000']:.0f} us",
            "the same",
        ),
        (
            "match, 1 KB, 1,500 first blocks: one of them, new",
            f"{fork['known_us']:.1f} and {fork['new_us']:.1f} us",
            "",
        ),
        ("routing history, 450 KB: note", f"{history['note_us']:.0f} us", "150 us"),
        ("routing history, 450 KB: match", f"{history['match_us']:.0f} us", ""),
        ("memory per distinct block (largest of 4 sizes)", f"{distinct:.0f} B", "220 B"),
        ("memory per held block, 16 pods share", _bytes(result["memory"]["shared"]), "45 B"),
        ("the same, hashes differ from pod to pod", _bytes(result["memory"]["foreign"]), ""),
        ("answers, block by block", _rate(answers["chunks"]), ""),
        ("the same, each block checked whole", _rate(answers["whole_check"]), ""),
        ("ZMQ ingest, stored", _rate(zmq["stored"]["blocks_per_second"]), "0.50 M/s"),
        ("ZMQ ingest, stored and as many evicted", _rate(zmq["stored_and_evicted"]["blocks_per_second"]), ""),
        ("pick p99, nothing coming in", f"{zmq['picks_idle']['p99_ms']:.2f} ms", ""),
        ("pick p99, 100,000 blocks/s in and out", f"{picks['p99_ms']:.2f} ms", "5 ms"),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print the table, write what is asked for."""
    parser = argparse.ArgumentParser(prog="kvist bench index", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="how much to measure (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="also write all figures; - is stdout, alone")
    parser.add_argument("--write-docs", metavar="FILE", help="write the table into docs/benchmarks.md")
    options = parser.parse_args(list(argv))
    result = run(options.scale, say=Console(stderr=True).print)
    publish("index", {**measured_on(), **result}, table(result), options, width=WIDTH)
    return 0


def _match_aim(size: str) -> str:
    return "200 us" if size == "450" else ""


def _rate(value: float) -> str:
    return f"{value / 1e6:.2f} M/s"


def _bytes(figures: Figures) -> str:
    return f"{figures['bytes_per_held_block']:.0f} B"


def _store(data: Iterable[Chain], index: Index, publisher: int) -> None:
    for one in data:
        one.store(index, publisher)


def _match(prompts: Iterable[bytes], index: Index) -> None:
    for prompt in prompts:
        index.match(ROOT, prompt)


def _remove(calls: Iterable[Sequence[int]], index: Index, publisher: int) -> None:
    for names in calls:
        index.removed(publisher, names)


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def _best(work: Callable[..., object], *arguments: object) -> float:
    return min(_seconds(work, *arguments) for _ in range(REPEATS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
