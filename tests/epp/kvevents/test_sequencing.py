"""Sequence numbers: what is applied, asked for again, forgotten."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.epp.kvevents.ring import Engine, Follower, after, batch

from kvist_epp.kvevents.sequencing import (
    Action,
    Apply,
    Cursor,
    EventSequencer,
    Forget,
    RequestReplay,
    Step,
    begin_replay,
    judge_held,
    judge_live,
    judge_replay_end,
    judge_replayed,
)


def test_the_first_thing_is_a_replay_from_0() -> None:
    """A new subscriber has missed everything published before, so it requests a replay from 0."""
    sequencer = EventSequencer()

    assert sequencer.on_connected() == [RequestReplay(0)]
    assert not sequencer.warm


def test_next_numbers_apply() -> None:
    """In order, each message applies, once."""
    sequencer = after()

    assert sequencer.on_live(0, batch(0)) == [Apply(batch(0))]
    assert sequencer.on_live(1, batch(1)) == [Apply(batch(1))]


def test_live_messages_wait_for_the_replay_and_duplicates_are_dropped() -> None:
    """Replay and live stream overlap: each number applies once, in order, and no restart is seen in it."""
    sequencer = EventSequencer()
    sequencer.on_connected()
    held = sequencer.on_live(2, batch(2)) + sequencer.on_live(3, batch(3))
    ring = [step for seq in range(3) for step in sequencer.on_replayed(seq, batch(seq))]

    assert held == []
    assert ring == [Apply(batch(seq)) for seq in range(3)]
    assert sequencer.on_replay_end() == [Apply(batch(3))]
    assert (sequencer.warm, sequencer.suspect) == (True, False)


def test_a_live_message_below_next_is_overlap_not_restart() -> None:
    """A replay may run ahead of the live socket: numbers that only repeat what it brought are ignored."""
    sequencer = after(0)
    sequencer.on_connected()
    for seq in range(4):
        sequencer.on_replayed(seq, batch(seq))
    sequencer.on_replay_end()

    assert [sequencer.on_live(seq, batch(seq)) for seq in (1, 2, 3)] == [[], [], []]
    assert sequencer.on_live(4, batch(4)) == [Apply(batch(4))]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_restart_before_the_first_live_message_is_seen(first: int) -> None:
    """An engine restarts behind a relay, whose connection stays, after a replay and before any live message:
    its numbers are below those that the replay brought, and were ignored until they had caught up."""
    sequencer = EventSequencer()
    sequencer.on_connected()
    for seq in range(4):
        sequencer.on_replayed(seq, batch(seq))
    sequencer.on_replay_end()

    assert sequencer.on_live(first, batch(first, life=1)) == [RequestReplay(3)]
    assert (sequencer.suspect, sequencer.gaps) == (True, 0)
    assert sequencer.on_live(first + 1, batch(first + 1, life=1)) == []
    assert sequencer.on_replay_end() == [Forget(restarted=True), RequestReplay(0)]
    replayed = [sequencer.on_replayed(seq, batch(seq, life=1)) for seq in range(first + 2)]
    assert replayed == [[Apply(batch(seq, life=1))] for seq in range(first + 2)]
    assert (sequencer.on_replay_end(), sequencer.suspect) == ([], False)


def test_a_first_live_message_that_the_replay_had_costs_nothing() -> None:
    """Replay and live stream overlap: the buffer shows that the engine is the same, and nothing is
    forgotten, applied twice or counted as a gap. The last number needs no question: its batch is known."""
    sequencers = []
    for first in (1, 3):
        sequencer = EventSequencer()
        sequencer.on_connected()
        for seq in range(4):
            sequencer.on_replayed(seq, batch(seq))
        sequencer.on_replay_end()
        asked = sequencer.on_live(first, batch(first))
        if asked:
            sequencer.on_live(2, batch(2))
            assert sequencer.on_replayed(3, batch(3)) + sequencer.on_replay_end() == []
            assert sequencer.on_live(3, batch(3)) == []
        sequencers.append((asked, sequencer.on_live(4, batch(4)), sequencer.suspect, sequencer.gaps))

    assert sequencers == [
        ([RequestReplay(3)], [Apply(batch(4))], False, 0),
        ([], [Apply(batch(4))], False, 0),
    ]


def test_a_gap_requests_a_replay_and_marks_the_publisher_suspect() -> None:
    """Nothing is applied past a hole: it may hide a removal."""
    sequencer = after(0, 1)

    assert sequencer.on_live(4, batch(4)) == [RequestReplay(1)]
    assert (sequencer.suspect, sequencer.gaps) == (True, 1)
    assert sequencer.on_replayed(1, batch(1)) == []
    assert sequencer.on_replayed(2, batch(2)) + sequencer.on_replayed(3, batch(3)) == [
        Apply(batch(2)),
        Apply(batch(3)),
    ]
    assert sequencer.on_replayed(4, batch(4)) + sequencer.on_replay_end() == [Apply(batch(4))]
    assert not sequencer.suspect


def test_a_restart_forgets_at_once() -> None:
    """Weakness 1: a restarted engine's old blocks must not stay."""
    sequencer = after(0, 1, 2)

    assert sequencer.on_live(0, batch(0, life=1)) == [Forget(restarted=True), Apply(batch(0, life=1))]


