"""Requests on their way: what was predicted of each, until events, the access log or time tell the truth."""

from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from kvist_epp.index.byte_index import Root
from kvist_epp.index.routing_history import Note


class Flight(msgspec.Struct, eq=False):
    """One request that was routed."""

    session: str
    endpoint: str
    """Key of the endpoint that serves it: the picked one, until it is known that another one does."""
    departed_at: float
    tokens: int
    """Of the prompt, as far as known."""
    indexed: int
    """Cached tokens by the index alone: when it was routed, then when the engine took it up."""
    root: Root = (None, None)
    prompt: bytes | None = None
    """Kept until the engine takes it up, to ask the index then."""
    handles: list[Note] = []
    """Its prompts in the routing history."""
    compared: bool = False
    """``indexed`` is of the moment when the engine took it up."""
    prefilled: bool = False
    told: bool = False
    """The engine has told how much was cached, or cannot (several prompts under one session)."""
    hostport: str = ""
    """Of ``endpoint``."""
    request_id: str = ""
    """``x-request-id``: tells apart the requests of one session; empty where the gateway gave none."""

    def fits(self, request_id: str, endpoint: str) -> bool:
        """Whether it may be the request with this id on this endpoint; an empty one says nothing."""
        same_id = not request_id or not self.request_id or self.request_id == request_id
        return same_id and (not endpoint or self.endpoint == endpoint)


class Flights:
    """By session; clients may use one session id for several requests, even at once."""

    KEPT_BYTES: Final = 256 << 20
    """Prompts kept at most; of further requests the engine's truth is not compared."""

    def __init__(self) -> None:
        self._kept = 0
        self._prefilled: deque[tuple[float, Flight]] = deque()
        self._by_session: dict[str, deque[Flight]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))

    @property
    def kept_bytes(self) -> int:
        """Prompts that wait for their engine to take them up."""
        return self._kept

    def departed(self, flight: Flight) -> None:
        """It was routed."""
        if flight.prompt is not None:
            self._kept += len(flight.prompt)
            if self._kept > self.KEPT_BYTES:
                self.release(flight)
        self._by_session.setdefault(flight.session, deque()).append(flight)

    def release(self, flight: Flight) -> bytes | None:
        """Its prompt, which is not kept any longer; None when it was not."""
        prompt, flight.prompt = flight.prompt, None
        self._kept -= len(prompt or b"")
        return prompt

    def release_all(self) -> None:
        """No prompt is kept any longer."""
        for flights in self._by_session.values():
            for flight in flights:
                self.release(flight)

    def of(self, session: str, endpoint: str) -> Flight | None:
        """Whose event this is: the oldest untold flight of the session on this endpoint, else the newest."""
        flights = [f for f in self._by_session.get(session, ()) if f.endpoint == endpoint]
        return next((f for f in flights if not f.told), flights[-1] if flights else None)

    def prefilled(self, flight: Flight, now: float) -> None:
        """Its engine told that the whole prompt is computed."""
        if not flight.prefilled:
            flight.prefilled = True
            self._prefilled.append((now, flight))

    def indexed_by(self, then: float) -> Iterator[Flight]:
        """Takes out those that were prefilled before ``then``."""
        while self._prefilled and self._prefilled[0][0] < then:
            yield self._prefilled.popleft()[1]

    def find(self, session: str, request_id: str = "", endpoint: str = "") -> Flight | None:
        """The oldest of the session that fits what else is known of it."""
        flights = self._by_session.get(session, ())
        return next((flight for flight in flights if flight.fits(request_id, endpoint)), None)

    def landed(self, session: str, request_id: str = "", endpoint: str = "") -> Flight | None:
        """It has ended (the oldest that fits, where a session has several)."""
        flight = self.find(session, request_id, endpoint)
        if flight is None:
            return None
        flights = self._by_session[session]
        flights.remove(flight)
        self.release(flight)
        if not flights:
            del self._by_session[session]
        return flight
