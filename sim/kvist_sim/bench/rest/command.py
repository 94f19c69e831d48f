"""Run ``kvist bench rest`` and ``kvist bench scale``."""

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_sim.bench.epp.profiler import profiles
from kvist_sim.bench.epp.revision import RevisionError
from kvist_sim.bench.harness.proof import FAILED, console, folder, prove
from kvist_sim.bench.rest import few, idle, pages, scale
from kvist_sim.bench.rest.report import (
    RestReport,
    ScaleReport,
    rest_document,
    rest_table,
    scale_document,
    scale_table,
)

SIZES: Final = (4, 100, 1_000)
QUICK_SIZES: Final = (4, 100)
SECONDS: Final = 10.0
QUICK_SECONDS: Final = 4.0
ROUNDS: Final = 3


def rest(options: argparse.Namespace) -> int:
    """Measure, print the tables, write the results; non-zero when a bound is broken."""
    say = console()
    try:
        return prove("rest", _rest(options, say), say, options, table=rest_table, document=rest_document)
    except RevisionError as failure:
        say.print(f"rest failed: {failure}", style="red", markup=False)
        return FAILED


def scaled(options: argparse.Namespace) -> int:
    """Measure, print the tables, write the results; non-zero when requests were refused."""
    say = console()
    return prove("scale", _scale(options, say), say, options, table=scale_table, document=scale_document)


async def _rest(options: argparse.Namespace, say: Console) -> RestReport:
    plan = idle.Windows(QUICK_SECONDS, 1) if options.quick else idle.Windows(SECONDS, ROUNDS)
    sizes = QUICK_SIZES if options.quick else SIZES
    baseline, profile = options.baseline or "", options.profile
    at_rest, low, read = list[idle.Idle](), list[few.Few](), list[pages.PageRead]()
    with folder(None) as place:
        if options.part in (None, "idle"):
            for kind in idle.ENGINES if options.engines is None else (options.engines,):
                at_rest += await idle.measure(
                    sizes, plan, kind=kind, baseline=baseline, folder=_new(place, kind), profile=profile
                )
                say.print(f"at rest, {kind}: done")
        if options.part in (None, "few"):
            low = await few.measure(plan, baseline=baseline, folder=place, profile=profile)
            say.print("at a low rate: done")
        if options.part in (None, "pages"):
            read = await pages.measure(baseline=baseline, folder=_new(place, "pages"))
            say.print("pages: done")
        if options.profile:
            for kind in {one.engines: None for one in at_rest}:
                names = [
                    str(one.endpoints) for one in at_rest if (one.picker, one.engines) == (idle.NOW, kind)
                ]
                for text in profiles(place / kind, names):
                    say.print(kind, text, markup=False)
            for text in profiles(place, ["few"][: len(low)]):
                say.print(text, markup=False)
    return RestReport(at_rest, low, read)


def _new(place: Path, name: str) -> Path:
    (place / name).mkdir()
    return place / name


async def _scale(options: argparse.Namespace, say: Console) -> ScaleReport:
    found = []
    with folder(None) as place:
        for count in options.replicas:
            found.append(
                await scale.measure(count, seconds=options.seconds, folder=_new(place, f"replicas-{count}"))
            )
            say.print(f"{count} replicas: done")
    return ScaleReport(found)
