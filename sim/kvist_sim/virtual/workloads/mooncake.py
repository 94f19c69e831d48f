"""Trace files in Mooncake's format, with text made up from their block ids.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids``: one
number for each 512 tokens of the prompt, the last for what is left. Equal numbers mean equal tokens and equal
beginnings before them (Mooncake, FAST 2025, section "trace release"). The files are the user's; what was said
is not in them, so answers are never part of a later prompt unless their numbers say so.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from kvist_sim.virtual.jobs import BLOCK, BLOCK_BYTES, HASH_BITS, Passage
from kvist_sim.virtual.policy import BYTES_PER_TOKEN
from kvist_sim.virtual.traffic import Burst, Session, Shape, answer

TRACE_BLOCK: Final = 512
"""Tokens for which one id stands."""
_FULL: Final = TRACE_BLOCK // BLOCK


class Line(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> list[Line]:
    """The requests in order of time. Raises ``ValueError`` naming the line that is none."""
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if text.strip():
            try:
                lines.append(msgspec.json.decode(text, type=Line))
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise ValueError(f"{path} has no requests")
    return sorted(lines, key=lambda line: line.timestamp)


def trace(path: Path) -> Shape:
    """Return the requests of a trace in order, repeated when it ends; the rate follows the load, the pattern
    of the pauses is the trace's."""
    lines = read(path)

    def bursts(_shared: Random) -> Iterator[Burst]:
        while True:
            for line in lines:
                yield [_asks(line)]

    return Shape(
        name=path.stem,
        summary=f"trace of {len(lines)} requests",
        bursts=bursts,
        requests=1.0,
        gaps=_gaps(lines),
        ttft=5.0,
    )


def prompt(line: Line) -> Passage:
    """Text of the right length in which equal ids are equal bytes."""
    pieces = [_piece(name) for name in line.hash_ids]
    text = b"".join(text for _, text in pieces)[: line.input_length * BYTES_PER_TOKEN]
    tokens = len(text) // BYTES_PER_TOKEN
    hashes = [name for names, _ in pieces for name in names]
    return Passage(tokens, hashes[: tokens // BLOCK], text)


def _piece(name: int) -> tuple[list[int], bytes]:
    random = Random(name)
    hashes = [random.getrandbits(HASH_BITS) for _ in range(_FULL)]
    return hashes, random.randbytes(_FULL * BLOCK_BYTES)


def _asks(line: Line) -> Callable[[Random], Session]:
    def session(random: Random) -> Session:
        yield answer(prompt(line), max(1, line.output_length), random)

    return session


def _gaps(lines: list[Line]) -> Callable[[Random, float], Iterator[float]]:
    """Seconds between arrivals at so many a second."""
    pauses = [max(0.0, later.timestamp - earlier.timestamp) for earlier, later in pairwise(lines)] or [1.0]
    mean = list(accumulate(pauses))[-1] / len(pauses) or 1.0

    def gaps(_random: Random, rate: float) -> Iterator[float]:
        while True:
            for pause in pauses:
                yield pause / mean / rate

    return gaps