def test_a_restart_with_its_beginning_missed_is_replayed_from_0() -> None:
    """If a number steps back, but not to 0, the replay buffer shows the restart and the missed batches."""
    sequencer = after(0, 1, 2, 3)

    assert sequencer.on_live(2, batch(2, life=1)) == [RequestReplay(3)]
    assert sequencer.suspect
    assert sequencer.on_replay_end() == [Forget(restarted=True), RequestReplay(0)]
    assert sequencer.on_replayed(0, batch(0, life=1)) == [Apply(batch(0, life=1))]


def test_a_message_that_was_overtaken_costs_nothing_that_was_learned() -> None:
    """If a number steps back without a restart, the replay fills the gap and shows that nothing else was
    lost."""
    sequencer = after(0, 1)

    assert sequencer.on_live(3, batch(3)) == [RequestReplay(1)]
    assert sequencer.on_live(2, batch(2)) == []
    assert sequencer.on_replayed(1, batch(1)) == []
    assert sequencer.on_replayed(2, batch(2)) + sequencer.on_replayed(3, batch(3)) == [
        Apply(batch(2)),
        Apply(batch(3)),
    ]
    assert sequencer.on_replay_end() == [RequestReplay(3)]
    assert sequencer.on_replayed(3, batch(3)) + sequencer.on_replay_end() == []
    assert sequencer.on_live(4, batch(4)) == [Apply(batch(4))]


def test_a_number_that_stepped_back_without_a_replay_is_a_restart() -> None:
    """If a number steps back and the replay buffer does not answer, everything known of the publisher is
    forgotten."""
    sequencer = after(0, 1, 2)
    sequencer.on_live(4, batch(4))
    sequencer.on_live(1, batch(1, life=1))

    assert sequencer.on_replay_failed() == [Forget(restarted=True)]
    assert sequencer.on_live(2, batch(2, life=1)) == [RequestReplay(0)]


def test_a_number_that_stepped_back_before_a_wrapped_replay_buffer_is_a_restart() -> None:
    """If the last batch applied is no longer in the replay buffer, the next one may be of a restarted
    engine."""
    sequencer = after(0, 1, 2)
    sequencer.on_live(1, batch(1, life=1))

    assert sequencer.on_replayed(3, batch(3, life=1)) == [Forget(restarted=False), Apply(batch(3, life=1))]


def test_the_same_number_twice_on_the_live_socket_is_a_restart() -> None:
    """Live numbers only grow: an engine that had sent one batch and restarted sends number 0 again."""
    sequencer = after(0)

    assert sequencer.on_live(0, batch(0, life=1)) == [Forget(restarted=True), Apply(batch(0, life=1))]


def test_a_restart_that_ran_past_our_cursor_is_seen_by_its_fingerprint() -> None:
    """Weakness 5: after a reconnection the numbers may go on as if nothing had happened."""
    sequencer = after(0, 1)
    sequencer.on_connected()
    sequencer.on_replayed(1, batch(1))
    sequencer.on_replay_end()

    assert sequencer.on_connected() == [RequestReplay(1)]
    assert sequencer.on_replayed(1, batch(1, life=1)) == [Forget(restarted=True), RequestReplay(0)]


def test_a_silent_restart_is_seen_by_its_empty_replay_buffer() -> None:
    """Weakness 3: an idle engine announces nothing; its ring not knowing our last batch says enough."""
    sequencer = after(0, 1)
    sequencer.on_connected()
    sequencer.on_replayed(1, batch(1))
    sequencer.on_replay_end()
    sequencer.on_connected()

    assert sequencer.on_replay_end() == [Forget(restarted=True), RequestReplay(0)]
    assert sequencer.on_replay_end() == []


