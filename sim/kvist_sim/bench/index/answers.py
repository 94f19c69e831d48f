"""Ingestion of blocks that engines compute in decode: each is an event of its own, and checked.

The text is the simulator's, of a few hundred words, and so is the vocabulary of 2,000 tokens: real text has
more words that have not been seen yet (decision 81 has figures of a real vocabulary).
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_epp.engines.vllm.event_encoder import encode
from kvist_epp.engines.vllm.kv_events import Batch, Event, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.decode_check import Chunks
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.prompt.model import Model
from kvist_sim import model as model_files
from kvist_sim.bench.index.data import BLOCK_SIZE
from kvist_sim.workloads import text

ENGINES: Final = 8
REQUESTS: Final = 32
"""Requests that each engine serves at once: a step of an engine fills blocks of ``STEP_BLOCKS`` of them."""
STEP_BLOCKS: Final = 8
PROMPT_BLOCKS: Final = 8
ANSWER_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The simulator's model, with its chunks or without."""

    model: Model
    chunks: Chunks | None

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of each token id."""
        return self.model.pieces

    def encode(self, text: str) -> list[int]:
        """Tokenize a text as the model does."""
        return self.model.encode(text)


def measure_answers(blocks: int) -> dict[str, float]:
    """Blocks per second taken in and credited: with the check of chunks, and with the whole check alone."""
    model = Model.load(str(model_files.folder()))
    ways = {"chunks": model.chunks, "whole_check": None}
    return {way: _rate(blocks, _Vocabulary(model, chunks)) for way, chunks in ways.items()}


def _rate(blocks: int, vocabulary: _Vocabulary) -> float:
    ingestor = Ingestor(Index(), vocabulary)
    names = [f"bench/engine-{number}/0" for number in range(ENGINES)]
    rounds = max(1, blocks // (ENGINES * REQUESTS * ANSWER_BLOCKS))
    seconds = 0.0
    for number in range(rounds):
        engines = [_messages(vocabulary, number * ENGINES + engine) for engine in range(ENGINES)]
        for name, messages in zip(names, engines, strict=True):
            ingestor.apply(name, ingestor.decode(next(messages)))
        decoded = list(zip(*engines, strict=True))
        begun = time.process_time()
        for step in decoded:
            for name, message in zip(names, step, strict=True):
                ingestor.apply(name, ingestor.decode(message))
            while ingestor.checker.step():
                pass
        seconds += time.process_time() - begun
    credited = sum(ingestor.stats(name).credited for name in names)
    assert credited == rounds * ENGINES * REQUESTS * ANSWER_BLOCKS, credited
    return credited / seconds


def _messages(vocabulary: _Vocabulary, seed: int) -> Iterator[bytes]:
    """Yield one message with the prompts of an engine's requests, then one for each of its steps."""
    source = random.Random(seed)
    count = PROMPT_BLOCKS + ANSWER_BLOCKS
    requests: list[tuple[list[int], list[int]]] = []
    while len(requests) < REQUESTS:
        ids = vocabulary.encode(text(source, count * BLOCK_SIZE))[: count * BLOCK_SIZE]
        if len(ids) == count * BLOCK_SIZE:
            requests.append(([source.getrandbits(64) for _ in range(count)], ids))
    size = PROMPT_BLOCKS * BLOCK_SIZE
    yield _message([_stored(names[:PROMPT_BLOCKS], None, ids[:size]) for names, ids in requests])
    for at in range(PROMPT_BLOCKS, count):
        for first in range(0, REQUESTS, STEP_BLOCKS):
            yield _message(
                [
                    _stored([names[at]], names[at - 1], ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
                    for names, ids in requests[first : first + STEP_BLOCKS]
                ]
            )


def _stored(names: list[int], parent: int | None, ids: list[int]) -> Event:
    return Stored(hashes=names, parent=parent, token_ids=ids, block_size=BLOCK_SIZE)


def _message(events: list[Event]) -> bytes:
    return encode(Batch(ts=0.0, rank=0, events=events))
