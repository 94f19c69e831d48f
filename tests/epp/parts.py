"""A picker with all its parts and no I/O, over engines that exist by name only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist_epp.director.director import Picker
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.pick_request import PickRequest
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup, Member
from kvist_epp.index.routing_history import History
from kvist_epp.load.in_flight import Flights
from kvist_epp.load.ledger import Ledger
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.picker_metrics import PickerMetrics
from kvist_epp.telemetry.request_log import LogWriter, RequestLine, RequestLog

MODEL = Model.load(str(Path(__file__).parents[2] / "sim" / "kvist_sim" / "model"))
CHAT = "/v1/chat/completions"
BLOCK = 16


class KeptLog(RequestLog):
    """Keeps the lines instead of writing them."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer)
        self.lines: list[RequestLine] = []

    def write(self, line: RequestLine, *, prompt: bytes = b"") -> None:
        """Keep it."""
        self.lines.append(line)


@dataclass
class Clock:
    """Time that moves by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Parts:
    """``picker`` and what stands around it."""

    picker: Picker
    log: KeptLog
    clock: Clock
    endpoints: list[Endpoint] = field(default_factory=list)

    def warm(self, number: int, body: Mapping[str, Any], *, path: str = CHAT) -> int:
        """Endpoint ``number`` holds this request's prompt; returns the tokens of it in whole blocks."""
        [prompt] = MODEL.prompts(parse(path, json.dumps(body).encode()))
        ids = MODEL.encode(prompt.decode())
        blocks = [MODEL.vocabulary.join(ids[at : at + BLOCK]) for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        hashes = [hash((number, at, prompt)) & (1 << 64) - 1 for at in range(len(blocks))]
        publisher = self.picker.index.publisher(f"{self.endpoints[number].key}/0")
        assert self.picker.index.stored(publisher, (None, None), None, hashes, blocks, block_size=BLOCK)
        return len(blocks) * BLOCK


def make(count: int = 2, *, model: Model | None = MODEL, precise: bool = True, ranks: int = 1) -> Parts:
    """A picker over so many ready endpoints."""
    index, history, clock = Index(), History(), Clock()
    log = KeptLog(LogWriter(2))
    picker = Picker(
        model=model,
        index=index,
        history=history,
        lookup=Lookup(index, history),
        ledger=Ledger(),
        flights=Flights(),
        metrics=PickerMetrics(),
        log=log,
        clock=clock,
    )
    endpoints = [
        Endpoint(name=f"e{n}", namespace="t", address=f"10.0.0.{n + 1}", port=8000, ranks=ranks)
        for n in range(count)
    ]
    picker.candidates = tuple(Candidate(e, picker.ledger.load(e.key)) for e in endpoints)
    for e in endpoints:
        numbers = tuple(index.publisher(f"{e.key}/{rank}") for rank in range(ranks))
        picker.lookup.join(e.key, Member(numbers, precise=precise, block_size=BLOCK))
    return Parts(picker, log, clock, endpoints)


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A chat body: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **more}


def ask(body: Any, path: str = CHAT, headers: Mapping[str, str] | None = None, **more: Any) -> PickRequest:
    """What the wire hands over."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return PickRequest(
        method="POST", path=path, headers=headers or {}, body=encoded, **{"subset": None, **more}
    )
