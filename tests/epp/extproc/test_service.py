"""The gRPC methods on a sink that only keeps what it is given."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
from tests.epp.extproc import messages as m
from tests.fakes.deferred import deferred

from kvist_epp.errors import Shed
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import Decision, DecisionCallback, PendingResult, PickRequest, PickResult
from kvist_epp.extproc.protocol_errors import KINDS
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.http2.call import Call
from kvist_epp.http2.grpc_health import Health
from kvist_epp.names import (
    ACCESS_LOG_METHOD,
    HEALTH_CHECK_METHOD,
    HEALTH_LIST_METHOD,
    HEALTH_WATCH_METHOD,
    PROCESS_METHOD,
)

DUPLEX = m.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
WHOLE = m.request_headers(DUPLEX, end=True)
PICK = PickResult(("10.0.0.1:80",))


@dataclass
class Recorder:
    """A sink that keeps everything it gets."""

    sent: list[bytes] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    from_envoy: bool = True
    peer: str = "192.0.2.7"

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        self.sent.append(data + content)

    def close(self, status: int = 0, message: str = "") -> None:
        self.closed.append((status, message))


@dataclass
class World:
    """Every method, and what they were given and gave."""

    answer: Callable[[PickRequest], Decision | Awaitable[Decision] | PendingResult] = lambda _: PICK
    sink: Recorder = field(default_factory=Recorder)
    health: Health = field(default_factory=Health)
    ended: list[AccessLogEntry] = field(default_factory=list)
    protocol_errors: list[tuple[str, int]] = field(default_factory=list)

    def call(self, method: str) -> Call:
        table = ext_proc_methods(
            lambda request: deferred(self.answer(request)),
            self.ended.extend,
            self.health,
            on_error=lambda kind, count, _: self.protocol_errors.append((kind, count)),
        )
        return table[method](self.sink)


class Later(PendingResult):
    """A decision that the test makes."""

    def __init__(self) -> None:
        self.callback: DecisionCallback | None = None
        self.cancelled = 0

    def then(self, callback: DecisionCallback) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.cancelled += 1


def _decide(later: Later, decision: Decision | Exception) -> None:
    assert later.callback is not None
    later.callback(decision)


def _kinds(sink: Recorder) -> list[str | None]:
    return [pb.ProcessingResponse.FromString(sent).WhichOneof("response") for sent in sink.sent]


def test_a_pick_is_sent_and_the_stream_closed() -> None:
    """A decision made at once is answered within the message's own turn."""
    world = World()
    world.call(PROCESS_METHOD).on_message(WHOLE)

    assert (_kinds(world.sink), world.sink.closed) == (["request_headers"], [(0, "")])


@pytest.mark.parametrize("raised", [True, False])
def test_refusals_may_be_raised_or_returned(raised: bool) -> None:
    """A ``PickError`` is an answer, whichever way it comes."""

    def refuse(_: PickRequest) -> Decision:
        if raised:
            raise Shed("busy")
        return Shed("busy")

    world = World(refuse)
    world.call(PROCESS_METHOD).on_message(WHOLE)

    assert (_kinds(world.sink), world.sink.closed) == (["immediate_response"], [(0, "")])


async def test_an_awaited_decision_is_answered_later() -> None:
    """Nothing is sent until the decision is there; then it is as any other."""
    decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    world = World(lambda _: decision)
    call = world.call(PROCESS_METHOD)
    call.on_message(WHOLE)
    call.on_message(m.request_body(b"again"))
    assert (world.sink.sent, world.sink.closed) == ([], [])

    decision.set_result(PICK)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert (_kinds(world.sink), world.sink.closed) == (["request_headers"], [(0, "")])


async def test_an_awaited_decision_may_refuse() -> None:
    """A ``PickError`` raised by an awaited decision is an answer."""

    async def refuse(_: PickRequest) -> Decision:
        raise Shed("waited too long", retry_after=1)

    world = World(refuse)
    world.call(PROCESS_METHOD).on_message(WHOLE)
    await asyncio.sleep(0)

    assert _kinds(world.sink) == ["immediate_response"]


async def test_a_cancelled_call_cancels_its_decision() -> None:
    """A cancelled call cancels the decision it waits for, and sends nothing."""
    cancelled = asyncio.Event()

    async def wait(_: PickRequest) -> Decision:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return PICK

    world = World(wait)
    call = world.call(PROCESS_METHOD)
    call.on_message(WHOLE)
    await asyncio.sleep(0)
    call.on_cancelled()
    await cancelled.wait()

    assert (world.sink.sent, world.sink.closed, world.protocol_errors) == ([], [], [])


async def test_a_half_closed_call_is_answered() -> None:
    """A client that ended its side while the decision waits gets its answer, then the end."""
    decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    world = World(lambda _: decision)
    call = world.call(PROCESS_METHOD)
    call.on_message(WHOLE)
    call.on_half_closed()
    assert world.sink.closed == []

    decision.set_result(PICK)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert (_kinds(world.sink), world.sink.closed) == (["request_headers"], [(0, "")])


