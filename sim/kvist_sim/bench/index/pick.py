"""``python -m kvist_sim.bench.index.pick``: CPU of a pick when many endpoints hold a long prompt.

One prompt of 32,768 tokens (131 KB) that every endpoint holds whole, each with 30 requests on their way;
CPU of the look-up in index and history, and of the policy, apart. Times are the best of several rounds.
"""

import argparse
import platform
from collections.abc import Callable, Sequence
from time import process_time
from typing import Final

from rich.console import Console
from rich.table import Table

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Found, Lookup, Member
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.scheduling.pick import Candidate, Demand, choose
from kvist_sim.bench.index.data import BLOCK_SIZE, ROOT, Chain, chain

TOKENS: Final = 32_768
ENDPOINTS: Final = (1, 10, 100, 1000)
RUNNING: Final = 30
"""Requests on each endpoint, every other one with half of its prompt to prefill."""
ROUNDS: Final = 7
CALLS: Final = 100


class WarmPool:
    """Endpoints that are all warm and busy."""

    def __init__(self, count: int, prompt: Chain, tpot_seconds: float) -> None:
        self._index, self._tracker = Index(), LoadTracker(tpot_seconds=tpot_seconds)
        self._lookup = Lookup(self._index, RoutingHistory())
        self._prompt = prompt.prompt
        self._candidates = [self._member(number, prompt) for number in range(count)]

    def _member(self, number: int, prompt: Chain) -> Candidate:
        address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        endpoint = Endpoint(f"engine-{number}", "pool", address, 8000, {})
        publisher = self._index.publisher(f"{endpoint.key}/0")
        prompt.store(self._index, publisher)
        self._lookup.join(endpoint.key, Member((publisher,), block_size=BLOCK_SIZE))
        for at in range(RUNNING):
            request = InFlightRequest(f"{number}-{at}", 1000)
            self._tracker.add(request, endpoint.key, at % 2 * 500, 0.0)
        load = self._tracker.load(endpoint.key)
        load.slots = 256
        return Candidate(endpoint, load)

    def look(self) -> Found:
        """Return the blocks that each endpoint holds."""
        return self._lookup.look(ROOT, [self._prompt])

    def choose(self, found: Found, turn: int) -> None:
        """Choose the best three endpoints, as a pick does."""
        choose(self._candidates, Demand(found.tokens, found.hits), now=0.0, turn=turn, max_backlog=1e9)


def measure(count: int, prompt: Chain, tpot_seconds: float) -> tuple[float, float]:
    """Microseconds of CPU of a look-up, and of the policy."""
    pool = WarmPool(count, prompt, tpot_seconds)
    calls = max(CALLS // count, 5) if count > CALLS else CALLS
    found = pool.look()
    assert len(found.hits) == count, "every endpoint holds the prompt"
    return _best(lambda _: pool.look(), calls), _best(lambda turn: pool.choose(found, turn), calls)


def _best(call: Callable[[int], object], calls: int) -> float:
    return min(_once(call, calls) for _ in range(ROUNDS)) / calls * 1e6


def _once(call: Callable[[int], object], calls: int) -> float:
    began = process_time()
    for turn in range(calls):
        call(turn)
    return process_time() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each number of endpoints."""
    parser = argparse.ArgumentParser(prog="python -m kvist_sim.bench.index.pick", description=__doc__)
    parser.add_argument("--endpoints", type=int, nargs="+", default=ENDPOINTS, metavar="N")
    parser.add_argument(
        "--tpot-target", type=float, default=0.0, metavar="SECONDS", help="as kvist-epp's (default: none)"
    )
    asked = parser.parse_args(argv)
    prompt = chain("warm", TOKENS // BLOCK_SIZE)
    table = Table(title=f"us of CPU, Python {platform.python_version()}", box=None)
    for title in ("endpoints", "look-up", "policy", "both"):
        table.add_column(title, justify="right")
    for count in asked.endpoints:
        look, policy = measure(count, prompt, asked.tpot_target)
        table.add_row(f"{count:,}", f"{look:,.0f}", f"{policy:,.0f}", f"{look + policy:,.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
