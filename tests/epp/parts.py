"""A picker with all its parts and no I/O, over engines that exist by name only."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist_epp.admin.debug_pages import pick_document
from kvist_epp.director.director import Director
from kvist_epp.director.explanation import explain_request
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.pick_request import Effect, PickRequest, PickResult
from kvist_epp.flowcontrol.flow_controller import FlowLimits, QueuedRequest
from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.load.in_flight import InFlightRequest, RequestListener
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.metrics import PickerMetrics
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
        """Keep the line."""
        self.lines.append(line)


@dataclass
class Clock:
    """Time that moves by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Truths(RequestListener):
    """Keeps what engines report to have had cached."""

    def __init__(self, director: Director) -> None:
        self.said: list[tuple[InFlightRequest, int]] = []
        director.tracker.add_listener(self)

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """Keep the attempt."""
        self.said.append((request, cached))

    @property
    def by_session(self) -> list[tuple[str, int]]:
        """Return (session, cached tokens)."""
        return [(request.session, cached) for request, cached in self.said]


@dataclass
class Parts:
    """``director`` and what stands around it."""

    director: Director
    log: KeptLog
    clock: Clock
    endpoints: list[Endpoint] = field(default_factory=list)

    def decide(self, request: PickRequest) -> PickResult | QueuedRequest:
        """Offer a request now. Raises PickError."""
        found = self.director.offer(request, self.clock())
        assert not isinstance(found, Effect), "nothing is disaggregated here"
        return found

    def end(self, *sessions: str, how: str = "access-log", without_prefill: bool = False) -> None:
        """End the oldest request of each session."""
        for session in sessions:
            request = self.director.table.find(session)
            if request is not None:
                self.director.progress.on_ended(request, how, self.clock(), without_prefill=without_prefill)

    def explain(self, body: bytes, path: str = CHAT) -> dict[str, Any]:
        """Return ``/debug/pick``. Raises PickError."""
        return pick_document(explain_request(self.director, path, {}, body, self.clock()))

    def candidates(self) -> list[Candidate]:
        """Return all endpoints as they are ready."""
        return [Candidate(e, self.director.tracker.load(e.key)) for e in self.endpoints]

    def warm(self, number: int, body: Mapping[str, Any], *, path: str = CHAT, rank: int = 0) -> int:
        """Store this request's prompt for a rank of endpoint ``number``; return the tokens of it in whole
        blocks."""
        [prompt] = MODEL.prompts(parse(path, json.dumps(body).encode()))
        ids = MODEL.encode(prompt.decode())
        blocks = [MODEL.vocabulary.join(ids[at : at + BLOCK]) for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        hashes = [hash((number, rank, at, prompt)) & (1 << 64) - 1 for at in range(len(blocks))]
        index = self.director.index
        publisher = index.publisher(f"{self.endpoints[number].key}/{rank}")
        assert index.stored(publisher, (None, None), None, hashes, blocks, block_size=BLOCK)
        return len(blocks) * BLOCK


def make(
    count: int = 2,
    *,
    model: Model | None = MODEL,
    precise: bool = True,
    ranks: int = 1,
    limits: FlowLimits | None = None,
    tpot: float = 0.0,
    on_due: Callable[[], None] = lambda: None,
    listeners: Sequence[RequestListener] = (),
    clock: Clock | None = None,
    **more: Any,
) -> Parts:
    """A director over so many ready endpoints."""
    index, history, clock = Index(), RoutingHistory(), clock or Clock()
    log = KeptLog(LogWriter(2))
    director = Director(
        index=index,
        history=history,
        lookup=Lookup(index, history),
        tracker=LoadTracker(tpot_seconds=tpot, on_capacity=on_due, listeners=listeners),
        metrics=PickerMetrics(),
        log=log,
        now=clock(),
        limits=limits,
        on_due=on_due,
        model=model,
        **more,
    )
    endpoints = [
        Endpoint(name=f"e{n}", namespace="t", address=f"10.0.0.{n + 1}", port=8000, ranks=ranks)
        for n in range(count)
    ]
    parts = Parts(director, log, clock, endpoints)
    director.set_endpoints(parts.candidates(), clock())
    for e in endpoints:
        numbers = tuple(index.publisher(f"{e.key}/{rank}") for rank in range(ranks))
        director.lookup.join(e.key, Member(numbers, precise=precise, block_size=BLOCK))
    return parts


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A chat body: user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **more}


def ask(body: Any, path: str = CHAT, headers: Mapping[str, str] | None = None, **more: Any) -> PickRequest:
    """Return a pick request as the ext_proc session makes it."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return PickRequest(
        method="POST", path=path, headers=headers or {}, body=encoded, **{"subset": None, **more}
    )
