"""An engine that publishes and one that follows it, without sockets."""

from collections import deque

from kvist_epp.kvevents.sequencing import Apply, EventSequencer, Forget, RequestReplay, Step


def batch(seq: int, life: int = 0) -> bytes:
    """Return a payload that is different after each restart of the engine."""
    return b"life %d batch %d" % (life, seq)


def after(*seqs: int) -> EventSequencer:
    """A sequencer that has replayed an empty ring and then applied live messages."""
    sequencer = EventSequencer()
    sequencer.on_connected()
    sequencer.on_replay_end()
    for seq in seqs:
        sequencer.on_live(seq, batch(seq))
    return sequencer


class Engine:
    """A publisher with a ring, whose live messages may be lost."""

    def __init__(self, ring: int) -> None:
        self.life = 0
        self.seq = 0
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)

    def publish(self) -> tuple[int, bytes]:
        message = (self.seq, batch(self.seq, self.life))
        self.ring.append(message)
        self.seq += 1
        return message

    def restart(self) -> None:
        self.life += 1
        self.seq = 0
        self.ring.clear()


class Follower:
    """Carries the steps out; answers questions at once from the engine's ring."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequencer = EventSequencer()
        self.applied: list[bytes] = []
        self.asked = 0

    def do(self, steps: list[Step]) -> None:
        todo = deque(steps)
        while todo:
            step = todo.popleft()
            if isinstance(step, Apply):
                self.applied.append(step.payload)
            elif isinstance(step, Forget):
                self.applied.clear()
            else:
                self.asked += 1
                todo.extend(self.answer(step.start))

    def answer(self, start: int) -> list[Step]:
        steps: list[Step] = []
        for seq, payload in list(self.engine.ring):
            if seq >= start and not any(isinstance(step, RequestReplay) for step in steps):
                steps += self.sequencer.on_replayed(seq, payload)
        return (
            steps
            if any(isinstance(step, RequestReplay) for step in steps)
            else steps + self.sequencer.on_replay_end()
        )
