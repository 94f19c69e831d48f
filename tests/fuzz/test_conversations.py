"""Any conversation, correct, mutilated or absurd, leaves the connection sound (``conversation.py``)."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.epp.http2.h2 import data, grpc_fields, message
from tests.fuzz.conversation import KNOWN, LIMITS, PATHS, Conversation

from kvist_epp.http2 import frames as f

known = st.integers(0, 3)
sizes = st.integers(0, 300) | st.integers(0, 30_000)
arriving = st.just(255) | st.integers(0, 255)
increments = st.integers(1, 100) | st.integers(1, 70_000)
PING = f.frame(f.PING, 0, f.CONNECTION, bytes(8))
anywhere = known | st.integers(KNOWN, KNOWN + 20) | st.integers(KNOWN, KNOWN + f.LARGEST_STREAM)
payloads = st.binary(max_size=50) | st.integers(0, 20_000).map(bytes)
settings_frames = st.tuples(st.integers(0, 8), st.integers(0, (1 << 32) - 1)).map(
    lambda pair: f.settings(dict([pair]))
)
any_frames = st.builds(
    lambda kind, flags, stream, payload: f.frame(kind, flags, stream.to_bytes(4, "big"), payload),
    st.integers(0, 11),
    st.integers(0, 255),
    st.integers(0, 20) | st.integers(0, f.LARGEST_STREAM),
    payloads,
)


def damaged(at: int, bit: int) -> bytes:
    """A whole valid call with one bit wrong."""
    block = b"".join(f.literal(name.encode(), value.encode()) for name, value in grpc_fields(PATHS[0]))
    head = f.frame(f.HEADERS, f.END_HEADERS, (101).to_bytes(4, "big"), block)
    call = bytearray(head + data(101, message(b"hello"), ends=True))
    call[at % len(call)] ^= 1 << bit
    return bytes(call)


absurd = (
    any_frames
    | settings_frames
    | st.binary(max_size=60)
    | st.builds(damaged, st.integers(0, 400), st.integers(0, 7))
)


class Anything(RuleBasedStateMachine):
    """The steps of a conversation in any order; when one is over, another begins."""

    def __init__(self) -> None:
        super().__init__()
        self._talk = Conversation()

    @property
    def talk(self) -> Conversation:
        """The one that goes on."""
        if self._talk.over:
            self._talk.end()
            self._talk = Conversation()
        return self._talk

    @rule(path=st.integers(0, 2) | st.integers(0, len(PATHS)), ends=st.booleans())
    def open(self, path: int, ends: bool) -> None:
        """A call begins."""
        self.talk.open(0, path, f.END_STREAM if ends else 0)

    @rule(stream=known, size=sizes, missing=st.just(0) | sizes, ends=st.booleans())
    def say(self, stream: int, size: int, missing: int, ends: bool) -> None:
        """A message, or the better part of it."""
        self.talk.say(stream, size, min(missing, size + 5), ends)

    @rule(stream=known, increment=increments)
    def widen(self, stream: int, increment: int) -> None:
        """A stream's window opens."""
        self.talk.frame(f.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))

    @rule(increment=increments)
    def widen_all(self, increment: int) -> None:
        """The connection's window opens."""
        self.talk.feed(f.window_update(f.CONNECTION, increment))

    @rule(value=st.integers(0, 100) | st.integers(0, 100_000))
    def resize(self, value: int) -> None:
        """All windows change."""
        self.talk.feed(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: value}))

    @rule(stream=known)
    def reset(self, stream: int) -> None:
        """A call is given up."""
        self.talk.frame(f.RST_STREAM, 0, stream, bytes(4))

    @rule(stream=known, flags=st.sampled_from([0, f.END_STREAM]))
    def trail(self, stream: int, flags: int) -> None:
        """Trailers, perhaps without the end that belongs to them."""
        self.talk.frame(f.HEADERS, flags | f.END_HEADERS, stream, f.literal(b"x", b"y"))

    @rule(sent=st.integers(0, 5).flatmap(lambda luck: st.just(PING) if luck else absurd), whole=arriving)
    def misbehave(self, sent: bytes, whole: int) -> None:
        """Now and then any frame, any setting, a damaged call or no frames at all; a part may be late."""
        self.talk.feed(sent, whole)

    @rule(choice=anywhere, flags=st.integers(0, 255), extra=st.binary(max_size=20), luck=st.integers(0, 5))
    def open_oddly(self, choice: int, flags: int, extra: bytes, luck: int) -> None:
        """Now and then headers on any stream, with flags and bytes that may not belong there."""
        if not luck:
            self.talk.open(choice, 0, flags, extra)

    @rule(which=st.integers(0, 20), size=sizes)
    def answer(self, which: int, size: int) -> None:
        """A call sends something."""
        self.talk.answer(which, size)

    @rule(which=st.integers(0, 20), status=st.integers(0, 16))
    def close(self, which: int, status: int) -> None:
        """A call ends."""
        self.talk.close(which, status)

    @rule(most=sizes)
    def take(self, most: int) -> None:
        """The socket takes something."""
        self.talk.take(most)

    @rule(beyond=st.just(0) | sizes)
    def park(self, beyond: int) -> None:
        """The socket is full."""
        self.talk.park(beyond)

    @rule(seconds=st.floats(0, LIMITS.stall_seconds) | st.just(LIMITS.stream_idle_seconds))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.talk.wait(seconds)

    @rule(luck=st.integers(0, 5))
    def drain(self, luck: int) -> None:
        """Now and then the server goes."""
        if not luck:
            self.talk.drain()

    def teardown(self) -> None:
        """The connection is lost."""
        self.talk.end()


TestAnything: Any = Anything.TestCase
TestAnything.settings = settings(deadline=None, max_examples=80, stateful_step_count=50)
