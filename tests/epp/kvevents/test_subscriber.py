"""From real sockets to the index: replay, gaps, restarts, ranks, garbage, both directions."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.fakes.learning import PROMPT, stored
from tests.fakes.vocabulary import Words

from kvist_epp.engines.vllm.event_encoder import Form, encode
from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.io_context import CooperativeScheduler, ReplaySemaphore
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.publisher_state import PublisherStats
from kvist_epp.kvevents.subscriber import FollowedPublisher, Subscriber, SubscriberLimits
from kvist_sim.publisher import Publisher, PublisherConfig

ANY = PublisherConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
QUICK = SubscriberLimits(replay_timeout=0.2, replay_attempts=2, settle=0.05, check=0.2)
CALM = SubscriberLimits(settle=60.0, check=60.0)


async def until(condition: Callable[[], object]) -> None:
    """Waits for it; the suite's own time limit ends what never comes."""
    while not condition():
        await asyncio.sleep(0.005)


def batch(*events: Event, ts: float = 1.0, rank: int = 0) -> Batch:
    return Batch(ts=ts, rank=rank, events=list(events))


def chain(block: int) -> Event:
    """The prompt that is ``block`` blocks of aaaabbbb… deep, two blocks an event."""
    names = [block + 1, block + 2]
    return stored(names, block or None, PROMPT)


class Following:
    """A subscriber with its ingestor and index."""

    def __init__(self, limits: SubscriberLimits, bind: str | None = None) -> None:
        self.index = Index()
        self.ingestor = Ingestor(self.index, Words())
        self.seen: list[Observation] = []
        self.subscriber = Subscriber(self.ingestor, observe=self.seen.append, bind=bind, limits=limits)

    def tokens(self, source: str = "ns/pod/0") -> int:
        hits = self.index.match((None, None), PROMPT * 50)
        return hits.of(self.index.publisher(source)).tokens

    def stats(self, source: str = "ns/pod/0") -> PublisherStats:
        return self.subscriber.stats()[source]


async def subscribed(engine: Publisher, follower: Following) -> None:
    """Publishes batches without events until one arrives.

    A publisher learns of a subscription after the handshake that the subscriber sees, and drops what it
    publishes in between; a replay brings that back, and nothing does without one.
    """
    while not follower.stats().messages:
        engine.publish(batch())
        await asyncio.sleep(0.005)


@asynccontextmanager
async def following(
    *publishers: Publisher, limits: SubscriberLimits = CALM, replay: bool = True
) -> AsyncIterator[Following]:
    """Follows each publisher as a rank of ns/pod, from the moment it is warm."""
    new = Following(limits)
    new.subscriber.follow(
        FollowedPublisher("ns/pod", f"ns/pod/{at}", at, one.endpoint, one.replay_endpoint if replay else None)
        for at, one in enumerate(publishers)
    )
    try:
        await until(lambda: new.subscriber.warm("ns/pod"))
        yield new
    finally:
        await new.subscriber.close()


@asynccontextmanager
async def publishing(config: PublisherConfig = ANY, rank: int = 0) -> AsyncIterator[Publisher]:
    publisher = Publisher(config, rank)
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("replay_topic", [True, False])
async def test_a_late_subscriber_learns_all_by_replay_and_then_follows(
    form: Form, replay_topic: bool
) -> None:
    """Earlier batches are requested from 0, from engines of older and newer releases."""
    async with publishing(replace(ANY, form=form, replay_topic=replay_topic, topic="kv-events")) as engine:
        engine.publish(batch(chain(0)))
        engine.publish(batch(chain(2)))
        async with following(engine) as follower:
            before = follower.tokens()
            engine.publish(batch(chain(4)))
            await until(lambda: follower.stats().messages)

            assert (before, follower.tokens(), engine.replays) == (16, 24, [0])


async def test_a_gap_is_filled_by_a_replay() -> None:
    """A lost message costs nothing but the question."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0)))
        engine.lose(batch(Removed(hashes=[1, 2])))
        engine.publish(batch(stored([7, 8], None, b"ccccdddd")))
        await until(lambda: follower.stats().removed)
        await until(lambda: not follower.subscriber.suspect("ns/pod"))

        assert (follower.tokens(), follower.stats().gaps, follower.stats().resets) == (0, 1, 0)
        assert engine.replays == [0, 0]


async def test_a_message_lost_for_good_resets_once_and_following_goes_on() -> None:
    """Weakness 6: no loop of replays; what cannot be trusted is forgotten, what follows is learned."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0)))
        await until(follower.tokens)
        engine.lose(batch(chain(2)), kept=False)
        engine.publish(batch(stored([7, 8], None, b"ccccdddd")))
        await until(lambda: follower.stats().resets)
        engine.publish(batch(chain(0), ts=2.0))
        await until(follower.tokens)

        assert (follower.stats().resets, follower.stats().gaps, len(engine.replays)) == (1, 1, 2)