def test_a_replay_buffer_that_stays_empty_resets_only_once() -> None:
    """An engine that keeps no ring must not lose its index at every look."""
    sequencer = after(0, 1)
    sequencer.on_connected()
    first = (
        sequencer.on_replay_end()
        + sequencer.on_replay_end()
        + sequencer.on_live(2, batch(2))
        + sequencer.on_replay_end()
    )
    sequencer.on_connected()

    assert first == [Forget(restarted=True), RequestReplay(0), RequestReplay(0), Apply(batch(2))]
    assert sequencer.on_replay_end() == []


def test_a_wrapped_replay_buffer_resets_and_gives_what_it_has() -> None:
    """Weakness 6: the gap is older than the ring; one question, one reset, and on it goes, no loop."""
    sequencer = after(0, 1)
    steps = [*sequencer.on_live(9, batch(9))]
    for seq in (7, 8, 9):
        steps += sequencer.on_replayed(seq, batch(seq))
    steps += sequencer.on_replay_end() + sequencer.on_live(10, batch(10))

    assert steps == [RequestReplay(1), Forget(restarted=False), *(Apply(batch(seq)) for seq in (7, 8, 9, 10))]


def test_a_number_lost_for_good_is_requested_once_more_and_resets() -> None:
    """A batch whose sending failed is in no ring: what came before it cannot be trusted, what follows can."""
    sequencer = after(0, 1)
    steps = sequencer.on_live(5, batch(5))
    for seq in (1, 2, 4):
        steps += sequencer.on_replayed(seq, batch(seq))
    for seq in (2, 4, 5):
        steps += sequencer.on_replayed(seq, batch(seq))
    steps += sequencer.on_replay_end()

    assert steps == [
        RequestReplay(1),
        Apply(batch(2)),
        RequestReplay(2),
        Forget(restarted=False),
        Apply(batch(4)),
        Apply(batch(5)),
    ]


def test_a_first_replay_that_begins_late_resets_nothing() -> None:
    """The ring of an old engine does not reach back to 0: its suffix is applied to the empty index."""
    sequencer = EventSequencer()
    sequencer.on_connected()

    assert sequencer.on_replayed(500, batch(500)) == [Apply(batch(500))]


def test_without_a_replay_buffer_a_gap_resets_and_goes_on() -> None:
    """No replay endpoint: the publisher is warm at once, and a hole costs what came before it."""
    sequencer = EventSequencer(has_replay=False)
    steps = (
        sequencer.on_connected()
        + sequencer.on_live(3, batch(3))
        + sequencer.on_live(4, batch(4))
        + sequencer.on_live(6, batch(6))
    )

    assert steps == [Apply(batch(3)), Apply(batch(4)), Forget(restarted=False), Apply(batch(6))]
    assert sequencer.warm


def test_a_replay_that_never_answers_is_given_up() -> None:
    """If a replay is not answered, held batches are applied, everything before the gap is forgotten, and no
    further replay is requested."""
    sequencer = after(0)
    sequencer.on_live(2, batch(2))

    assert sequencer.on_replay_stalled() == []
    assert sequencer.on_replay_failed() == [Forget(restarted=False), Apply(batch(2))]
    assert (sequencer.replaying, sequencer.suspect) == (False, False)


def test_a_broken_off_answer_is_requested_from_where_it_stopped() -> None:
    """Engines before 0.33 drop messages of a long replay, the end marker too."""
    sequencer = EventSequencer()
    sequencer.on_connected()
    sequencer.on_replayed(0, batch(0))
    sequencer.on_replayed(1, batch(1))

    assert sequencer.on_replay_stalled() == [RequestReplay(1)]


def test_the_end_of_a_long_replay_is_requested_again() -> None:
    """The end marker may arrive where the last batches did not."""
    sequencer = EventSequencer()
    sequencer.on_connected()
    for seq in range(300):
        sequencer.on_replayed(seq, batch(seq))

    assert sequencer.on_replay_end() == [RequestReplay(299)]
    assert sequencer.on_replayed(299, batch(299)) + sequencer.on_replay_end() == []
    assert sequencer.warm


