"""Traces of a running picker: every input of its decisions with its time, and what was decided.

``python -m kvist_sim.virtual.decision_trace FILE --flag …`` runs ``kvist-epp`` with these flags and records
FILE. The recorder wraps the methods through which the product's objects learn anything: arrivals, polls of
the queue, KV events as they reach the index, scrapes, access-log entries, updates of other replicas, ticks.
``replay`` feeds the same inputs, at their times, to the objects as the virtual world makes them
(``ours.Kvist``), and compares each request's endpoint, cost terms and queue outcome. Only calls from outside
are inputs: a method that another recorded one calls is part of its effect.
"""

import copyreg
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO, Final

import msgspec

from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.director import Director
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.request_progress import RequestProgress
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.errors import KvistError
from kvist_epp.flowcontrol.flow_controller import FlowController, Poll, QueuedRequest
from kvist_epp.http2.call import NO_TRACE_HEADERS, UNKNOWN_PEER
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.prompt.model import Model
from kvist_epp.replicas.load_server import FollowerCall, LoadServer
from kvist_epp.replicas.remote_load import RemoteLoad
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.request_log import RequestLine, RequestLog
from kvist_sim.virtual.index_feed import IndexFeed
from kvist_sim.virtual.ours import Kvist
from kvist_sim.virtual.policy import Context

INPUTS: Final[dict[type, tuple[str, ...]]] = {
    Director: ("offer_all", "set_other_replicas"),
    FlowController: ("poll", "cancel", "shut"),
    Poll: ("step",),
    RequestProgress: ("on_prefill_started", "on_observation"),
    CompletionHandler: ("on_access_log", "on_response"),
    EndpointRegistry: ("follow", "activate", "on_tick"),
    Scraper: ("on_answer", "_on_failure"),
    Index: ("publisher", "stored", "opaque", "held", "removed", "cleared", "forget", "leave", "sweep"),
    RemoteLoad: ("on_connected", "apply", "poll", "end_orphan"),
    LoadServer: ("start", "tick"),
    FollowerCall: ("on_message", "on_half_closed", "on_cancelled"),
}
"""Methods that are recorded when they are called from outside."""


def read_only(values: dict[Any, Any]) -> Any:
    """Return a mapping as endpoints have it; pickle knows no mapping proxies."""
    return MappingProxyType(values)


copyreg.pickle(MappingProxyType, lambda proxy: (read_only, (dict(proxy),)))


class Entry(msgspec.Struct):
    """One input of a picker's decisions."""

    kind: str
    """Class and method."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    clock: list[float] = []
    """What the clock showed each time it was read meanwhile."""
    lines: list[RequestLine] = []
    """The request log: what was decided, with the terms of the cost."""
    made: list[int] = []
    """Numbers of the queued requests, or of the poll or follower's call, that it returned."""
    publishers: list[str] = []
    """Names of all publishers, by their numbers: the subscriber, which is not replayed, numbers them."""
    precise: dict[str, bool] = {}
    """Of a tick: endpoints whose events are trusted from then on; the subscriber is not replayed."""


@dataclass(frozen=True)
class Reference:
    """A stand-in for an argument that is the picker's own object."""

    kind: str
    key: Any


