"""``kvist pools`` and ``kvist why``: what the pools of a cluster do, and why.

Both read InferencePools with the user's rights. Each returns 0, 1 if the cluster or the pool cannot be read,
or 2 for options or files that cannot be used.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from kvist_operator.errors import FleetError, SpecError
from kvist_operator.reconcile.cache_reports import figures, merge_reports, read_report

from .cluster_access import Cluster, list_pools, open_cluster, read_pool
from .errors import CommandError, CommandUsageError, NoPickerError, PickerClientError
from .picker_client import picker_of_pool
from .plan_text import print_text
from .pool_file import read_pools
from .pool_list import PoolRow, documents, row, table
from .pool_why import explanation, page

PICKER_SECONDS: Final = 5.0
"""Time limit of one pool's picker; the table does not wait longer for it."""
PARALLEL: Final = 16
"""Pools whose pickers are asked at the same time."""
FLEET: Final = "/fleet"


def pools_main(options: argparse.Namespace) -> int:
    """Print the pools of a namespace or of the whole cluster."""
    return _run(_list(options))


def why_main(options: argparse.Namespace) -> int:
    """Print what the status of a pool says, and why its engines run as they do."""
    if options.file is not None:
        return _run(_why_file(options))
    return _run(_why_cluster(options))


def _run(command: Awaitable[int]) -> int:
    async def run() -> int:
        return await command

    try:
        return asyncio.run(run())
    except CommandError as error:
        print(f"kvist: {error}", file=sys.stderr)
        return error.exit_code


async def _list(options: argparse.Namespace) -> int:
    async with open_cluster(options) as cluster:
        found = await list_pools(cluster, everywhere=options.all_namespaces)
        limit = asyncio.Semaphore(PARALLEL)
        rows = await asyncio.gather(*(_row(cluster, resource, limit) for resource in found))
    if options.output == "json":
        print_text(json.dumps({"pools": documents(rows)}, indent=2))
    elif rows:
        wide = options.output == "wide"
        print_text(table(rows, _columns(), wide=wide, namespaces=options.all_namespaces))
    else:
        where = "the cluster" if options.all_namespaces else f"namespace {cluster.namespace}"
        more = "" if options.all_namespaces else "; kvist pools -A lists those of all namespaces"
        print(f"kvist: {where} has no InferencePools{more}", file=sys.stderr)
    return 0


def _columns() -> int | None:
    """Return the width of the terminal; None, so that nothing is cut, where the output is not one."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


async def _row(cluster: Cluster, resource: Mapping[str, Any], limit: asyncio.Semaphore) -> PoolRow:
    async with limit:
        hits = await _hit_rate(cluster, resource)
    return row(resource, *hits)


class _HitRate(NamedTuple):
    share: float | None
    problem: str = ""


async def _hit_rate(cluster: Cluster, resource: Mapping[str, Any]) -> _HitRate:
    """Return the share of prompt tokens that engines found in their caches, or why it is not known.

    Any picker of the pool may answer, because the counters are the engines' own.
    """
    meta, picker = resource["metadata"], resource["spec"].get("picker") or {}
    if picker.get("mode") == "Off":
        return _HitRate(None, "the pool has no picker that counts (spec.picker.mode: Off)")
    where = Cluster(cluster.connection, meta["namespace"])
    try:
        async with asyncio.timeout(PICKER_SECONDS):
            client = await picker_of_pool(where, meta["name"])
            seen = figures(merge_reports([read_report(await client.get(FLEET))]))
    except TimeoutError:
        return _HitRate(None, f"the picker did not answer in {PICKER_SECONDS:g} s")
    except NoPickerError:
        return _HitRate(None, "no picker runs; kvist why says what the pool waits for")
    except (PickerClientError, FleetError) as error:
        # without the pool's name, so that pools with the same problem share a footnote
        return _HitRate(None, str(error).removeprefix(f"--pool {meta['namespace']}/{meta['name']}: "))
    if not seen.prompt_tokens:
        return _HitRate(None, "no prompts in the last ten minutes")
    return _HitRate(seen.cached_tokens / seen.prompt_tokens)


async def _why_cluster(options: argparse.Namespace) -> int:
    async with open_cluster(options) as cluster:
        found = explanation(await read_pool(cluster, options.pool or ""))
    _show([found], options.output)
    return 0


async def _why_file(options: argparse.Namespace) -> int:
    where = f"--filename {options.file}"
    try:
        resources = [each.resource for each in read_pools(options.file).pools]
    except SpecError as error:
        raise CommandUsageError(str(error)) from error
    chosen = [each for each in resources if options.pool in (None, (each.get("metadata") or {}).get("name"))]
    if not chosen:
        raise CommandUsageError(f"{where}: has no pool {options.pool}")
    for each in chosen:
        if each.get("kind") != "InferencePool":
            raise CommandUsageError(f"{where}: is not an InferencePool of kvist.dev, but {each.get('kind')}")
        if not each.get("status"):
            raise CommandUsageError(
                f"{where}: has no status, which the operator writes: save the pool with kubectl get kvp NAME "
                "-o yaml, or see what would run with kvist plan -f"
            )
    _show([explanation(each) for each in chosen], options.output)
    return 0


def _show(found: Sequence[Mapping[str, Any]], output: str) -> None:
    """Print explanations: one as it is, several as a list or one page after the other."""
    if output == "json":
        print_text(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return
    now, heading = datetime.now(UTC), _bold if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else str
    print_text("\n\n\n".join(page(each, now, heading) for each in found))


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"
