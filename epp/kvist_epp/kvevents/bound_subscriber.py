"""Bind mode: publishers connect to us and are told apart by topic.

``kv@<ip:port or name>@<model>`` as llm-d's charts and simulators set it, or just a name of the endpoint;
ranks by the data-parallel rank in the batch.
"""

from time import perf_counter

from kvist_epp.engines.vllm.kv_events import rank_of
from kvist_epp.kvevents.feed import Feed
from kvist_epp.kvevents.followed import FollowedPublisher
from kvist_epp.kvevents.ports import Hub


class Door:
    """Bind mode: one SUB socket that all publishers connect to."""

    def __init__(self, hub: Hub, address: str) -> None:
        self.strangers = 0
        self._hub = hub
        self._feeds: dict[str, dict[int, Feed]] = {}
        self._busy: Feed | None = None
        self._line, self.address = hub.door(address, self.wake)

    def know(self, feeds: dict[FollowedPublisher, Feed]) -> None:
        """The publishers that may come in."""
        self._feeds = {}
        for followed, feed in feeds.items():
            for name in (*followed.topics, followed.endpoint):
                self._feeds.setdefault(name, {})[followed.rank] = feed

    def wake(self) -> None:
        """There is work."""
        self._hub.pump.ready(self)

    def work(self, deadline: float) -> bool:
        """Hands a message to its publisher and lets it learn before the next is read."""
        while perf_counter() < deadline:
            if self._busy is not None and self._busy.work(deadline):
                return True
            self._busy = None
            frames = self._line.receive()
            if frames is None:
                return False
            self._hand_over(frames)
        return True

    def close(self) -> None:
        """Closes the socket."""
        self._hub.pump.drop(self)
        self._line.close()

    def _hand_over(self, frames: list[bytes]) -> None:
        feed = self._find(frames)
        if feed is None:
            self.strangers += 1
            return
        feed.live(frames)
        self._busy = feed

    def _find(self, frames: list[bytes]) -> Feed | None:
        ranks = self._feeds.get(_endpoint_of(frames[0]), {})
        if len(ranks) < 2:
            return next(iter(ranks.values()), None)
        return ranks.get(rank_of(frames[-1]) or 0)


def _endpoint_of(topic: bytes) -> str:
    """``kv@<endpoint>@<model>`` as llm-d's charts set it, or the endpoint's name itself."""
    text = topic.decode(errors="replace")
    return text.split("@", 2)[1] if text.startswith("kv@") else text
