"""Follow the KV events of the engines: one feed for each publisher, and work that belongs to no publisher.

There are two directions. In *connect* mode vLLM binds, and there is one SUB socket for each publisher. In
*bind* mode one SUB socket is bound here, and publishers that connect to it are distinguished by topic.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from kvist_epp.engines.vllm.kv_events import rank_of
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.io_context import CooperativeScheduler, IoContext, SubscriberLimits
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.publisher_feed import FollowedPublisher, PublisherFeed
from kvist_epp.kvevents.publisher_state import PublisherStats

__all__ = ["FollowedPublisher", "Subscriber", "SubscriberLimits"]


class Subscriber:
    """Follows publishers and applies their events; created inside a running event loop."""

    def __init__(
        self,
        ingestor: Ingestor,
        *,
        observe: Callable[[Observation], None] = lambda _: None,
        bind: str | None = None,
        ipv6: bool = True,
        limits: SubscriberLimits | None = None,
    ) -> None:
        """``observe`` gets what events reveal about requests; ``bind`` is the address in bind mode."""
        limits = limits or SubscriberLimits()
        self._ingestor = ingestor
        self._observe = observe
        self._io = IoContext(limits, ipv6=ipv6)
        self._background = _BackgroundJobs(ingestor, self._io.scheduler)
        self._feeds: dict[FollowedPublisher, PublisherFeed] = {}
        self._by_name: dict[str, PublisherFeed] = {}
        self._stats: dict[str, list[PublisherStats]] = {}
        """By endpoint."""
        self._active: set[str] = set()
        self._bound = None if bind is None else _BoundSubscriber(self._io, bind)
        self._wait_for_snapshots = False
        self._orphans = limits.orphans
        self._timer = self._io.loop.call_later(limits.orphans, self._expire)

    @property
    def scheduler(self) -> CooperativeScheduler:
        """Scheduler of work in slices between picks."""
        return self._io.scheduler

    @property
    def bound_address(self) -> str | None:
        """Address that publishers connect to, in bind mode."""
        return None if self._bound is None else self._bound.address

    @property
    def unknown_publisher_messages(self) -> int:
        """Number of messages from publishers that are not followed, in bind mode."""
        return 0 if self._bound is None else self._bound.unknown_publisher_messages

    def follow(self, publishers: Iterable[FollowedPublisher]) -> None:
        """Follow exactly these publishers from now on; remove all others with their blocks."""
        wanted = set(publishers)
        for gone in self._feeds.keys() - wanted:
            self._feeds.pop(gone).close()
            self._ingestor.remove_publisher(gone.name)
            self._io.scheduler.add(self._background)
        for new in wanted - self._feeds.keys():
            self._ingestor.add_publisher(new.name, new.endpoint, new.storage, new.storage_tokens)
            self._feeds[new] = self._start_feed(new)
        self._by_name = {publisher.name: feed for publisher, feed in self._feeds.items()}
        self._stats = {}
        for publisher, feed in self._feeds.items():
            self._stats.setdefault(publisher.endpoint, []).append(feed.stats)
        if self._bound is not None:
            self._bound.follow(self._feeds)

    def feed(self, publisher: str) -> PublisherFeed | None:
        """Return the feed of a publisher; None if it is not followed."""
        return self._by_name.get(publisher)

    def stats(self) -> dict[str, PublisherStats]:
        """Return the counters by publisher."""
        return {publisher.name: feed.stats for publisher, feed in self._feeds.items()}

    def stats_of(self, endpoint: str) -> list[PublisherStats]:
        """Return the counters of the endpoint's publishers; empty if it is not followed."""
        return self._stats.get(endpoint, [])

    def take_active(self) -> set[str]:
        """Return the endpoints of which any counter may have changed since the last call."""
        active, self._active = self._active, set()
        return active

    def warm(self, endpoint: str) -> bool:
        """Return True if the first replay of each of the endpoint's publishers is over and applied."""
        ranks = self.stats_of(endpoint)
        return bool(ranks) and all(stats.warm for stats in ranks)

    def suspect(self, endpoint: str) -> bool:
        """Return True if messages of one of the endpoint's publishers are missing and not yet explained."""
        return any(stats.suspect for stats in self.stats_of(endpoint))

    def wait_for_snapshots(self) -> None:
        """Let publishers followed from now on wait for a snapshot before their replay buffers are asked."""
        self._wait_for_snapshots = True

    def skip_snapshots(self) -> None:
        """Note that no further snapshot comes: publishers that wait for one use their replay buffers."""
        self._wait_for_snapshots = False
        for feed in self._feeds.values():
            if feed.sequencer.waiting_for_snapshot:
                feed.skip_snapshot()

    def waiting_for_snapshot(self) -> list[str]:
        """Return the publishers that wait for a snapshot."""
        return [
            publisher.name for publisher, feed in self._feeds.items() if feed.sequencer.waiting_for_snapshot
        ]

    def waits_for_snapshot(self, publisher: str) -> bool:
        """Return True if this publisher waits for a snapshot."""
        feed = self.feed(publisher)
        return feed is not None and feed.sequencer.waiting_for_snapshot

    async def close(self) -> None:
        """Close all sockets and stop all timers."""
        self._timer.cancel()
        self._background.close()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        if self._bound is not None:
            self._bound.close()
        self._io.close()

    def _start_feed(self, publisher: FollowedPublisher) -> PublisherFeed:
        def on_turn() -> None:
            self._active.add(publisher.endpoint)
            self._background.schedule_if_needed()

        self._active.add(publisher.endpoint)
        feed = PublisherFeed(
            self._io,
            publisher,
            self._ingestor,
            observe=self._observe,
            on_applied=on_turn,
        )
        if self._wait_for_snapshots:
            feed.sequencer.wait_for_snapshot()
        if self._bound is None:
            feed.connect()
        else:
            feed.on_connected()
        return feed

    def _expire(self) -> None:
        self._ingestor.expire()
        self._timer = self._io.loop.call_later(self._orphans, self._expire)