class Recorder:
    """Writes the inputs of one picker to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entry: Entry | None = None
        self._numbers: dict[int, int] = {}
        """Of queued requests, polls and calls of followers, by ``id``."""
        self._kept: list[object] = []
        """The objects with numbers, so that no ``id`` is used twice."""

    def install(self) -> None:
        """Wrap the inputs, the request log and the clock of this process."""
        from kvist_epp.app import app

        vars(app)["time"] = SimpleNamespace(monotonic=self.clock, time=time.time)
        for kind, names in INPUTS.items():
            for name in names:
                setattr(kind, name, self._wrapped(kind, name, getattr(kind, name)))
        write, recorder = RequestLog.write, self

        def write_line(log: RequestLog, line: RequestLine, *, prompt: bytes = b"") -> None:
            if recorder._entry is not None:
                recorder._entry.lines.append(decided(line))
            write(log, line, prompt=prompt)

        RequestLog.write = write_line  # type: ignore[assignment,method-assign]

    def begin(self, settings: Settings) -> None:
        """Write the head of the trace."""
        pickle.dump(settings, self._file)

    def clock(self) -> float:
        """Return the time; what an input reads is part of it."""
        now = time.monotonic()
        if self._entry is not None:
            self._entry.clock.append(now)
        return now

    def _wrapped(self, kind: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if recorder._entry is not None:
                return method(self, *arguments, **keywords)
            entry = Entry(
                f"{kind.__name__}.{name}",
                (recorder._owner(self), *(() if name == "activate" else map(recorder._plain, arguments))),
                keywords,
            )
            if kind is Director and name == "offer_all":
                entry.keywords = {"replica": self.replica}
            recorder._entry = entry
            try:
                result = method(self, *arguments, **keywords)
                entry.made = [recorder._number(one) for one in made(result)]
                return result
            finally:
                if kind is EndpointRegistry and name != "on_tick":
                    entry.publishers = publishers(self)
                recorder._entry = None
                if entry.kind == "EndpointRegistry.on_tick":
                    entry.precise = {k: m.precise for k, m in self.director.lookup.members.items()}
                recorder._write(entry)

        return call

    def _write(self, entry: Entry) -> None:
        pickle.dump(entry, self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def _number(self, made: object) -> int:
        self._kept.append(made)
        number = self._numbers[id(made)] = len(self._kept)
        return number

    def _owner(self, owner: object) -> Reference | None:
        number = self._numbers.get(id(owner))
        return None if number is None else Reference(type(owner).__name__, number)

    def _plain(self, argument: Any) -> Any:
        if isinstance(argument, EngineState):
            return Reference("EngineState", argument.endpoint.key)
        if isinstance(argument, QueuedRequest):
            return Reference("QueuedRequest", self._numbers[id(argument)])
        return argument if picklable(argument) else Reference(type(argument).__name__, None)


def made(result: Any) -> list[QueuedRequest | Poll | FollowerCall]:
    """Return the objects that an input returned and that later inputs name."""
    results = result if isinstance(result, list) else [result]
    return [one for one in results if isinstance(one, QueuedRequest | Poll | FollowerCall)]


def publishers(registry: EndpointRegistry) -> list[str]:
    """Return the names of all publishers of the endpoints, by their numbers in the index."""
    names = [source.publisher for endpoint in registry.fleet or () for source in endpoint.sources]
    return sorted(names, key=registry.director.index.publisher)


def picklable(argument: Any) -> bool:
    """Return whether a trace keeps the argument itself."""
    try:
        pickle.dumps(argument)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True


def decided(line: RequestLine) -> RequestLine:
    """Return what a replay has to decide alike: all of the line but what it cost to decide."""
    return msgspec.structs.replace(line, us={}, text=None)


def entries(path: Path) -> Iterator[Any]:
    """Yield the settings of a trace, then its inputs."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


@dataclass
class Comparison:
    """The result of a replay."""

    inputs: int = 0
    requests: int = 0
    """Lines of the request log that were compared."""
    queued: int = 0
    """Those of requests that had waited."""
    differences: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    """Inputs by kind."""


class KeptLines(RequestLog):
    """Keeps the lines instead of writing them."""

    def __init__(self) -> None:
        self.enabled = True
        self.lines: list[RequestLine] = []

    def write(self, line: RequestLine, *, prompt: bytes = b"") -> None:  # noqa: ARG002
        """Keep the line."""
        self.lines.append(decided(line))


