"""Tests of the exchange between replicas of our picker in virtual time."""

from dataclasses import replace

import pytest
from tests.sim.virtual.runs import fixed, run

from kvist_epp.load.in_flight import Attempt
from kvist_epp.replicas.prompt_digests import URGENT_TOKENS
from kvist_epp.replicas.replication import URGENT_SECONDS
from kvist_sim.virtual.fleet import Fleet
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.ideal import TooFewRequestsError, capacity
from kvist_sim.virtual.ours import KVIST, Kvist
from kvist_sim.virtual.policy import Context
from kvist_sim.virtual.world import Setting

INTERVAL = 0.8


class RecordingKvist(Kvist):
    """Records what other replicas sent: the age of a request, and its backlog."""

    received: list[tuple[float, float]]

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        tracker = self.director.tracker
        add = tracker.add_remote

        def add_remote(attempt: Attempt, now: float) -> None:
            self.received.append((now - attempt.routed_at, attempt.backlog))
            add(attempt, now)

        tracker.add_remote = add_remote  # type: ignore[method-assign]


def gossip_of(tokens: int) -> list[tuple[float, float]]:
    """Return the load that two replicas report for each other's prompts of so many tokens."""
    RecordingKvist.received = []
    spec, setting = replace(KVIST, make=RecordingKvist), Setting(replicas=2, gossip=INTERVAL)
    run(spec, fixed(tokens, 200), rate=1.0, requests=60, setting=setting)
    return RecordingKvist.received


def test_what_is_computed_by_the_time_it_is_announced_adds_no_backlog() -> None:
    """A short prompt on an idle engine takes a tenth of a second; updates come every 0.8 s."""
    received = gossip_of(600)

    assert len(received) >= 60
    assert max(age for age, _ in received) == pytest.approx(INTERVAL, abs=0.1)
    assert {owed for age, owed in received if age > 0.2} == {0.0}


def test_a_long_new_prompt_is_announced_at_once() -> None:
    """Other replicas learn of a long new prompt, and its backlog, before the next update would be due."""
    received = gossip_of(3 * URGENT_TOKENS)

    assert len(received) >= 60
    assert max(age for age, _ in received) <= URGENT_SECONDS + 1e-6
    assert all(owed > 0 for _, owed in received)


def test_a_pool_that_is_never_full_has_no_capacity() -> None:
    """A few requests are all served, however fast they arrive: the search ends with an error."""
    with pytest.raises(TooFewRequestsError, match="3 requests"):
        capacity(fixed(100, 2), Fleet((Hardware(),) * 4), requests=3)
