"""The self-check end to end, without sockets: picks, events learned in order, and what is compared."""

import json
from typing import Any

from tests.epp.parts import BLOCK, CHAT, MODEL, Parts, ask, chat, make

from kvist_epp.engines.vllm.kv_events import Batch, Removed, Stored
from kvist_epp.kvevents.ingestion import Ingestor, TokenText
from kvist_epp.load.in_flight import InFlightRequest, RequestListener
from kvist_epp.names import SESSION_HEADER
from kvist_epp.prompt.request import parse

LONG = "The library opens at nine and closes when the last reader has left. " * 12
KEY = "t/e0"
SOURCE = f"{KEY}/0"


class Engine(RequestListener):
    """One engine's events, ingested as they arrive, and what the picker reported of them."""

    def __init__(self, parts: Parts, model: TokenText = MODEL) -> None:
        self.told: list[tuple[int, int]] = []
        self._ingestor = Ingestor(
            parts.director.index,
            model,
            on_prefill_started=lambda publisher, endpoint, session: (
                parts.director.progress.on_prefill_started(publisher, endpoint, session, parts.clock())
            ),
        )
        self._ingestor.add_publisher(SOURCE, KEY)
        self._parts = parts
        parts.director.tracker.add_listener(self)

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """Keep it with what the index says."""
        assert request.index_compared
        self.told.append((request.indexed_tokens, cached))

    def stores(self, body: dict[str, Any], session: str, cached: int, *, blocks: int | None = None) -> None:
        """Store all but the first ``cached`` of the first ``blocks`` blocks of this prompt."""
        hashes, ids = chain(body)
        hashes, ids = hashes[:blocks], ids[: None if blocks is None else blocks * BLOCK]
        parent = hashes[cached - 1] if cached else None
        self.learn(
            Stored(
                hashes=hashes[cached:],
                parent=parent,
                token_ids=ids[cached * BLOCK :],
                block_size=BLOCK,
                session=session,
            )
        )

    def evicts(self, body: dict[str, Any], count: int) -> None:
        """Evict the last ``count`` blocks of this prompt."""
        self.learn(Removed(hashes=chain(body)[0][-count:]))

    def learn(self, event: Any) -> None:
        """Apply an event."""
        for seen in self._ingestor.apply(SOURCE, Batch(ts=0.0, events=[event])):
            self._parts.director.progress.on_observation(seen, self._parts.clock())


def chain(body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Hashes and token ids of the prompt's whole blocks."""
    [prompt] = MODEL.prompts(parse(CHAT, json.dumps(body).encode()))
    ids = MODEL.encode(prompt.decode())
    whole = len(ids) // BLOCK
    return [hash(tuple(ids[: (n + 1) * BLOCK])) & (1 << 64) - 1 for n in range(whole)], ids[: whole * BLOCK]


def test_what_happened_between_pick_and_prefill_is_no_error() -> None:
    """Blocks that came or went after the pick are in the comparison: it shows no error."""
    parts = make(1)
    engine = Engine(parts)
    body = chat(LONG)
    whole = len(chain(body)[0])
    parts.decide(ask(body, headers={SESSION_HEADER: "late"}))
    engine.stores(body, "another session", 0)
    engine.stores(body, "late", whole - 1)

    parts.decide(ask(body, headers={SESSION_HEADER: "again"}))
    engine.evicts(body, 3)
    engine.stores(body, "again", whole - 3)

    assert engine.told == [
        ((whole - 1) * BLOCK, (whole - 1) * BLOCK),
        ((whole - 3) * BLOCK, (whole - 3) * BLOCK),
    ]


def test_a_lie_shows() -> None:
    """An engine that reuses less than its events promised is found out."""
    parts = make(1)
    engine = Engine(parts)
    body = chat(LONG)
    whole = len(chain(body)[0])
    engine.stores(body, "first", 0)
    parts.decide(ask(chat(LONG, "ok", "more"), headers={SESSION_HEADER: "s"}))
    engine.stores(body, "s", 0)

    [(indexed, cached)] = engine.told
    assert cached == 0
    assert indexed >= (whole - 1) * BLOCK


def test_prompts_are_not_kept_longer_than_needed() -> None:
    """A prompt is released when its engine took it up, and when its request ended."""
    parts = make(1)
    engine = Engine(parts)
    body = chat(LONG)
    parts.decide(ask(body, headers={SESSION_HEADER: "s"}))
    parts.decide(ask(body, headers={SESSION_HEADER: "t"}))
    engine.stores(body, "s", 0)
    parts.end("t")

    assert parts.director.table.prompt_bytes == 0
