"""Measure the resident memory of one index in a fresh process.

``python -m kvist_sim.bench.index.memory BLOCKS PUBLISHERS shared|foreign``. Resident memory is what the
operating system charges for, allocator waste included; a traced heap would leave that out.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Final

from kvist_epp.index.byte_index import Index
from kvist_sim.bench.index.data import chain

CHAIN_BLOCKS: Final = 128
"""Blocks of a prefill step of 2,048 tokens; longer chains cost less, shorter ones more."""


def resident() -> int:
    """Return the resident bytes of this process (``/proc/self/statm``, second field)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(blocks: int, publishers: int, *, foreign: bool) -> int:
    """Return the bytes by which the process grows when so many publishers hold the same distinct blocks."""
    index = Index()
    numbers = [index.publisher(f"engine-{number}/0") for number in range(publishers)]
    chains = blocks // CHAIN_BLOCKS
    _store(index, numbers, range(chains), foreign=foreign)
    before = resident()
    _store(index, numbers, range(chains, 2 * chains), foreign=foreign)
    return resident() - before


def _store(index: Index, numbers: list[int], chains: range, *, foreign: bool) -> None:
    for at in chains:
        for number in numbers:
            chain(at, CHAIN_BLOCKS, names=number if foreign else "").store(index, number)
    gc.collect()


if __name__ == "__main__":
    grown = fill(int(sys.argv[1]), int(sys.argv[2]), foreign=sys.argv[3] == "foreign")
    sys.stdout.write(json.dumps({"bytes": grown}))
