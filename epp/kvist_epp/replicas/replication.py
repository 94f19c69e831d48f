"""Other replicas of this picker, put together: who they are, what they routed, whose index a new one takes.

``serving`` opens it when ``--peers`` is given. It hooks itself into the picker (events and ended requests of
what was not routed here) and the ledger, and into nothing else.
"""

import asyncio
import hashlib
import logging
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from kvist_epp.app import listeners as ports
from kvist_epp.app.shutdown import Ending
from kvist_epp.director.completion import Aftermath
from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.errors import CertificateError, SettingsError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.http2.call import Method
from kvist_epp.http2.tls import Certificates
from kvist_epp.kvevents.observed import Observed
from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.in_flight import Flight
from kvist_epp.names import PEERS_FOLLOW_METHOD, PEERS_SNAPSHOT_METHOD
from kvist_epp.prompt.model import Model
from kvist_epp.replicas.followers import Followers
from kvist_epp.replicas.members import Members
from kvist_epp.replicas.page import document
from kvist_epp.replicas.peer_connection import Link, Shared, State
from kvist_epp.replicas.prefixes import HURRY_TOKENS, LEAST_TOKENS, Prefix
from kvist_epp.replicas.remote_load import Book
from kvist_epp.replicas.replication_stats import Report, Tally
from kvist_epp.replicas.snapshot_client import Source, WarmStart
from kvist_epp.replicas.snapshot_server import Giver
from kvist_epp.replicas.updates import Hello
from kvist_epp.settings.replica_addresses import only_here, peers_of
from kvist_epp.settings.settings import Settings

LOOK_SECONDS: Final = 0.5
"""Between two looks for silent replicas and old requests."""
HURRY_SECONDS: Final = 0.02
"""From a long new prompt to the update that tells of it: several at once go together."""
FAREWELL_SECONDS: Final = 1.0
"""How long a replica that goes waits for the others to take in its farewell."""

logger = logging.getLogger(__name__)