def test_held_messages_are_bounded_in_bytes() -> None:
    """A replay that lasts is given up before memory is."""
    sequencer = EventSequencer(hold_limit=60)
    sequencer.on_connected()
    steps = [step for seq in range(4, 9) for step in sequencer.on_live(seq, batch(seq))]

    assert steps == [Apply(batch(seq)) for seq in range(4, 9)]
    assert sequencer.held == 0


def test_a_restart_drops_held_batches_of_the_old_engine() -> None:
    """Messages of the old engine that waited for a replay are not applied to the restarted one."""
    sequencer = after(0)
    sequencer.on_live(5, batch(5))

    assert sequencer.on_live(0, batch(0, life=1)) == [Forget(restarted=True), Apply(batch(0, life=1))]
    assert (sequencer.held, sequencer.replaying) == (0, False)


def test_late_answers_of_an_abandoned_replay_are_ignored() -> None:
    """Answers to an abandoned replay are ignored."""
    cursor = Cursor(next=5, mark=b"m", last_live=4)

    assert judge_replayed(cursor, 5, b"n") == (cursor, Action.IGNORE)
    assert judge_replay_end(cursor) == (cursor, Action.IGNORE)


def test_a_gap_before_a_message_that_came_after_the_request_is_replayed() -> None:
    """The ring had not seen the far side of the hole when it was asked, so its silence was not final."""
    cursor = begin_replay(Cursor(next=3, mark=b"m", last_live=2))
    cursor, held = judge_live(cursor, 6, b"x")
    cursor, _ = judge_replayed(cursor, 2, b"m")
    cursor, done = judge_replay_end(cursor)

    assert (held, done) == (Action.HOLD, Action.DONE)
    assert judge_held(cursor, 6, b"x")[1] is Action.REPLAY


HAPPENINGS = ["sent"] * 3 + [
    "lost",
    "overtaken",
    "restart",
    "restart, heard before it is seen",
    "reconnect",
    "restart behind a relay",
]


@example(1, ["restart behind a relay", "restart", "restart behind a relay", "restart"])
@settings(max_examples=300)
@given(
    st.integers(1, 6),
    st.lists(st.sampled_from(HAPPENINGS), max_size=40),
)
def test_what_is_applied_is_always_a_gapless_suffix_of_the_present_engine(
    ring: int, history: list[str]
) -> None:
    """Under any losses, reorderings, restarts and reconnections there are no stale batches, gaps, duplicates
    or loops."""
    engine = Engine(ring)
    follower = Follower(engine)
    follower.do(follower.sequencer.on_connected())
    for happening in [*history, "reconnect"]:
        before = follower.asked
        if happening == "restart, heard before it is seen":
            engine.restart()
            follower.do(follower.sequencer.on_live(*engine.publish()))
            follower.do(follower.sequencer.on_connected())
        elif happening == "restart behind a relay":
            engine.restart()
            follower.do(follower.sequencer.on_live(*engine.publish()))
        elif happening == "restart":
            engine.restart()
            follower.do(follower.sequencer.on_connected())
        elif happening == "reconnect":
            follower.do(follower.sequencer.on_connected())
        else:
            sent = [engine.publish() for _ in range(2 if happening == "overtaken" else 1)]
            for seq, payload in reversed(sent):
                if happening != "lost":
                    follower.do(follower.sequencer.on_live(seq, payload))
        if not follower.sequencer.cursor.proven:  # the feed checks such a buffer, whatever it hears
            follower.do(follower.sequencer.on_connected())
        assert follower.asked - before <= 4 * (2 if happening == "overtaken" else 1)
        numbers = [int(payload.split()[-1]) for payload in follower.applied]
        assert all(second == first + 1 for first, second in pairwise(numbers))

    current = [payload for payload in follower.applied if payload.startswith(b"life %d " % engine.life)]
    kept = [payload for _, payload in engine.ring]
    assert current == follower.applied
    assert current[-len(kept) :] == kept or not kept


@pytest.mark.parametrize("life", [0, 1])
def test_a_message_after_a_reconnection_without_a_replay_buffer_is_judged_by_its_number(life: int) -> None:
    """Without a ring nothing can be verified: the next number goes on, a lower one is a restart."""
    sequencer = EventSequencer(has_replay=False)
    sequencer.on_connected()
    sequencer.on_live(0, batch(0))
    sequencer.on_live(1, batch(1))
    sequencer.on_connected()
    seq = 2 if life == 0 else 0
    expected: list[Step] = [Apply(batch(seq, life))]

    assert sequencer.on_live(seq, batch(seq, life)) == ([Forget(restarted=True)] if life else []) + expected