async def test_a_wrapped_replay_buffer_gives_what_it_has() -> None:
    """A subscriber that joins late cannot rebuild everything: the suffix is learned, and orphans wait."""
    async with publishing(replace(ANY, buffer_steps=2)) as engine:
        for block in (0, 2, 4):
            engine.publish(batch(chain(block)))
        async with following(engine) as follower:
            engine.publish(batch(chain(0), ts=2.0))
            await until(lambda: follower.tokens() == 24)

            assert (follower.stats().orphans, follower.stats().resets) == (2, 0)


async def test_a_long_replay_that_loses_messages_is_completed() -> None:
    """Engines before 0.33 drop what exceeds their queue: asked again from where it broke off."""
    async with publishing(replace(ANY, replay_hwm=300)) as engine:
        for block in range(0, 3000, 2):
            engine.publish(batch(stored([block + 1, block + 2], block or None, PROMPT)))
        async with following(engine, limits=QUICK) as follower:
            await until(lambda: follower.index.blocks(0).get("GPU") == 3000)

            assert follower.stats().resets == 0


async def test_a_restart_forgets_the_old_engine() -> None:
    """After a restart, numbers begin at 0 on the same address; no registration is necessary."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0)))
        await until(follower.tokens)
        engine.restart()
        await until(lambda: follower.stats().replays >= 2)
        engine.publish(batch(stored([7, 8], None, b"ccccdddd"), ts=2.0))
        await until(lambda: follower.index.blocks(0) == {"GPU": 2} and not follower.tokens())

        assert follower.stats().resets >= 1


async def test_a_restart_that_says_nothing_is_noticed() -> None:
    """Weakness 3: an engine that came back empty and idle must not keep its old blocks."""
    async with publishing() as engine, following(engine, limits=QUICK) as follower:
        engine.publish(batch(chain(0)))
        await until(follower.tokens)
        await until(lambda: len(engine.replays) > 2)
        engine.restart()
        await until(lambda: not follower.tokens())

        assert follower.stats().restarts == 1


async def test_a_last_message_that_was_lost_is_found_while_the_engine_is_idle() -> None:
    """No later message shows the gap: the publisher is looked at now and then."""
    async with publishing() as engine, following(engine, limits=QUICK) as follower:
        engine.publish(batch(chain(0)))
        engine.lose(batch(chain(2)))
        await until(lambda: follower.tokens() == 16)

        assert follower.stats().resets == 0


async def test_garbage_is_counted_and_following_goes_on() -> None:
    """Half a msgpack, no msgpack, odd frames: counted, what they may have removed forgotten, on it goes."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish_raw(b"\xc1 no msgpack")
        engine.publish_raw(encode(batch(chain(0)))[:-5])
        engine.publish_raw(msgspec.msgpack.encode({"not": "a batch"}))
        engine._pub.send_multipart([b"topic", b"123", b"payload"])
        engine._pub.send_multipart([b"alone"])
        engine.publish(batch(chain(0)))
        await until(follower.tokens)

        assert (follower.stats().garbage, follower.stats().resets) == (5, 3)


