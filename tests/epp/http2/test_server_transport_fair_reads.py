"""Large pieces share the loop: a turn ends, nothing is lost, and each connection's order is kept."""

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tests.epp.http2.h2 import ECHO
from tests.epp.http2.served import channel, on_both_loops, serving

from kvist_epp.http2.server_transport import TURN_SECONDS, FairReads


class Loop:
    """Calls that are due in the next turn, made by hand."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        """In the next turn."""
        self.soon.append(callback)

    def turn(self) -> None:
        """Run one turn of the loop."""
        due, self.soon = self.soon, []
        for callback in due:
            callback()


class Bench:
    """FairReads whose clock moves as pieces are worked on."""

    def __init__(self) -> None:
        self.loop, self.now, self.done = Loop(), 0.0, list[int]()
        self.turns = FairReads(self.loop.call_soon, lambda: self.now)

    def piece(self, number: int, seconds: float) -> bool:
        """One that takes so long."""

        def work() -> None:
            self.now += seconds
            self.done.append(number)

        return self.turns.run(work)


@given(st.lists(st.lists(st.floats(0.0, 0.05), max_size=8), max_size=12))
def test_every_piece_is_done_once_in_order_and_no_turn_takes_long(floods: list[list[float]]) -> None:
    """Whatever comes in whatever turn: no turn works longer than its time and one piece."""
    bench, sent = Bench(), 0
    for flood in floods:
        begun = bench.now
        bench.loop.turn()
        for seconds in flood:
            bench.piece(sent, seconds)
            sent += 1
        assert bench.now - begun <= 2 * (TURN_SECONDS + 0.05)
    for _ in range(sent):
        bench.loop.turn()

    assert bench.done == list(range(sent))
    assert len(bench.turns) == 0


def test_a_piece_that_comes_alone_is_done_at_once() -> None:
    """A large request in peace waits for nothing."""
    bench = Bench()
    at_once = []
    for number in range(3):
        at_once.append(bench.piece(number, 2 * TURN_SECONDS))
        bench.loop.turn()

    assert at_once == [True] * 3
    assert bench.loop.soon == []


def test_a_piece_that_fails_does_not_hold_up_the_others() -> None:
    """The error of a piece goes to the event loop, and the pieces behind it have their turn."""
    bench = Bench()
    bench.piece(0, 2 * TURN_SECONDS)

    def fails() -> None:
        raise ZeroDivisionError

    assert not bench.turns.run(fails)
    bench.piece(1, 0.0)
    try:
        bench.loop.turn()
    except ZeroDivisionError:
        bench.loop.turn()

    assert bench.done == [0, 1]


@on_both_loops
async def test_floods_of_several_connections_arrive_whole() -> None:
    """Megabytes in small messages from four clients at once: every answer comes, in order."""
    messages = [b"%d" % number + bytes(2_000) for number in range(500)]
    async with serving() as bench:

        async def flood() -> list[bytes]:
            async with channel(bench) as client:
                call = client.stream_stream(ECHO)(iter(messages))
                return [bytes(answer) async for answer in call]

        answers = await asyncio.gather(*(flood() for _ in range(4)))

    assert answers == [messages] * 4
