"""Followers and links on real sockets: what they tell, and every way a conversation can end."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.epp.http2.certificates import Mounted, Pki
from tests.epp.replicas.talking import HOST, POD, ended, listen, talkers, until

from kvist_epp.errors import PeerError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.http2.call import Call, Sink
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import PEERS_FOLLOW_METHOD
from kvist_epp.replicas import followers, outgoing
from kvist_epp.replicas.client import Address, Conversation, conversation
from kvist_epp.replicas.members import Members, addresses
from kvist_epp.replicas.outgoing import BACKLOG, ROWS
from kvist_epp.replicas.peer_connection import State
from kvist_epp.replicas.updates import decode, encode_heard
from kvist_sim.relays import TcpRelay


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_a_follower_is_told_what_is_open_and_what_changes(transport: str) -> None:
    """On either server: more requests than one update takes, ends, and entries of the access log."""
    async with talkers("a", "b", transport=transport) as (a, b):
        a.routed(*(f"a.{number}" for number in range(2 * ROWS + 1)))
        link = b.follow(a.port)
        await until(lambda: len(b.book) == 2 * ROWS + 1)
        entry = Ended("b.7", "id", "10.0.0.1:8000", None, 200, None, None)
        a.book.mail("b").append(entry)
        for number in range(2 * ROWS):
            a.ledger.settled(f"a.{number}", time.monotonic())
        await until(lambda: len(b.book) == 1)
        await until(lambda: b.told)

        assert (link.state, b.told) == (State.FOLLOWED, [entry])
        assert b.ledger.running(POD) == 1
        assert b.shared.tally.octets["received"] > 0
        assert a.followers.lag() > 0


async def test_a_replica_that_dies_is_dialled_until_it_is_back() -> None:
    """A connection that is cut loses nothing for good."""
    async with talkers("a", "b") as (a, b):
        a.routed("a.1")
        link = b.follow(a.port)
        await until(lambda: len(b.book) == 1)
        await a.shut()
        await until(lambda: link.state is State.BROKEN)
        problem = link.problem
        a.ledger.settled("a.1", time.monotonic())
        a.routed("a.2")
        await a.serve()
        await until(lambda: b.book.of("a.2", POD))

        assert problem
        assert (len(b.book), b.book.of("a.1", POD), link.problem) == (1, None, "")
        assert b.shared.tally.broken == 1


async def test_a_replica_finds_out_that_an_address_is_its_own() -> None:
    """Names lead to all replicas, oneself included; nothing of an address tells."""
    async with talkers("a") as (a,):
        link = a.follow(a.port)
        await until(lambda: link.state is State.SELF)

        assert (a.book.peers, a.followers.calls) == ({}, {})


async def test_of_two_addresses_of_one_replica_one_is_followed() -> None:
    """IPv4 and IPv6, or a name given twice; when the one breaks the other takes over."""
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        first = b.follow(relay.port)
        await until(lambda: first.state is State.FOLLOWED)
        second = b.follow(a.port)
        a.book.mail("b").append(Ended("b.7", "id", None, None, 200, None, None))
        await until(lambda: second.state is State.TWIN)
        await until(lambda: b.told)
        followed = list(b.shared.followed.values())

        assert (followed, len(a.followers.calls), first.state) == ([first], 1, State.FOLLOWED)


async def test_cancelled_links_leave_nothing_behind() -> None:
    """In the middle of a conversation: the connection goes, and the other side forgets its follower."""
    async with talkers("a", "b") as (a, b):
        link = b.follow(a.port)
        await until(lambda: link.state is State.FOLLOWED)
        await ended(b.tasks)
        await until(lambda: not a.followers.calls)

        assert b.shared.followed == {}


async def test_a_follower_that_reads_nothing_costs_one_update_and_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parted by a network that loses packets: picking goes on, memory does not grow, the call ends."""
    monkeypatch.setattr(followers, "STALLED_SECONDS", 0.5)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is State.FOLLOWED)
        await until(lambda: "b" in a.followers.calls)
        relay.part()
        call = a.followers.calls["b"]
        for start in range(0, BACKLOG + 5000, 1000):
            a.routed(*(f"a.{number}" for number in range(start, start + 1000)))
            await asyncio.sleep(0)
        await until(lambda: not a.followers.calls)

        assert call.outgoing.waits
        assert len(call.outgoing._changes) <= BACKLOG
        relay.heal()
        await until(lambda: len(b.book) == BACKLOG + 5000)


