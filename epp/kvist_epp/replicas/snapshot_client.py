"""A warm start: the index of a replica that has it, instead of replaying thousands of batches of each engine.

From the start publishers' live events are held. Once the fleet is listed and every replica found was dialled,
a warm one of the same model is asked; what it gives is taken in publisher by publisher, and each goes on from
there by itself. Whatever it does not give, or gives wrong, the engines' rings are asked for, as ever.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from time import perf_counter
from typing import Final

from kvist_epp.errors import PeerError, SnapshotError
from kvist_epp.http2.tls import Certificates
from kvist_epp.index.snapshot.parts import Begin
from kvist_epp.index.snapshot.read import Reader
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.intake import Position
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.names import PEERS_SNAPSHOT_METHOD
from kvist_epp.replicas.chunks import Unpacker
from kvist_epp.replicas.client import Address, Conversation, conversation
from kvist_epp.replicas.replication_stats import Tally
from kvist_epp.replicas.updates import Hello, encode_want

LOOK_SECONDS: Final = 3.0
"""Patience for the other replicas to answer, once the fleet is listed."""
TAKE_SECONDS: Final = 30.0
"""Patience for all snapshots together."""
CHUNK_SECONDS: Final = 3.0
"""Patience for one chunk."""
CREDIT: Final = 16
"""Chunks that may be on their way: 2 MB."""
SLICE_SECONDS: Final = 0.002
"""Work between two turns of the event loop; health checks and events wait for no longer."""

logger = logging.getLogger(__name__)

Source = tuple[Address, Hello]
"""A replica that answered, and where."""


class WarmStart:
    """Once in the life of a process."""

    def __init__(
        self,
        learner: Learner,
        subscriber: Subscriber,
        *,
        hello: Callable[[], Hello],
        sources: Callable[[], Iterable[Source]],
        certificates: Certificates | None,
        tally: Tally,
    ) -> None:
        """``sources``: the replicas that may have an index, as far as they are known now. Publishers that
        ``subscriber`` follows from now on wait."""
        self.doing = "looking for other replicas"
        """What is under way, for people; empty when it is over."""
        self._learner = learner
        self._subscriber = subscriber
        self._hello = hello
        self._sources = sources
        self._certificates = certificates
        self._tally = tally
        subscriber.wait()

    async def run(self, listed: asyncio.Event, tried: Callable[[], Awaitable[None]]) -> None:
        """``listed``: the fleet is known; ``tried`` waits until every replica found was dialled."""
        try:
            await listed.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await tried()
            await self._take_all()
        finally:
            self.doing = ""
            self._subscriber.resume()

    async def _take_all(self) -> None:
        own = self._hello()
        for address, hello in list(self._sources()):
            if not self._subscriber.waiting():
                return
            if not hello.warm or (hello.version, hello.fingerprint) != (own.version, own.fingerprint):
                continue
            if await self._take_within(address, hello.replica):
                return

    async def _take_within(self, address: Address, replica: str) -> bool:
        self.doing = f"taking the index of {replica}"
        began = perf_counter()
        try:
            async with asyncio.timeout(TAKE_SECONDS):
                await self._take(address)
        except (PeerError, SnapshotError, TimeoutError) as error:
            self._tally.snapshots["failed"] += 1
            why = str(error) or "it took too long"
            logger.warning("the index of %s was not taken to its end: %s", replica, why)
            return False
        self._tally.snapshots["taken"] += 1
        self._tally.snapshot_seconds = perf_counter() - began
        logger.info(
            "took the index of %s: %d blocks of %d publishers in %.1f s",
            replica,
            self._tally.snapshot_blocks,
            self._tally.snapshot_publishers,
            self._tally.snapshot_seconds,
        )
        return True

    async def _take(self, address: Address) -> None:
        reader = Reader(self._learner, self._subscriber.waits, self._complete)
        wanted = self._subscriber.waiting()
        try:
            async with conversation(address, PEERS_SNAPSHOT_METHOD, self._certificates) as talk:
                await talk.write(encode_want(CREDIT, self._hello(), wanted), CHUNK_SECONDS)
                await self._read(talk, reader)
        finally:
            reader.close()
            self._tally.snapshot_blocks = reader.blocks

    async def _read(self, talk: Conversation, reader: Reader) -> None:
        unpacker, due = Unpacker(), perf_counter() + SLICE_SECONDS
        while not unpacker.complete:
            chunk = await talk.read(CHUNK_SECONDS)
            if chunk is None:
                raise PeerError("it ended before its last chunk")
            self._tally.received(len(chunk))
            for part in unpacker.parts(chunk):
                for _ in reader.feed(part):
                    due = await _breathe(due)
                due = await _breathe(due)
            if not unpacker.complete:
                await talk.write(encode_want(1), CHUNK_SECONDS)

    def _complete(self, begin: Begin) -> None:
        feed = self._subscriber.feed(begin.publisher)
        if feed is not None:
            feed.adopt(Position(begin.next, begin.mark))
            self._tally.snapshot_publishers += 1


async def _breathe(due: float) -> float:
    """Lets others run when it is time; returns when it is next."""
    if perf_counter() < due:
        return due
    await asyncio.sleep(0)
    return perf_counter() + SLICE_SECONDS