class NoSink:
    """Takes what is sent to followers."""

    trace_headers = NO_TRACE_HEADERS
    from_envoy = False
    peer = UNKNOWN_PEER

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Drop it; see ``http2.call.Sink``."""

    def close(self, status: int = 0, message: str = "") -> None:
        """Drop it; see ``http2.call.Sink``."""


class Replay:
    """The product's objects as virtual time makes them, fed from a trace."""

    def __init__(self, settings: Settings, replica: str, model: Model | None) -> None:
        self._clock: list[float] = []
        self._model = model
        self._log = KeptLines()
        feed = IndexFeed()
        context = Context(
            Random(0),
            _NoOverlaps(),
            prefill_rate=settings.prefill_tokens_per_second,
            max_num_seqs=settings.max_num_seqs or 0,
            block_size=16,
            after=lambda _seconds, _what, _about: None,
            clock=self._now,
            feed=feed,
        )
        self.kvist = Kvist(context, settings, log=self._log, replica=replica, scrape_interval=inf)
        director = self.kvist.director
        director.lookup.remote_prefixes = self.kvist.remote_load.prefixes.match
        director.tracker.add_listener(self.kvist.load_server)
        assert director.flow is not None, "it has limits"
        self._made: dict[int, Any] = {}
        self._owners: dict[str, Any] = {
            "Director": director,
            "RequestProgress": director.progress,
            "FlowController": director.flow,
            "CompletionHandler": self.kvist.completion,
            "EndpointRegistry": self.kvist.registry,
            "Scraper": self.kvist.registry.scraper,
            "Index": director.index,
            "RemoteLoad": self.kvist.remote_load,
            "LoadServer": self.kvist.load_server,
        }

    def feed(self, entry: Entry) -> list[RequestLine]:
        """Make one input; return what was decided. Raises IndexError if the clock is read more often."""
        self._log.lines = []
        self._clock = list(entry.clock)
        kind, _, name = entry.kind.partition(".")
        owner, *arguments = entry.arguments
        target = self._owners[kind] if owner is None else self._made[owner.key]
        for publisher in entry.publishers:
            self.kvist.director.index.publisher(publisher)
        if entry.kind == "EndpointRegistry.on_tick":
            self.kvist.director.on_tick(self._now())
            for key, precise in entry.precise.items():
                self.kvist.director.lookup.set_precise(key, precise=precise)
        elif entry.kind == "EndpointRegistry.activate":
            assert self._model is not None, "the trace is of a picker with a model"
            ingestor = Ingestor(self.kvist.director.index, self._model)
            self.kvist.registry.activate(self._model, ingestor, None)
        else:
            keywords = {} if kind == "Director" else entry.keywords
            self._keep(entry, getattr(target, name)(*map(self._own, arguments), **keywords))
        return self._log.lines

    def _keep(self, entry: Entry, result: Any) -> None:
        found = made(result)
        if len(found) != len(entry.made):
            raise LookupError(f"{len(found)} requests wait, and {len(entry.made)} did in the trace")
        self._made.update(zip(entry.made, found, strict=True))

    def _own(self, argument: Any) -> Any:
        if not isinstance(argument, Reference):
            return argument
        if argument.kind == "EngineState":
            return self.kvist.registry.scraper.states[argument.key]
        if argument.kind == "QueuedRequest":
            return self._made[argument.key]
        return NoSink()

    def _now(self) -> float:
        return self._clock.pop(0)


class _NoOverlaps:
    def match(self, blocks: Sequence[int], pods: Sequence[Any]) -> list[int]:  # noqa: ARG002
        raise LookupError("a replay has no world")

    def lower(self, blocks: Sequence[int], pods: Sequence[Any], held: Sequence[int]) -> list[dict[str, int]]:  # noqa: ARG002
        raise LookupError("a replay has no world")


def replay(path: Path, fault: Callable[[int, Entry], bool] = lambda _number, _entry: False) -> Comparison:
    """Replay a trace and compare. ``fault``: inputs (by number) that a broken driver does not make."""
    found, read = Comparison(), entries(path)
    settings: Settings = next(read)
    inputs = list(read)
    replica = next(e.keywords["replica"] for e in inputs if e.kind == "Director.offer_all")
    model = Model.load(settings.model) if settings.model else None
    driver = Replay(settings, replica, model)
    for number, entry in enumerate(inputs):
        found.inputs += 1
        found.kinds[entry.kind] = found.kinds.get(entry.kind, 0) + 1
        if fault(number, entry):
            continue
        found.requests += len(entry.lines)
        found.queued += sum(line.waited_ms > 0 for line in entry.lines)
        try:
            lines = driver.feed(entry)
        except (LookupError, KvistError) as error:
            found.differences.append(f"input {number} ({entry.kind}): {error!r}")
            return found
        if lines != entry.lines:
            found.differences.append(f"input {number} ({entry.kind}): {entry.lines} became {lines}")
    return found


def main(argv: Sequence[str]) -> None:
    """Run ``kvist-epp`` with these flags and record it; the first argument is the file."""
    from kvist_epp.app.app import main as run

    settings = Settings.from_args(list(argv[1:]))
    with Path(argv[0]).open("wb") as file:
        recorder = Recorder(file)
        recorder.begin(settings)
        recorder.install()
        run(settings)


if __name__ == "__main__":
    # recorded entries have to be of the module that replays import, not of ``__main__``
    from kvist_sim.virtual import decision_trace  # noqa: PLW0406

    decision_trace.main(sys.argv[1:])