async def test_a_bug_in_a_batch_costs_its_publisher_what_it_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An event that raises is logged without its text, its publisher is forgotten, and on it goes."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0)))
        await until(follower.tokens)
        with monkeypatch.context() as broken:
            broken.setattr(follower.index, "removed", lambda *_, **__: 1 // 0)
            engine.publish(batch(Removed(hashes=[2])))
            await until(lambda: follower.stats().garbage)
        assert (follower.tokens(), follower.stats().resets) == (0, 1)
        engine.publish(batch(chain(0)))
        await until(follower.tokens)

    assert "events of ns/pod/0 were not applied" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_bug_in_what_follows_from_events_stops_none_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The observer and the decoder may raise for every message: it is logged once, and on it goes."""
    async with publishing() as engine, following(engine) as follower:
        with monkeypatch.context() as broken:
            feed = follower.subscriber.feed("ns/pod/0")
            broken.setattr(feed, "_observe", lambda _: 1 // 0)
            engine.publish(batch(chain(0)))
            engine.publish(batch(chain(2)))
            await until(lambda: follower.tokens() == 16)
            broken.setattr(follower.ingestor, "decode", lambda _: 1 // 0)
            engine.publish(batch(chain(4)))
            await until(lambda: follower.stats().garbage)
        engine.publish(batch(chain(0)))
        await until(follower.tokens)

    assert caplog.text.count("say of requests was not used") == 1
    assert caplog.text.count("were not applied") == 1


async def test_without_replay_a_gap_resets() -> None:
    """No replay endpoint configured: warm at once, and a hole costs what was known."""
    async with publishing() as engine, following(engine, replay=False) as follower:
        await subscribed(engine, follower)
        engine.publish(batch(chain(0)))
        engine.lose(batch(chain(2)))
        engine.publish(batch(stored([7, 8], None, b"ccccdddd")))
        await until(lambda: follower.stats().resets)

        assert (follower.tokens(), follower.index.blocks(0)) == (0, {"GPU": 2})


async def test_a_replay_port_without_a_listener_is_given_up() -> None:
    """The publisher becomes warm without its past, and what it says meanwhile is not lost."""
    async with publishing(replace(ANY, replay_endpoint=None)) as engine:
        new = Following(QUICK)
        new.subscriber.follow(
            [FollowedPublisher("ns/pod", "ns/pod/0", 0, engine.endpoint, "tcp://127.0.0.1:1")]
        )
        await until(lambda: new.stats().replays)
        await subscribed(engine, new)
        engine.publish(batch(chain(0)))
        await until(lambda: new.subscriber.warm("ns/pod"))
        await until(new.tokens)

        assert (new.stats().replay_failures, new.stats().resets) == (1, 0)
        await new.subscriber.close()


async def test_ranks_are_publishers_of_their_own() -> None:
    """Two ranks of one endpoint, each with its own numbers."""
    async with publishing() as zero, publishing(rank=1) as one, following(zero, one) as follower:
        zero.publish(batch(chain(0)))
        one.publish(batch(chain(0), rank=1))
        one.publish(batch(chain(2), rank=1))
        await until(lambda: follower.stats("ns/pod/1").messages == 2 and follower.stats().messages)

        assert [follower.tokens(f"ns/pod/{rank}") for rank in (0, 1)] == [8, 16]


async def test_an_endpoint_is_warm_when_all_its_ranks_are() -> None:
    """One rank that cannot be reached keeps it cold."""
    async with publishing() as engine, following(engine) as follower:
        reached = FollowedPublisher("ns/pod", "ns/pod/0", 0, engine.endpoint, engine.replay_endpoint)
        lost = FollowedPublisher("ns/pod", "ns/pod/1", 1, "tcp://127.0.0.1:1", None)
        follower.subscriber.follow([reached, lost])

        assert [follower.subscriber.warm(name) for name in ("ns/pod", "ns/none")] == [False, False]


@pytest.mark.parametrize("topic", ["kv@10.0.0.7:8000@model", "kv@ns/pod@model", "pod"])
async def test_publishers_may_connect_to_us(topic: str) -> None:
    """In bind mode publishers are distinguished by topic; unknown ones are counted and not learned."""
    new = Following(CALM, bind="tcp://127.0.0.1:*")
    new.subscriber.follow(
        [FollowedPublisher("ns/pod", "ns/pod/0", 0, "", None, topics=("10.0.0.7:8000", "pod"))]
    )
    config = PublisherConfig(endpoint=new.subscriber.bound_address or "", topic=topic)
    async with publishing(config) as engine, publishing(replace(config, topic="kv@stranger@m")) as stranger:
        while not (new.tokens() and new.subscriber.unknown_publisher_messages):
            engine.publish(batch(chain(0)))
            stranger.publish(batch(chain(2)))
            await asyncio.sleep(0.01)

        assert list(new.subscriber.stats()) == ["ns/pod/0"]
        await new.subscriber.close()


async def test_ranks_that_connect_to_us_are_distinguished_by_their_batches() -> None:
    """Ranks that share a topic have separate batch numbers."""
    new = Following(CALM, bind="tcp://127.0.0.1:*")
    new.subscriber.follow(
        FollowedPublisher("ns/pod", f"ns/pod/{rank}", rank, "", None, topics=("pod",)) for rank in (0, 1)
    )
    config = PublisherConfig(endpoint=new.subscriber.bound_address or "", topic="pod")
    async with publishing(config) as zero, publishing(config) as one:
        while not (new.tokens("ns/pod/0") and new.tokens("ns/pod/1")):
            zero.publish(batch(chain(0), rank=0))
            one.publish(batch(chain(0), rank=1))
            await asyncio.sleep(0.01)

        assert [new.stats(f"ns/pod/{rank}").restarts for rank in (0, 1)] == [0, 0]
        await new.subscriber.close()


async def test_a_publisher_not_followed_any_more_is_forgotten() -> None:
    """A pod that has left frees all its blocks; one that comes back starts empty."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0)))
        await until(follower.tokens)
        followed = FollowedPublisher("ns/pod", "ns/pod/0", 0, engine.endpoint, engine.replay_endpoint)
        follower.subscriber.follow([])
        await until(lambda: not follower.index.stats()["hashes"])
        follower.subscriber.follow([followed])
        await until(follower.tokens)

        assert follower.index.stats()["publishers"] == 1


async def test_decode_blocks_are_checked_while_nothing_else_happens() -> None:
    """The check needs no further event to start it."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(chain(0), stored([3], 2, b"aaaa")))
        await until(lambda: follower.tokens() == 12)

        assert follower.stats().credited == 1


async def test_what_events_reveal_reaches_the_observer() -> None:
    """Sessions and progress reach the observer; the backlog and the accuracy of the index depend on them."""
    async with publishing() as engine, following(engine) as follower:
        engine.publish(batch(stored([1, 2], None, PROMPT, session="r.1")))
        await until(lambda: follower.seen)

        assert [(one.endpoint, one.session, one.cached) for one in follower.seen] == [("ns/pod", "r.1", 0)]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_closing_leaves_nothing_behind() -> None:
    """No task, no thread, no descriptor; also in the middle of a replay and with unreachable publishers."""
    async with publishing() as engine:
        before = (descriptors(), threading.active_count(), len(asyncio.all_tasks()))
        async with following(engine) as follower:
            ghosts = [
                FollowedPublisher("ns/g", f"ns/g/{n}", n, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
                for n in range(5)
            ]
            real = FollowedPublisher("ns/pod", "ns/pod/0", 0, engine.endpoint, engine.replay_endpoint)
            follower.subscriber.follow([real, *ghosts])
        await until(lambda: descriptors() <= before[0])

        assert (threading.active_count(), len(asyncio.all_tasks())) == before[1:]


async def test_an_invalid_address_affects_no_other_publisher() -> None:
    """An invalid address is logged, and other publishers are followed."""
    async with publishing() as engine, following(engine) as follower:
        real = FollowedPublisher("ns/pod", "ns/pod/0", 0, engine.endpoint, engine.replay_endpoint)
        follower.subscriber.follow([real, FollowedPublisher("ns/bad", "ns/bad/0", 0, "nonsense", "tcp://")])
        engine.publish(batch(chain(0)))
        await until(follower.tokens)

        assert not follower.subscriber.warm("ns/bad")


class Steps:
    """A job of many small steps that notes when it ran."""

    def __init__(self, log: list[str], name: str, steps: int) -> None:
        self.log, self.name, self.steps = log, name, steps

    def work(self, deadline: float) -> bool:
        self.log.append(self.name)
        self.steps -= 1
        return self.steps > 0


async def test_the_loop_gets_its_turn_between_slices_and_jobs_take_turns() -> None:
    """A pick waits for one slice, never for the whole of a burst."""
    log: list[str] = []
    scheduler = CooperativeScheduler(slice_seconds=0.0)
    scheduler.add(Steps(log, "a", 2))
    scheduler.add(Steps(log, "b", 2))
    for _ in range(4):
        await asyncio.sleep(0)
        log.append("pick")

    assert log == ["a", "pick", "b", "pick", "a", "pick", "b", "pick"]


def test_replays_queue_for_a_place() -> None:
    """At most so many replays run at once; a replay that leaves the queue is not started."""
    slots, started = ReplaySemaphore(limit=1), list[str]()
    for name in ("a", "b", "c"):
        slots.acquire(name, lambda name=name: started.append(name))  # type: ignore[misc]
    slots.release("b")
    first = list(started)
    slots.release("a")

    assert (first, started) == (["a"], ["a", "c"])