async def test_a_follower_far_behind_is_told_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """More changes than are kept: not one by one, but what is open now."""
    monkeypatch.setattr(outgoing, "BACKLOG", 50)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is State.FOLLOWED)
        await until(lambda: "b" in a.followers.calls)
        relay.part()
        a.routed(*(f"a.{number}" for number in range(200)))
        await until(lambda: a.followers.calls["b"].outgoing.waits)
        for number in range(190):
            a.ledger.settled(f"a.{number}", time.monotonic())
        await asyncio.sleep(0.1)
        relay.heal()
        await until(lambda: len(b.book) == 10)

        assert link.state is State.FOLLOWED


async def test_silence_ends_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open connections are given up after a bounded time."""
    monkeypatch.setattr("kvist_epp.replicas.peer_connection.SILENCE_SECONDS", 0.3)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is State.FOLLOWED)
        relay.part()
        await until(lambda: link.state is State.BROKEN)

        assert "silent" in link.problem or "took nothing" in link.problem


class Babbler:
    """A service of the right name that says something else."""

    def __init__(self, sink: Sink, words: list[bytes]) -> None:
        self._sink = sink
        self._words = words

    def message(self, data: bytes) -> None:
        """Answers with what it has."""
        for word in self._words:
            self._sink.send(word)
        self._sink.close()

    def half_closed(self) -> None:
        """Whatever."""

    def cancelled(self) -> None:
        """Whatever."""


@pytest.mark.parametrize("words", [[], [b""], [b"\xff\xff"], [encode_heard(seq=3)]])
async def test_whoever_speaks_otherwise_is_no_replica(words: list[bytes]) -> None:
    """Another service on the port, or another version: tried again, never believed."""

    def start(sink: Sink) -> Call:
        return Babbler(sink, words)

    server = await listen({PEERS_FOLLOW_METHOD: start})
    async with talkers("b") as (b,):
        link = b.follow(server.port)
        await until(lambda: link.state is State.BROKEN)

        assert link.problem
        assert b.book.peers == {}
    await server.close()


async def test_a_port_without_the_service_is_no_replica() -> None:
    """An ext_proc port given by mistake: the problem says what is missing."""
    server = await listen({})
    async with talkers("b") as (b,):
        link = b.follow(server.port)
        await until(lambda: link.state is State.BROKEN)

        assert "unimplemented" in link.problem or "--peer-port" in link.problem
    await server.close()


async def drained(talk: Conversation) -> None:
    """Reads to the end."""
    while await talk.read(5):
        pass


async def test_strangers_are_refused() -> None:
    """No hello, no protobuf, an acknowledgement of nothing: each ends its own call only."""
    async with talkers("a") as (a,):
        address = Address(HOST, HOST, a.port)
        for words in (
            [encode_heard(seq=1)],
            [b"\xff\xff"],
            [encode_heard(a.hello()._replace(replica="x")), encode_heard(seq=9)],
        ):
            async with conversation(address, PEERS_FOLLOW_METHOD, None) as talk:
                for word in words:
                    await talk.write(word, 5)
                with pytest.raises(PeerError, match="invalid argument"):
                    await drained(talk)
        assert a.followers.calls == {}


async def test_a_replica_that_is_followed_anew_ends_the_old_conversation() -> None:
    """A half-open connection of a follower does not stand in the way of its next one."""
    async with talkers("a", "b") as (a, b):
        hello = encode_heard(b.hello())
        address = Address(HOST, HOST, a.port)
        async with (
            conversation(address, PEERS_FOLLOW_METHOD, None) as old,
            conversation(address, PEERS_FOLLOW_METHOD, None) as new,
        ):
            await old.write(hello, 5)
            first = decode(await old.read(5) or b"")
            await new.write(hello, 5)
            await new.read(5)
            await old.write(encode_heard(seq=1), 5)
            await new.write(encode_heard(seq=1), 5)
            with pytest.raises(PeerError, match="followed anew"):
                await drained(old)
        await until(lambda: not a.followers.calls)

        assert (first.seq, first.whole_begins, first.whole_ends) == (1, True, True)


@pytest.fixture
def secured(tmp_path: Path) -> list[Certificates]:
    """Certificates of one authority, and one of another."""
    good, bad = Pki("good"), Pki("bad")
    found = []
    for number, pki in enumerate((good, good, bad)):
        folder = Mounted(tmp_path / str(number))
        folder.write(*pki.pair("replicas.test"), ca=pki.pem)
        found.append(Certificates(cert_path=str(folder.path), client_ca_path=str(folder.path)))
    return found


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_mutual_tls_lets_in_one_authority_alone(transport: str, secured: list[Certificates]) -> None:
    """Both sides must show a certificate of it, good for the name that was dialled."""
    names = ("a", "b", "c", "d")
    certificates = (*secured, None)
    async with talkers(*names, transport=transport, certificates=certificates) as (a, b, c, d):
        friend = b.follow(a.port, "replicas.test")
        misnamed = b.follow(a.port, "other.test")
        stranger, plain = c.follow(a.port, "replicas.test"), d.follow(a.port)
        await until(lambda: friend.state is State.FOLLOWED)
        for link in (misnamed, stranger, plain):
            await link.tried.wait()

        assert {link.state for link in (misnamed, stranger, plain)} == {State.BROKEN}
        await until(lambda: list(a.followers.calls) == ["b"])


async def test_a_certificate_that_was_replaced_is_used_for_the_next_conversation(tmp_path: Path) -> None:
    """Also by replicas that were refused before; nothing is restarted."""
    old, new = Pki("old"), Pki("new")
    folders = [Mounted(tmp_path / name) for name in "ab"]
    folders[0].write(*new.pair("replicas.test"), ca=new.pem)
    folders[1].write(*old.pair("replicas.test"), ca=old.pem)
    found = [Certificates(cert_path=str(one.path), client_ca_path=str(one.path)) for one in folders]
    async with talkers("a", "b", certificates=found) as (a, b):
        link = b.follow(a.port, "replicas.test")
        await link.tried.wait()
        before = link.state
        folders[1].write(*new.pair("replicas.test"), ca=new.pem)
        await found[1].look()
        await until(lambda: link.state is State.FOLLOWED)

        assert before is State.BROKEN


async def test_names_are_resolved_again_and_again() -> None:
    """New addresses are followed; one that is gone ends with its conversation, not before."""
    async with talkers("a", "b") as (a, b):
        members = Members([], b.follow_only)
        here = Address(HOST, HOST, a.port)
        members.follow({here}, keep=False)
        link = members.links[here]
        await until(lambda: link.state is State.FOLLOWED)
        members.follow(set(), keep=False)
        still = link.state
        await a.shut()
        await until(lambda: link.state is State.BROKEN)
        while here in members.links:
            members.follow(set(), keep=False)
            await asyncio.sleep(0.01)

        assert still is State.FOLLOWED


async def test_a_name_that_is_not_known_says_so_and_is_asked_again() -> None:
    """A Service that is not there yet; replicas known before are kept meanwhile."""
    async with talkers("b") as (b,):
        members = Members([("no.such.name.invalid", 1), (HOST, b.port)], b.follow_only)
        task = asyncio.create_task(members.run())
        await members.tried()
        states = [link.state for link in members.links.values()]
        await ended([task])

        assert "no.such.name.invalid" in members.problem
        assert (states, members.links) == ([State.SELF], {})


async def test_localhost_has_its_addresses() -> None:
    """Every address of a name, each once."""
    found = await addresses("localhost", 9004)

    assert {one.ip for one in found} <= {"127.0.0.1", "::1"}
    assert {(one.host, one.port) for one in found} == {("localhost", 9004)}


def test_addresses_are_written_as_grpc_wants_them() -> None:
    """Brackets around IPv6."""
    assert str(Address("x", "::1", 9)) == "[::1]:9"
    assert str(Address("x", "10.0.0.1", 9)) == "10.0.0.1:9"