class _BoundSubscriber:
    """Bind mode: one SUB socket that all publishers connect to.

    The topic names the endpoint, as ``kv@<ip:port or name>@<model>`` (so llm-d's charts and simulators set
    it) or by its name alone; the batch has the data-parallel rank.
    """

    def __init__(self, io: IoContext, address: str) -> None:
        self.unknown_publisher_messages = 0
        self._io = io
        self._feeds: dict[str, dict[int, PublisherFeed]] = {}
        """By name in the topic and by rank."""
        self._current: PublisherFeed | None = None
        self._socket, self.address = io.bind_subscriber(address, lambda: io.scheduler.add(self))

    def follow(self, feeds: Mapping[FollowedPublisher, PublisherFeed]) -> None:
        """Accept messages of exactly these publishers."""
        self._feeds = {}
        for publisher, feed in feeds.items():
            for name in (*publisher.topics, publisher.endpoint):
                self._feeds.setdefault(name, {})[publisher.rank] = feed

    def work(self, deadline: float) -> bool:
        """Pass a message to its feed, and let the feed apply it before the next one is read."""
        while perf_counter() < deadline:
            if self._current is not None and self._current.work(deadline):
                return True
            self._current = None
            frames = self._socket.receive()
            if frames is None:
                return False
            self._current = self._find(frames)
            if self._current is None:
                self.unknown_publisher_messages += 1
            else:
                self._current.on_live(frames)
        return True

    def close(self) -> None:
        """Close the socket."""
        self._io.scheduler.remove(self)
        self._socket.close()

    def _find(self, frames: list[bytes]) -> PublisherFeed | None:
        topic = frames[0].decode(errors="replace")
        ranks = self._feeds.get(topic.split("@", 2)[1] if topic.startswith("kv@") else topic, {})
        if len(ranks) < 2:
            return next(iter(ranks.values()), None)
        return ranks.get(rank_of(frames[-1]) or 0)


class _BackgroundJobs:
    """Work that belongs to no publisher: checks of blocks from decode, and freeing memory."""

    SLICE = 0.0005
    PAUSE = 4
    """Factor of the pause after a slice of checks: blocks gather meanwhile, and are cheaper together."""

    def __init__(self, ingestor: Ingestor, scheduler: CooperativeScheduler) -> None:
        self._ingestor = ingestor
        self._scheduler = scheduler
        self._pause: asyncio.TimerHandle | None = None

    def schedule_if_needed(self) -> None:
        """Schedule a turn if there is work."""
        if self._ingestor.needs_sweep or (len(self._ingestor.checker) and self._pause is None):
            self._scheduler.add(self)

    def work(self, deadline: float) -> bool:
        """Check blocks for a slice, then free memory."""
        start = perf_counter()
        deadline = min(deadline, start + self.SLICE)
        if self._pause is None:
            while self._ingestor.checker.step() and perf_counter() < deadline:
                pass
            if len(self._ingestor.checker):
                pause = self.PAUSE * (perf_counter() - start)
                self._pause = asyncio.get_running_loop().call_later(pause, self._on_pause_over)
        return self._ingestor.needs_sweep and self._ingestor.sweep() > 0

    def close(self) -> None:
        """Stop the timer."""
        if self._pause is not None:
            self._pause.cancel()

    def _on_pause_over(self) -> None:
        self._pause = None
        self.schedule_if_needed()