@pytest.mark.parametrize(
    ("decision", "kind"), [(PICK, "request_headers"), (Shed("busy"), "immediate_response")]
)
def test_a_deferred_decision_is_answered_when_it_is_made(decision: Decision, kind: str) -> None:
    """A deferred pick or refusal is sent when it is made, and repeated messages do not ask again."""
    later = Later()
    world = World(lambda _: later)
    call = world.call(PROCESS_METHOD)
    call.on_message(WHOLE)
    call.on_message(m.request_body(b"again"))
    call.on_half_closed()
    assert (world.sink.sent, world.sink.closed) == ([], [])

    _decide(later, decision)
    assert (_kinds(world.sink), world.sink.closed) == ([kind], [(0, "")])
    assert later.cancelled == 0


def test_a_cancelled_call_cancels_its_deferred_decision() -> None:
    """The decision is cancelled within the call, so that no request is queued for a client that has left."""
    later = Later()
    call = World(lambda _: later).call(PROCESS_METHOD)
    call.on_message(WHOLE)
    call.on_cancelled()

    assert later.cancelled == 1


def test_an_exception_of_a_deferred_decision_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """An exception ends the call with INTERNAL, and its text is neither sent nor logged."""
    later = Later()
    world = World(lambda _: later)
    world.call(PROCESS_METHOD).on_message(WHOLE)
    _decide(later, RuntimeError("secret prompt"))

    assert (world.sink.sent, world.sink.closed) == ([], [(13, "the pick failed")])
    assert world.protocol_errors == [("pick-failed", 1)]
    assert "secret" not in caplog.text


def test_a_call_that_ends_without_a_question_is_closed() -> None:
    """A client that ends its side before its body has ended gets the end, and no question is asked."""
    world = World()
    call = world.call(PROCESS_METHOD)
    call.on_message(m.request_headers(DUPLEX))
    call.on_half_closed()

    assert (world.sink.sent, world.sink.closed) == ([], [(0, "")])


async def test_bugs_of_the_picker_end_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """An exception at once or awaited ends its call with INTERNAL; its text goes nowhere."""

    async def later(ask: PickRequest) -> Decision:
        raise KeyError(ask.path)

    def now(ask: PickRequest) -> Decision:
        raise KeyError(ask.path)

    for answer in (later, now):
        world = World(answer)
        world.call(PROCESS_METHOD).on_message(WHOLE)
        await asyncio.sleep(0)

        assert world.sink.closed == [(13, "the pick failed")]
        assert world.protocol_errors == [("pick-failed", 1)]
    assert "KeyError" in caplog.text
    assert "completions" not in caplog.text


def test_undecodable_messages_are_refused_and_counted() -> None:
    """Bytes that are no message end the call with INVALID_ARGUMENT, with a length and no content."""
    world = World()
    world.call(PROCESS_METHOD).on_message(b"\xffsecret")

    assert world.sink.closed == [(3, "ext_proc message of 7 bytes cannot be decoded")]
    assert world.protocol_errors == [("ext-proc-message", 1)]


def test_access_logs_are_passed_on_and_never_answered_early() -> None:
    """Entries are passed on, garbage counted, and the one answer comes when Envoy ends its side."""
    world = World()
    call = world.call(ACCESS_LOG_METHOD)
    for message in (b"\xff", b"\x12\x06\x0a\x01\xff\x0a\x01\xff", b"\x12\x02\x0a\x00", b"\x0a\x00"):
        call.on_message(message)
    assert world.sink.closed == []
    call.on_half_closed()

    assert world.ended == [AccessLogEntry(None, None, None, 0)]
    assert world.protocol_errors == [("access-log-message", 1), ("access-log-entry", 2)]
    assert (world.sink.sent, world.sink.closed) == ([b""], [(0, "")])


def test_protocol_errors_are_declared() -> None:
    """Every protocol error that can be counted has a declared name."""
    world = World(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    world.call(PROCESS_METHOD).on_message(WHOLE)
    world.call(PROCESS_METHOD).on_message(b"\xff")
    world.call(ACCESS_LOG_METHOD).on_message(b"\xff")
    world.call(ACCESS_LOG_METHOD).on_message(b"\x12\x03\x0a\x01\xff")

    assert {name for name, _ in world.protocol_errors} == set(KINDS)


def test_checks_answer_and_end() -> None:
    """A check of a known name answers and closes; of an unknown one it ends with NOT_FOUND."""
    world = World()
    world.call(HEALTH_CHECK_METHOD).on_message(b"\x0a\x08liveness")
    world.call(HEALTH_CHECK_METHOD).on_message(b"\x0a\x06nobody")
    world.call(HEALTH_LIST_METHOD).on_message(b"")

    assert world.sink.sent == [world.health.answer("liveness"), world.health.list()]
    assert world.sink.closed == [(0, ""), (5, "unknown service"), (0, "")]


def test_a_check_without_a_request_is_refused() -> None:
    """A unary call that ends before its request is a mistake of the client's."""
    world = World()
    world.call(HEALTH_CHECK_METHOD).on_half_closed()

    assert world.sink.closed == [(13, "ended without a request")]


def test_a_watch_outlives_its_request() -> None:
    """A watch goes on after the client ended its side, and stops when the client leaves."""
    world = World()
    call = world.call(HEALTH_WATCH_METHOD)
    call.on_message(b"")
    call.on_half_closed()
    world.health.set(True)
    call.on_cancelled()
    world.health.set(False)

    assert (len(world.sink.sent), world.sink.closed) == (2, [])
