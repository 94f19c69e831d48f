"""Publish and replay the KV events of twenty engines from one process.

``python -m kvist_sim.bench.epp.publisher SPEC.json``. The blocks are of the benchmark's own prompts, as an
engine would tokenise them, so that half of the requests really match; the rest is unrelated text.
"""

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvist_epp.engines.vllm.kv_events import Batch, Stored
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_sim import model as model_files
from kvist_sim.bench.epp.prompts import WARM_SHARE, Kind, PromptShape, warm
from kvist_sim.publisher import Publisher, PublisherConfig
from kvist_sim.workloads import text

BLOCK_SIZE: Final = 16
BLOCKS_PER_EVENT: Final = 128
"""Blocks of a prefill step of 2,048 tokens."""
_FILLER_WORDS: Final = 2_000


def chains(model: Model, kinds: Sequence[Kind], blocks: int) -> Iterator[list[int]]:
    """Return token ids of the cached chains: whole blocks, ``blocks`` of them in all.

    First the beginning of each warm prompt, then filler.
    """
    left = blocks
    for tokens in itertools.chain(_warm_tokens(model, kinds), _filler(model)):
        whole = min(left, len(tokens) // BLOCK_SIZE)
        left -= whole
        yield tokens[: whole * BLOCK_SIZE]
        if left == 0:
            return


def batches(tokens: Sequence[int], hashes: Iterator[int]) -> Iterator[Batch]:
    """Yield the events of one chain, as prefill sends them: each continues the one before."""
    parent: int | None = None
    step = BLOCKS_PER_EVENT * BLOCK_SIZE
    for begin in range(0, len(tokens), step):
        piece = list(tokens[begin : begin + step])
        names = list(itertools.islice(hashes, len(piece) // BLOCK_SIZE))
        event = Stored(hashes=names, parent=parent, token_ids=piece, block_size=BLOCK_SIZE)
        yield Batch(ts=0.0, rank=0, events=[event])
        parent = names[-1]


def _warm_tokens(model: Model, kinds: Sequence[Kind]) -> Iterator[list[int]]:
    for path, body in warm(list(kinds)):
        (prompt,) = model.prompts(parse(path, body))
        tokens = model.encode(prompt.decode())
        yield tokens[: int(len(tokens) * WARM_SHARE)]


def _filler(model: Model) -> Iterator[list[int]]:
    rng = random.Random("filler")
    while True:
        yield model.encode(text(rng, _FILLER_WORDS))


async def publish(spec: dict[str, Any], ready: Callable[[], object]) -> None:
    """Bind all sockets, put all events in their rings, call ``ready``, and answer replays until cancelled."""
    publishers = [
        Publisher(PublisherConfig(endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}"))
        for events, replay in spec["sockets"]
    ]
    kinds = [Kind(size, PromptShape[shape]) for size, shape in spec["kinds"]]
    model = Model.load(str(model_files.folder()))
    hashes = itertools.count(1)
    for publisher, tokens in zip(
        itertools.cycle(publishers), chains(model, kinds, spec["blocks"]), strict=False
    ):
        for batch in batches(tokens, hashes):
            publisher.publish(batch)
    ready()
    await asyncio.Event().wait()


def main(file: Path) -> None:
    """Run on a specification file until killed."""
    spec = json.loads(file.read_text())
    asyncio.run(publish(spec, ready=Path(spec["ready"]).touch))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
