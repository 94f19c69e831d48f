"""Sequence numbers while a snapshot of a peer may come."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.epp.kvevents.ring import Engine, Follower, batch

from kvist_epp.kvevents.sequencing import Apply, EventSequencer, Forget, RequestReplay


def waiting(*held: int, has_replay: bool = True, life: int = 0) -> EventSequencer:
    """Return a sequencer that waits for a snapshot and has received these live messages."""
    sequencer = EventSequencer(has_replay=has_replay)
    sequencer.wait_for_snapshot()
    for seq in held:
        assert sequencer.on_live(seq, batch(seq, life)) == []
    return sequencer


def test_while_a_snapshot_may_come_messages_are_held_and_no_replay_is_requested() -> None:
    """A replay of thousands of batches is not begun when a peer can tell what they come to."""
    sequencer = waiting()
    steps = [*sequencer.on_connected(), *sequencer.on_live(7, batch(7)), *sequencer.on_live(8, batch(8))]

    assert (steps, sequencer.warm, sequencer.held) == ([], False, 2)
    assert sequencer.skip_snapshot() == [RequestReplay(0)]


def test_after_a_snapshot_a_replay_is_requested_from_its_last_batch_on() -> None:
    """Batches covered by the snapshot are not applied again; the overlap proves that the engine has not
    restarted."""
    sequencer = waiting(7, 8, 9)

    assert sequencer.adopt_snapshot(8, batch(7)) == [RequestReplay(7)]
    assert sequencer.on_replayed(7, batch(7)) + sequencer.on_replayed(8, batch(8)) == [Apply(batch(8))]
    assert sequencer.on_replay_end() == [Apply(batch(9))]
    assert (sequencer.warm, sequencer.suspect, sequencer.on_live(10, batch(10))) == (
        True,
        False,
        [Apply(batch(10))],
    )


def test_a_snapshot_of_a_restarted_engine_is_forgotten() -> None:
    """The engine restarted between the peer's look and ours: its ring says so."""
    sequencer = waiting()

    assert sequencer.adopt_snapshot(8, batch(7)) == [RequestReplay(7)]
    assert sequencer.on_replayed(7, batch(7, life=1)) == [Forget(restarted=True), RequestReplay(0)]


def test_a_snapshot_that_nothing_proves_is_forgotten() -> None:
    """The ring does not answer: a peer's word alone is not believed, whatever was held is."""
    sequencer = waiting(9)
    sequencer.adopt_snapshot(8, batch(7))

    assert sequencer.on_replay_failed() == [Forget(restarted=False), Apply(batch(9))]
    assert sequencer.warm


def test_without_a_replay_buffer_a_held_message_proves_the_snapshot() -> None:
    """The snapshot's last batch was also received live, so the engine has not restarted."""
    proven, unproven, other = (
        waiting(7, 8, has_replay=False),
        waiting(9, has_replay=False),
        waiting(7, life=1),
    )

    assert proven.adopt_snapshot(8, batch(7)) == [Apply(batch(8))]
    assert unproven.adopt_snapshot(8, batch(7)) == [Forget(restarted=False), Apply(batch(9))]
    assert other.adopt_snapshot(8, batch(7)) == [RequestReplay(7)]
    assert other.on_replay_failed() == [Forget(restarted=False), Apply(batch(7, life=1))]


def test_a_restart_while_waiting_ends_the_waiting() -> None:
    """A restart ends the wait for a snapshot; the part of a section that was received is forgotten."""
    sequencer = waiting(7, 8)

    assert sequencer.on_live(0, batch(0, life=1)) == [Forget(restarted=True), Apply(batch(0, life=1))]
    assert (sequencer.waiting_for_snapshot, sequencer.warm) == (False, True)


def test_too_much_held_while_waiting_ends_the_waiting() -> None:
    """Memory is bounded; what was taken in of a section is forgotten before what was held is applied."""
    sequencer = EventSequencer(hold_limit=40)
    sequencer.wait_for_snapshot()
    steps = [step for seq in (4, 5, 6) for step in sequencer.on_live(seq, batch(seq))]

    assert steps == [Forget(restarted=False), *(Apply(batch(seq)) for seq in (4, 5, 6))]
    assert not sequencer.waiting_for_snapshot


def test_what_was_held_before_a_reconnection_proves_no_snapshot() -> None:
    """If the engine restarted and only its numbers continue, the snapshot is of the old engine."""
    sequencer = waiting(0, 1)
    sequencer.on_connected()
    sequencer.on_live(2, batch(2, life=1))

    assert sequencer.adopt_snapshot(2, batch(1)) == [RequestReplay(1)]
    assert sequencer.on_replayed(2, batch(2, life=1)) == [Forget(restarted=False), Apply(batch(2, life=1))]
    assert sequencer.on_replay_end() == []


@example(ring=1, history=["sent", "sent", "look", "restart", "lost", "lost", "sent"])
@settings(max_examples=300)
@given(
    st.integers(1, 6),
    st.lists(st.sampled_from(["sent", "sent", "sent", "lost", "restart", "look", "adopt"]), max_size=40),
)
def test_what_is_believed_after_a_snapshot_is_a_gapless_suffix_too(ring: int, history: list[str]) -> None:
    """Whatever happens between the peer's look at the engine, ours and the snapshot."""
    engine = Engine(ring)
    peer, late = Follower(engine), Follower(engine)
    late.sequencer.wait_for_snapshot()
    peer.do(peer.sequencer.on_connected())
    told: tuple[int, bytes, list[bytes]] | None = None
    for happening in [*history, "adopt", "reconnect"]:
        if happening == "restart":
            engine.restart()
        elif happening == "look" and peer.applied:
            told = peer.sequencer.cursor.next, peer.applied[-1], list(peer.applied)
        elif happening == "adopt" and late.sequencer.waiting_for_snapshot:
            late.applied = [] if told is None else told[2]
            late.do(
                late.sequencer.skip_snapshot()
                if told is None
                else late.sequencer.adopt_snapshot(told[0], told[1])
            )
        elif happening in {"sent", "lost"}:
            seq, payload = engine.publish()
            for follower in (peer, late)[: 2 if happening == "sent" else 1]:
                follower.do(follower.sequencer.on_live(seq, payload))
        if happening in {"restart", "reconnect"} or not late.sequencer.cursor.proven:
            for follower in (peer, late):
                follower.do(follower.sequencer.on_connected())

    assert late.sequencer.warm
    assert all(payload.startswith(b"life %d " % engine.life) for payload in late.applied)
    numbers = [int(payload.split()[-1]) for payload in late.applied]
    assert all(second == first + 1 for first, second in pairwise(numbers))
    kept = [payload for _, payload in engine.ring]
    assert late.applied[-len(kept) :] == kept or not kept
