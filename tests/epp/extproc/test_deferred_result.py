"""A decision that comes later without a task: told to its call, or cancelled with it."""

import asyncio

import pytest
from tests.epp.extproc import messages as m
from tests.epp.extproc.test_service import PICK, WHOLE, Recorder, World

from kvist_epp.errors import PickError, Shed
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import Decision, DecisionCallback, DeferredResult
from kvist_epp.names import PROCESS_METHOD


class Later(DeferredResult):
    """Tells what a test decides."""

    def __init__(self) -> None:
        self.tell: DecisionCallback | None = None
        self.cancelled = 0

    def then(self, callback: DecisionCallback) -> None:
        """Keep whom to tell."""
        self.tell = callback

    def cancel(self) -> None:
        """Count."""
        self.cancelled += 1


def _told(later: Later, decision: Decision | Exception) -> None:
    assert later.tell is not None
    later.tell(decision)


def _kinds(sink: Recorder) -> list[str | None]:
    return [pb.ProcessingResponse.FromString(sent).WhichOneof("response") for sent in sink.sent]


@pytest.mark.parametrize(
    ("decision", "kind"), [(PICK, "request_headers"), (Shed("busy"), "immediate_response")]
)
def test_a_pending_decision_is_answered_when_it_is_told(decision: Decision, kind: str) -> None:
    """A pick or a refusal; nothing is sent before, and repeated messages do not ask again."""
    later = Later()
    world = World(lambda _: later)
    call = world.call(PROCESS_METHOD)
    call.message(WHOLE)
    call.message(m.request_body(b"again"))
    call.half_closed()
    assert (world.sink.sent, world.sink.closed) == ([], [])

    _told(later, decision)
    assert (_kinds(world.sink), world.sink.closed) == ([kind], [(0, "")])
    assert later.cancelled == 0


def test_a_call_that_is_gone_cancels_its_pending_decision() -> None:
    """At once, within the call, so that nobody waits for a client that has left."""
    later = Later()
    call = World(lambda _: later).call(PROCESS_METHOD)
    call.message(WHOLE)
    call.cancelled()

    assert later.cancelled == 1


def test_a_bug_is_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    """An exception ends the call with INTERNAL, and its text goes nowhere."""
    later = Later()
    world = World(lambda _: later)
    world.call(PROCESS_METHOD).message(WHOLE)
    _told(later, RuntimeError("secret prompt"))

    assert (world.sink.sent, world.sink.closed) == ([], [(13, "the pick failed")])
    assert world.protocol_errors == [("pick-failed", 1)]
    assert "secret" not in caplog.text


async def test_a_pending_decision_can_be_awaited() -> None:
    """It gives a pick or a refusal, raises a bug; who stops waiting cancels it."""
    for decision in (PICK, Shed("busy")):
        later = Later()
        task = asyncio.ensure_future(_wait(later))
        await asyncio.sleep(0)
        _told(later, decision)
        assert await task is decision
    broken = Later()
    task = asyncio.ensure_future(_wait(broken))
    await asyncio.sleep(0)
    _told(broken, RuntimeError("bug"))
    with pytest.raises(RuntimeError):
        await task

    given_up = Later()
    task = asyncio.ensure_future(_wait(given_up))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert given_up.cancelled == 1
    _told(given_up, PICK)


async def _wait(later: Later) -> Decision:
    decision = await later
    assert not isinstance(decision, PickError) or decision.status == 429
    return decision
