"""One more block of an answer: applied the short way, or as all other events are."""

from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple
from tests.fakes.learning import SIZE, Learning, stored
from tests.fakes.vocabulary import word

from kvist_epp.engines.vllm.kv_events import Cleared, Event, Removed, Stored
from kvist_epp.kvevents.decode_blocks import DecodeBlock
from kvist_epp.kvevents.decode_check import DecodeChecker
from kvist_epp.kvevents.observation import RecentSessions
from kvist_epp.kvevents.publisher_state import PublisherState

HEL, LO = word(b" hel"), word(b"lo")
UNKNOWN = 264
"""The id without a token."""
PICTURE = 265
SESSIONS = (None, "s", "t")


class AllBut:
    """Says of blocks that they are canonical unless they have this token."""

    def __init__(self, doubtful: int) -> None:
        self.doubtful = doubtful

    def canonical(self, ids: Sequence[int], *, behind: bytes, before: Sequence[int] = ()) -> bool:
        """Return whether the token is not among them."""
        return self.doubtful not in ids


class LongWay(DecodeChecker):
    """Appends nothing, so that every event goes the long way."""

    def append(self, publisher: PublisherState, parent: DecodeBlock, block: DecodeBlock) -> bool:
        """Leave the block to ``add``."""
        return False


def unusual_blocks(name: int, parent: int | None) -> list[Stored]:
    """Return blocks of an answer, of a new hash, that are not as usual."""
    ids = [97] * SIZE
    return [
        stored([name], parent, [*ids[1:], UNKNOWN]),
        stored([name], parent, [*ids[1:], PICTURE]),
        stored([name], parent, ids, media=((1, "picture"),)),
        stored([name], parent, ids, opaque_from=0),
        stored([name], parent, ids, group=1),
        stored([name], parent, ids, group=0, kind="full_attention"),
        stored([name], parent, ids, kind="sliding_window", window=8),
        stored([name], parent, ids, kind="new_attention"),
        stored([name], parent, ids[1:]),
        stored([name, 10_000 + name], parent, ids, size=SIZE),
        stored([name], parent, ids * 2, size=2 * SIZE),
        stored([name], parent, ids, medium="CPU"),
        stored([name], parent, [], medium="CPU", size=0),
        stored([name], parent, ids, medium="STORAGE"),
        stored([name + 1], name, ids),
        stored([name], parent, ids, salt="salt"),
        stored([name], parent, ids, lora="adapter"),
        stored([name], name, ids),
        stored([name], parent, [*ids[1:], HEL]),
    ]


class Twins:
    """Two pickers that get the same events of one engine; the second one applies all of them the long way."""

    def __init__(self) -> None:
        self.twins = (Learning(chunks=AllBut(HEL)), Learning(chunks=AllBut(HEL)))
        self.twins[1].ingestor.checker.__class__ = LongWay
        self.paths: list[list[tuple[int, bytes]]] = [[], []]
        """Names and texts of the blocks of two conversations."""
        self.known: list[int] = []
        self.number = 0

    def send(self, *events: Event) -> None:
        """Send one message to both, which must tell the same of requests."""
        seen = [twin.send(*events) for twin in self.twins]
        assert seen[0] == seen[1]

    def names(self, count: int) -> list[int]:
        """Return new hashes."""
        self.number += count
        return list(range(self.number - count + 1, self.number + 1))

    def parent(self, at: int) -> int | None:
        """Return the hash of the last block of a conversation."""
        return self.paths[at][-1][0] if self.paths[at] else None

    def apply(self, kind: str, at: int, choice: int) -> None:
        """Apply one event; ``choice`` is of what the kind leaves open."""
        if kind in {"prompt", "answer", "doubtful", "again"}:
            for _ in range(1 + choice % 4 if kind == "answer" else 1):
                self.go_on(kind, at, choice)
        elif kind in {"routed", "time", "checked"}:
            for twin in self.twins:
                self.pass_time(twin, kind, SESSIONS[choice % 3])
        elif kind == "other":
            self.send(self.unusual(choice, self.parent(at)))
        else:
            self.change(kind, at, choice)

    def go_on(self, kind: str, at: int, choice: int) -> None:
        """Send blocks that a conversation goes on with."""
        texts, ids = [b"a" * SIZE], [97] * SIZE
        if choice % 2:
            texts, ids = [b"b" * SIZE], [98] * SIZE
        names = self.names(1)
        if kind == "prompt":
            texts, ids, names = texts * 2, ids * 2, [*names, *self.names(1)]
        elif kind == "doubtful":
            texts, ids = ([b"aaa hel"], [97, 97, 97, HEL]) if choice % 2 else ([b"loaaa"], [LO, 97, 97, 97])
        elif kind == "again" and self.known:
            names = [self.known[choice % len(self.known)]]
        self.send(stored(names, self.parent(at), ids, SESSIONS[choice % 3]))
        self.paths[at] += zip(names, texts, strict=True)
        self.known += names

    def change(self, kind: str, at: int, choice: int) -> None:
        """Remove or copy blocks, or let the other conversation go on from somewhere in this one."""
        path = self.paths[at]
        if kind == "cleared" and choice < 5:
            self.send(Cleared())
            self.paths = [[], []]
        elif kind == "removed" and self.known:
            self.send(Removed(hashes=[self.known[choice % len(self.known)]]))
        elif kind == "evicted" and path:
            self.send(Removed(hashes=[path.pop()[0]]))
        elif kind == "copied" and path:
            names = [name for name, _ in path[: choice % len(path) + 1]]
            self.send(stored(names, None, [], None, medium="CPU", size=0))
        elif kind == "fork" and path:
            self.paths[1 - at] = path[: choice % len(path) + 1]

    @staticmethod
    def pass_time(twin: Learning, kind: str, session: str | None) -> None:
        """Do what happens between events."""
        if kind == "routed":
            twin.ingestor.expect(str(session), twin.source)
        elif kind == "time":
            twin.now += 121.0
            twin.ingestor.expire()
        else:
            twin.settle()

    def unusual(self, choice: int, parent: int | None) -> Stored:
        """Return a block of an answer that is not as usual, and that its conversation does not go on with."""
        name = self.names(1)[0]
        self.known.append(name)
        blocks = unusual_blocks(name, parent)
        return blocks[choice % len(blocks)]

    def compare(self) -> None:
        """Check that both know the same."""
        short, long = self.twins
        assert asdict(short.counters) == asdict(long.counters)
        assert short.index.stats() == long.index.stats()
        kept = [twin.ingestor.capture(twin.source) for twin in self.twins]
        assert kept[0].group == kept[1].group
        assert list(map(astuple, kept[0].pending)) == list(map(astuple, kept[1].pending))
        for path in self.paths:
            for count in range(len(path) + 1):
                text = b"".join(text for _, text in path[:count])
                assert short.tokens(text) == long.tokens(text)
                assert short.tokens(text, medium="CPU") == long.tokens(text, medium="CPU")
        for name in self.known:
            assert short.index.depth(name, 0) == long.index.depth(name, 0)