class Peers:
    """The parts; ``opened`` starts and ends them."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        certificates: Certificates | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        picker = membership.picker
        self.ready: Callable[[], bool] = bool
        """Whether this replica is ready, and its index to be had."""
        self.tally = Tally()
        self.book = Book(picker.replica, picker.ledger, picker.lookup.members.__contains__)
        self.followers = Followers(
            self._hello, picker.ledger, self.book, self.tally, clock, describe=self._describe
        )
        self._membership = membership
        self._picker = picker
        self._clock = clock
        self._after = Aftermath(picker)
        self._interval = settings.gossip_interval
        self._fingerprint = fingerprint(picker.model)
        self._listed = asyncio.Event()
        self._hurry = asyncio.Event()
        """A prompt was sent off that other replicas should know of at once."""
        self._before = picker.departed
        shared = Shared(self._hello, certificates, self.book, self.tally, clock, told=self._told, followed={})
        self.members = Members(peers_of(settings.peers), lambda address: Link(address, shared))
        self._giver, self._warm = self._snapshots(certificates)

    def methods(self) -> dict[str, Method]:
        """What is served to other replicas."""
        follow: dict[str, Method] = {PEERS_FOLLOW_METHOD: self.followers.start}
        return follow | ({PEERS_SNAPSHOT_METHOD: self._giver.start} if self._giver else {})

    def waiting(self) -> str:
        """What is waited for before this replica may say it is ready; empty when nothing is."""
        return self._warm.doing if self._warm is not None else ""

    def report(self) -> Report:
        """For the metrics page."""
        return Report(self.tally, self.book.counts(), len(self.book), self.followers.lag())

    def document(self) -> dict[str, Any]:
        """For ``/debug/peers``."""
        found = document(self.book, self.members.links.values(), self.followers, self.tally, self._clock())
        return {
            "replica": self._picker.replica,
            "fingerprint": self._fingerprint.hex()[:16],
            "problem": self.members.problem,
            "waiting_for": self.waiting(),
            **found,
        }

    async def run(self) -> None:
        """Tell and look, for ever."""
        look_at = 0.0
        while True:
            if self._membership.fleet is not None:
                self._listed.set()
            self.followers.tick()
            if (now := self._clock()) >= look_at:
                self.book.look(now)
                self._picker.shared_with(sum(1 for _ in self._sources()))
                look_at = now + LOOK_SECONDS
            await self._pause()

    async def warm(self) -> None:
        """Take the index of another replica, if one has it."""
        if self._warm is not None:
            await self._warm.run(self._listed, self.members.tried)

    async def leave(self) -> None:
        """Nothing more will be routed here: hand over what is open, to all who take it in time."""
        until = self._clock() + FAREWELL_SECONDS
        self.followers.tick(leaving=True)
        while self._clock() < until and not self.followers.told_all:
            await asyncio.sleep(0.01)
            self.followers.tick(leaving=True)

    def hook(self) -> None:
        """From now on the picker tells what concerns others."""
        self._picker.stranger = self._observed
        self._picker.elsewhere = self._elsewhere
        self._picker.departed = self._departed
        self._picker.lookup.elsewhere = self.book.prefixes.match
        self._picker.metrics.gauges.peers = self.report

    def _snapshots(self, certificates: Certificates | None) -> tuple[Giver | None, WarmStart | None]:
        learner, subscriber = self._membership.learner, self._membership.subscriber
        if learner is None or subscriber is None:
            return None, None
        members = self._picker.lookup.members
        giver = Giver(
            self._hello,
            learner,
            subscriber,
            believed=lambda key: key in members and members[key].precise,
            tally=self.tally,
        )
        warm = WarmStart(
            learner,
            subscriber,
            hello=self._hello,
            sources=self._sources,
            certificates=certificates,
            tally=self.tally,
        )
        return giver, warm

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval):
                await self._hurry.wait()
                self._hurry.clear()
                await asyncio.sleep(HURRY_SECONDS)

    def _departed(self, flight: Flight) -> None:
        self._before(flight)
        if flight.prompt is not None and flight.tokens - flight.indexed >= HURRY_TOKENS:
            self._hurry.set()

    def _describe(self, request: Request) -> Prefix | None:
        """Prompts with much that is new to their endpoint; our own ledger is told what they are, too."""
        if request.uncached < LEAST_TOKENS:
            return None
        flight = self._picker.flights.find(request.session, endpoint=request.load.key)
        if flight is None or flight.prompt is None:
            return None
        prefix = Prefix.of(flight.root, flight.prompt)
        self._picker.ledger.described(request, prefix.content)
        return prefix

    def _hello(self) -> Hello:
        return Hello(self._picker.replica, self._fingerprint, self.ready())

    def _sources(self) -> Iterator[Source]:
        for link in list(self.members.links.values()):
            if link.state is State.FOLLOWED and link.hello is not None:
                yield link.address, link.hello

    def _observed(self, seen: Observed) -> None:
        """An event of a request that another replica routed: how far its prefill is."""
        request = self.book.of(seen.session or "", seen.endpoint)
        if request is not None:
            left = self._picker.left(seen, seen.endpoint, request.total)
            self._picker.ledger.advanced(request, left, self._clock(), computed=seen.prefilled)

    def _elsewhere(self, entry: Ended) -> None:
        """A gateway told us what another replica must know."""
        self.tally.passed["sent"] += self.book.ended(entry, self._clock())

    def _told(self, entries: Sequence[Ended]) -> None:
        """Another replica told us what a gateway told it."""
        for entry in entries:
            session = entry.session or ""
            if self._picker.flights.find(session, entry.request_id or "") is not None:
                self._after.ended([entry])
            else:
                self.book.orphan_ended(session, self._clock())


@asynccontextmanager
async def opened(settings: Settings, membership: Membership, ending: Ending) -> AsyncIterator[Peers]:
    """Opens the port and follows the others until the end of the context. Raises SettingsError."""
    certificates = _certificates(settings)
    peers = Peers(settings, membership, certificates, clock=membership.picker.clock)
    host = settings.host or ("localhost" if _plain_here(settings) else "")
    server = await ports.listen(
        replace(settings, host=host),
        peers.methods(),
        settings.peer_port,
        "--peer-port",
        certificates,
        tallies=membership.picker.metrics.ports,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        peers.hook()
        ending.keep(stack, peers.run(), "peers")
        ending.keep(stack, peers.members.run(), "peers' addresses")
        if certificates is not None:
            ending.keep(stack, certificates.run(), "peers' certificates")
        stack.push_async_callback(_stop, asyncio.create_task(peers.warm(), name="warm start"))
        yield peers


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the warm start failed", exc_info=error)


def _certificates(settings: Settings) -> Certificates | None:
    path = settings.peer_cert_path
    if not path:
        return None
    try:
        found = Certificates(cert_path=path, client_ca_path=path)
    except CertificateError as error:
        raise SettingsError(f"--peer-cert-path: {error}") from error
    if not found.ca_pem():
        raise SettingsError(f"--peer-cert-path: no ca.crt in {path}")
    return found


def _plain_here(settings: Settings) -> bool:
    plain = not (settings.peer_cert_path or settings.peer_insecure)
    return plain and only_here(settings.peers, settings.host, os.environ)


def fingerprint(model: Model | None) -> bytes:
    """Equal where equal tokens mean equal bytes; empty where no blocks are learned."""
    if model is None or not model.faithful:
        return b""
    digest = hashlib.sha256(array("I", map(len, model.pieces)).tobytes())
    digest.update(b"".join(model.pieces))
    return digest.digest()
