"""Publish the KV events of engines that store and evict without end, for a picker that is asked directly.

``python -m kvist_sim.bench.harness.churn SPEC.json``. Each engine's cache is full from the beginning, so
that the index has its size after a moment and keeps it. A fifth of what is stored is the beginning of the
prompts that the soak sends.
"""

import asyncio
import itertools
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed, Stored
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_sim import model as model_files
from kvist_sim.load import CHAT_PATH
from kvist_sim.publisher import Publisher, PublisherConfig
from kvist_sim.workloads import text

BLOCK_SIZE: Final = 16
SYSTEMS: Final = 64
SYSTEM_WORDS: Final = 220
FILLERS: Final = 512
"""Number of unrelated texts; hashes distinguish their copies."""
KEPT: Final = 400
"""Number of chains in each engine's cache."""
WARM_SHARE: Final = 0.2
TICK_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Text:
    """Token blocks of one text."""

    tokens: list[int]
    hashes: list[int] | None
    """Hashes of the blocks; None for new ones each time the text is stored."""


def system(number: int) -> str:
    """Return one of the ``SYSTEMS`` shared prefixes."""
    return text(random.Random(f"soak system {number}"), SYSTEM_WORDS)


SYSTEM_TEXTS: Final = tuple(map(system, range(SYSTEMS)))


def body(number: int, question: str) -> bytes:
    """Return a chat of two messages that begins with system prompt ``number``."""
    messages = [
        {"role": "system", "content": SYSTEM_TEXTS[number % SYSTEMS]},
        {"role": "user", "content": question},
    ]
    request = {"model": "soak", "max_tokens": 16, "messages": messages}
    return json.dumps(request, separators=(",", ":")).encode()


def texts(model: Model) -> tuple[list[Text], list[Text]]:
    """Return the texts that are stored: prefixes of the prompts, and fillers."""
    rng = random.Random("soak hashes")
    warm = []
    for number in range(SYSTEMS):
        tokens = _whole(model, number)
        warm.append(Text(tokens, [rng.getrandbits(64) for _ in range(len(tokens) // BLOCK_SIZE)]))
    length = len(warm[0].tokens)
    source = random.Random("soak fillers")
    fillers = [Text((model.encode(text(source, 2 * SYSTEM_WORDS)))[:length], None) for _ in range(FILLERS)]
    return warm, fillers


def _whole(model: Model, number: int) -> list[int]:
    """Token ids of what all prompts of one system have in common, whole blocks."""
    one, other = (model.prompts(parse(CHAT_PATH, body(number, end)))[0] for end in ("x", "y"))
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
    tokens = model.encode(one[:common].decode())
    return tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]


def batches(warm: Sequence[Text], fillers: Sequence[Text], seed: int) -> Iterator[Batch]:
    """Yield one engine's events: a chain is stored, and once the cache is full the oldest one is evicted."""
    rng = random.Random(seed)
    held: deque[list[int]] = deque()
    while True:
        chosen = rng.choice(warm if rng.random() < WARM_SHARE else fillers)
        count = len(chosen.tokens) // BLOCK_SIZE
        hashes = chosen.hashes or [rng.getrandbits(64) for _ in range(count)]
        events: list[Event] = []
        if len(held) == KEPT:
            events.append(Removed(hashes=held.popleft()[::-1]))
        if hashes not in held:
            held.append(hashes)
            events.append(Stored(hashes=hashes, parent=None, token_ids=chosen.tokens, block_size=BLOCK_SIZE))
        yield Batch(ts=0.0, rank=0, events=events)


async def publish(spec: dict[str, Any], ready: Callable[[], object]) -> None:
    """Fill every cache, call ``ready``, then store ``rate`` blocks per second in all until cancelled."""
    warm, fillers = texts(Model.load(str(model_files.folder())))
    publishers = [
        Publisher(PublisherConfig(endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}"))
        for events, replay in spec["sockets"]
    ]
    engines = [(p, batches(warm, fillers, number)) for number, p in enumerate(publishers)]
    for publisher, endless in engines:
        for batch in itertools.islice(endless, KEPT):
            publisher.publish(batch)
    ready()
    blocks = len(warm[0].tokens) // BLOCK_SIZE
    clock = asyncio.get_running_loop().time
    begin, sent = clock(), 0
    for publisher, endless in itertools.cycle(engines):
        publisher.publish(next(endless))
        sent += blocks
        ahead = begin + sent / spec["rate"] - clock()
        if ahead > TICK_SECONDS:
            await asyncio.sleep(ahead)


def main(file: Path) -> None:
    """Run on a specification file until killed."""
    spec = json.loads(file.read_text())
    asyncio.run(publish(spec, ready=Path(spec["ready"]).touch))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
