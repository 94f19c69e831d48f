"""Follows one address: dials, takes the other replica's load in, and begins anew when it breaks off."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvist_epp.errors import PeerError, ProtocolError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import PEERS_FOLLOW_METHOD
from kvist_epp.replicas.client import Address, Conversation, conversation
from kvist_epp.replicas.remote_load import SILENCE_SECONDS, Book
from kvist_epp.replicas.replication_stats import Tally
from kvist_epp.replicas.updates import Hello, Update, decode, encode_heard

FIRST_SECONDS: Final = 2.0
"""Patience for a connection and the first answer."""
PAUSE_SECONDS: Final = (0.1, 2.0)
"""After a conversation broke off: the first pause, doubled up to the last."""
TWIN_SECONDS: Final = 5.0
"""How often an address is tried that led to a replica followed elsewhere (one of two address families)."""


logger = logging.getLogger(__name__)


class State(Enum):
    """What an address has led to."""

    NEW = "new"
    FOLLOWED = "followed"
    SELF = "self"
    TWIN = "twin"
    """A replica that is followed at another address."""
    LEFT = "left"
    """A replica that said farewell."""
    BROKEN = "broken"


@dataclass(slots=True, eq=False)
class Shared:
    """What all links have in common."""

    hello: Callable[[], Hello]
    certificates: Certificates | None
    book: Book
    tally: Tally
    clock: Callable[[], float]
    told: Callable[[Sequence[Ended]], None]
    """Told of our requests that have ended, by whoever a gateway told."""
    followed: dict[str, "Link"]
    """By replica id."""


class Link:
    """``run`` goes on until the address proves to be ours; ``wanted`` false ends it at the next break."""

    def __init__(self, address: Address, shared: Shared) -> None:
        self.address = address
        self.state = State.NEW
        self.problem = ""
        """Why the last conversation broke off; empty while one goes on."""
        self.hello: Hello | None = None
        """Of whoever answered last."""
        self.wanted = True
        self.tried = asyncio.Event()
        """It was dialled once, with whatever result."""
        self._shared = shared
        self._pause = PAUSE_SECONDS[0]

    async def run(self) -> None:
        """Follow, again and again."""
        while self.wanted:
            await self._once()
            if self.state is State.SELF:
                return
            await asyncio.sleep(self._next_pause())

    async def _once(self) -> None:
        certificates = self._shared.certificates
        try:
            async with conversation(self.address, PEERS_FOLLOW_METHOD, certificates) as talk:
                await self._follow(talk)
        except (PeerError, ProtocolError, OSError) as error:
            self._broke_off(str(error))
        except Exception as error:
            logger.exception("following %s", self.address)  # a bug must not end the other conversations
            self._broke_off(type(error).__name__)
        finally:
            if self.hello is not None and self._shared.followed.get(self.hello.replica) is self:
                del self._shared.followed[self.hello.replica]

    def _broke_off(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("replica at %s: %s", self.address, problem)
        self.problem = problem
        self._shared.tally.broken += self.state is State.FOLLOWED
        self.state = State.BROKEN
        self.tried.set()

    async def _follow(self, talk: Conversation) -> None:
        await talk.write(encode_heard(self._shared.hello()), FIRST_SECONDS)
        first = await self._read(talk, FIRST_SECONDS)
        self.state = self._met(first)
        self.tried.set()
        while self.state is State.FOLLOWED and first is not None:
            self._take(first)
            await talk.write(encode_heard(seq=first.seq), SILENCE_SECONDS)
            if first.leaving:
                self.state = State.LEFT
                return
            first = await self._read(talk, SILENCE_SECONDS)
        if self.state is State.FOLLOWED:
            raise PeerError("it ended the conversation")

    async def _read(self, talk: Conversation, patience: float) -> Update | None:
        data = await talk.read(patience)
        if not data:
            return None
        self._shared.tally.received(len(data))
        return decode(data)

    def _met(self, first: Update | None) -> State:
        if first is None or first.hello is None:
            raise ProtocolError("no replica of this protocol")
        self.hello = first.hello
        replica = first.hello.replica
        if replica == self._shared.hello().replica:
            return State.SELF
        if self._shared.followed.setdefault(replica, self) is not self:
            return State.TWIN
        logger.info("following %s at %s", replica, self.address)
        self.problem, self._pause = "", PAUSE_SECONDS[0]
        self._shared.book.begin(replica, self._shared.clock())
        return State.FOLLOWED

    def _take(self, update: Update) -> None:
        assert self.hello is not None
        self._shared.book.take(self.hello.replica, update, self._shared.clock())
        if update.ended:
            self._shared.tally.passed["received"] += len(update.ended)
            self._shared.told(update.ended)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(self._pause * 2, PAUSE_SECONDS[1])
        return (TWIN_SECONDS if self.state is State.TWIN else pause) * random.uniform(0.5, 1.0)