usual = st.sampled_from(["prompt", "answer", "answer", "answer", "answer"])
rare = st.sampled_from(
    [
        "doubtful",
        "again",
        "other",
        "removed",
        "evicted",
        "copied",
        "fork",
        "routed",
        "time",
        "checked",
        "cleared",
    ]
)
steps = st.lists(st.tuples(st.one_of(usual, usual, rare), st.integers(0, 1), st.integers(0, 29)), max_size=25)


@settings(max_examples=400)
@given(steps)
def test_the_short_way_and_the_long_one_lead_to_the_same(history: list[tuple[str, int, int]]) -> None:
    """The index, counters, blocks that are kept and what requests learn do not depend on the way."""
    twins = Twins()
    for step in history:
        twins.apply(*step)
    twins.compare()


@pytest.mark.parametrize("choice", range(len(unusual_blocks(1, None))))
def test_after_an_unusual_block_both_ways_still_lead_to_the_same(choice: int) -> None:
    """The answer goes on behind the block before it, and other blocks get its hash."""
    for again in range(8):
        twins = Twins()
        for step in (("prompt", 0, 1), ("answer", 0, 7), ("other", 0, choice), ("again", 0, again)):
            twins.apply(*step)
        twins.compare()
        for step in (("answer", 0, 7), ("evicted", 0, 0), ("copied", 0, 5), ("answer", 0, 4)):
            twins.apply(*step)
        twins.compare()


@pytest.mark.parametrize("waits", [1, 2, 3])
def test_a_request_that_goes_on_is_known_however_long_it_takes(waits: int) -> None:
    """The blocks of a request are taken for those of another one only after a pick, or a pause."""
    twins = Twins()
    twins.apply("prompt", 0, 1)
    twins.apply("answer", 0, 1)
    for _ in range(3):
        for _ in range(waits):
            twins.apply("time", 0, 0)
        twins.apply("answer", 0, 1)
    twins.apply("routed", 0, 1)
    twins.apply("answer", 0, 1)
    twins.compare()


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(
            "prompt:1 doubtful:1 answer:0 answer:1 checked:0 answer:1", id="behind a doubtful block"
        ),
        pytest.param("prompt:1 answer:1 doubtful:1 checked:0 doubtful:0 answer:1 answer:0", id="revoked"),
        pytest.param("prompt:1 answer:1 answer:2 answer:1 answer:0 answer:2", id="another request goes on"),
        pytest.param("prompt:1 answer:7 removed:3 answer:1 answer:1", id="the parent was removed"),
        pytest.param("prompt:1 answer:7 copied:5 answer:7 evicted:0 answer:1", id="copied to host memory"),
    ],
)
def test_what_random_histories_seldom_have(history: str) -> None:
    """After each of these steps both ways have led to the same."""
    twins = Twins()
    for step in history.split():
        kind, choice = step.split(":")
        twins.apply(kind, 0, int(choice))
        twins.compare()


def test_a_request_goes_on_if_it_has_stored_a_single_block() -> None:
    """A request without events, or with a prompt alone, is not said to; one that is goes on being known."""
    sessions = RecentSessions(seconds=1.0)
    sessions.add("engine", "prompt", single=False)
    sessions.add("engine", "answer", single=True)
    asked = ("new", "prompt", "answer")
    first = [sessions.decoding("engine", session) for session in asked]
    for now in (1.0, 2.0, 3.0):
        sessions.age(now)
        sessions.add("engine", "answer", single=True)

    assert first == [False, False, True]
    assert [sessions.known("engine", session) for session in asked] == [False, False, True]
