"""LoadServer and links on real sockets: what they tell, and every way a conversation can end."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.epp.http2.certificates import Mounted, Pki
from tests.epp.replicas.socket_replicas import HOST, POD, ended, listen, talkers, until

from kvist_epp.errors import ReplicaError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.call import Call, Sink
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import REPLICA_FOLLOW_METHOD
from kvist_epp.replicas import load_server
from kvist_epp.replicas.load_server import MAX_CHANGES, MAX_ROWS
from kvist_epp.replicas.messages import decode_update, encode_ack
from kvist_epp.replicas.replica_connection import ConnectionState, ReplicaDirectory, resolve
from kvist_epp.replicas.rpc_client import ReplicaAddress, RpcStream, open_stream
from kvist_sim.relays import TcpRelay


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_a_follower_is_told_what_is_open_and_what_changes(transport: str) -> None:
    """On either server: more requests than one update takes, ends, and entries of the access log."""
    async with talkers("a", "b", transport=transport) as (a, b):
        a.routed(*(f"a.{number}" for number in range(2 * MAX_ROWS + 1)))
        link = b.follow(a.port)
        await until(lambda: len(b.remote_load) == 2 * MAX_ROWS + 1)
        entry = AccessLogEntry("b.7", "id", "10.0.0.1:8000", None, 200, None, None)
        a.remote_load.outbox("b").append(entry)
        for number in range(2 * MAX_ROWS):
            a.ledger.settled(f"a.{number}", time.monotonic())
        await until(lambda: len(b.remote_load) == 1)
        await until(lambda: b.told)

        assert (link.state, b.told) == (ConnectionState.FOLLOWED, [entry])
        assert b.ledger.running(POD) == 1
        assert b.context.stats.message_bytes["received"] > 0
        assert a.load_server.lag() > 0


async def test_a_replica_that_dies_is_dialled_until_it_is_back() -> None:
    """A connection that is cut loses nothing for good."""
    async with talkers("a", "b") as (a, b):
        a.routed("a.1")
        link = b.follow(a.port)
        await until(lambda: len(b.remote_load) == 1)
        await a.shut()
        await until(lambda: link.state is ConnectionState.BROKEN)
        problem = link.problem
        a.ledger.settled("a.1", time.monotonic())
        a.routed("a.2")
        await a.serve()
        await until(lambda: b.remote_load.find("a.2", POD))

        assert problem
        assert (len(b.remote_load), b.remote_load.find("a.1", POD), link.problem) == (1, None, "")
        assert b.context.stats.broken == 1


async def test_a_replica_finds_out_that_an_address_is_its_own() -> None:
    """Names lead to all replicas, oneself included; nothing of an address tells."""
    async with talkers("a") as (a,):
        link = a.follow(a.port)
        await until(lambda: link.state is ConnectionState.SELF)

        assert (a.remote_load.replicas, a.load_server.followers) == ({}, {})


async def test_of_two_addresses_of_one_replica_one_is_followed() -> None:
    """IPv4 and IPv6, or a name given twice; when the one breaks the other takes over."""
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        first = b.follow(relay.port)
        await until(lambda: first.state is ConnectionState.FOLLOWED)
        second = b.follow(a.port)
        a.remote_load.outbox("b").append(AccessLogEntry("b.7", "id", None, None, 200, None, None))
        await until(lambda: second.state is ConnectionState.DUPLICATE)
        await until(lambda: b.told)
        followed = list(b.context.followed.values())

        assert (followed, len(a.load_server.followers), first.state) == ([first], 1, ConnectionState.FOLLOWED)


async def test_cancelled_links_leave_nothing_behind() -> None:
    """In the middle of a conversation: the connection goes, and the other side forgets its follower."""
    async with talkers("a", "b") as (a, b):
        link = b.follow(a.port)
        await until(lambda: link.state is ConnectionState.FOLLOWED)
        await ended(b.tasks)
        await until(lambda: not a.load_server.followers)

        assert b.context.followed == {}


async def test_a_follower_that_reads_nothing_costs_one_update_and_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parted by a network that loses packets: picking goes on, memory does not grow, the call ends."""
    monkeypatch.setattr(load_server, "STALLED_SECONDS", 0.5)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is ConnectionState.FOLLOWED)
        await until(lambda: "b" in a.load_server.followers)
        relay.part()
        call = a.load_server.followers["b"]
        for start in range(0, MAX_CHANGES + 5000, 1000):
            a.routed(*(f"a.{number}" for number in range(start, start + 1000)))
            await asyncio.sleep(0)
        await until(lambda: not a.load_server.followers)

        assert call.updates.in_flight
        assert len(call.updates._changes) <= MAX_CHANGES
        relay.heal()
        await until(lambda: len(b.remote_load) == MAX_CHANGES + 5000)


async def test_a_follower_far_behind_is_told_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """More changes than are kept: not one by one, but what is open now."""
    monkeypatch.setattr(load_server, "MAX_CHANGES", 50)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is ConnectionState.FOLLOWED)
        await until(lambda: "b" in a.load_server.followers)
        relay.part()
        a.routed(*(f"a.{number}" for number in range(200)))
        await until(lambda: a.load_server.followers["b"].updates.in_flight)
        for number in range(190):
            a.ledger.settled(f"a.{number}", time.monotonic())
        await asyncio.sleep(0.1)
        relay.heal()
        await until(lambda: len(b.remote_load) == 10)

        assert link.state is ConnectionState.FOLLOWED


async def test_silence_ends_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open connections are given up after a bounded time."""
    monkeypatch.setattr("kvist_epp.replicas.replica_connection.SILENCE_SECONDS", 0.3)
    async with talkers("a", "b") as (a, b), TcpRelay(a.port) as relay:
        link = b.follow(relay.port)
        await until(lambda: link.state is ConnectionState.FOLLOWED)
        relay.part()
        await until(lambda: link.state is ConnectionState.BROKEN)

        assert "no message for" in link.problem or "could not be sent" in link.problem


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


@pytest.mark.parametrize("words", [[], [b""], [b"\xff\xff"], [encode_ack(seq=3)]])
async def test_whoever_speaks_otherwise_is_no_replica(words: list[bytes]) -> None:
    """Another service on the port, or another version: tried again, never is_precise."""

    def start(sink: Sink) -> Call:
        return Babbler(sink, words)

    server = await listen({REPLICA_FOLLOW_METHOD: start})
    async with talkers("b") as (b,):
        link = b.follow(server.port)
        await until(lambda: link.state is ConnectionState.BROKEN)

        assert link.problem
        assert b.remote_load.replicas == {}
    await server.close()


async def test_a_port_without_the_service_is_no_replica() -> None:
    """An ext_proc port given by mistake: the problem says what is missing."""
    server = await listen({})
    async with talkers("b") as (b,):
        link = b.follow(server.port)
        await until(lambda: link.state is ConnectionState.BROKEN)

        assert "unimplemented" in link.problem or "--peer-port" in link.problem
    await server.close()


async def drained(stream: RpcStream) -> None:
    """Reads to the end."""
    while await stream.read(5):
        pass


async def test_strangers_are_refused() -> None:
    """No handshake, no protobuf, an acknowledgement of nothing: each ends its own call only."""
    async with talkers("a") as (a,):
        address = ReplicaAddress(HOST, HOST, a.port)
        for words in (
            [encode_ack(seq=1)],
            [b"\xff\xff"],
            [encode_ack(a.handshake()._replace(replica="x")), encode_ack(seq=9)],
        ):
            async with open_stream(address, REPLICA_FOLLOW_METHOD, None) as stream:
                for word in words:
                    await stream.write(word, 5)
                with pytest.raises(ReplicaError, match="invalid argument"):
                    await drained(stream)
        assert a.load_server.followers == {}


async def test_a_replica_that_is_followed_anew_ends_the_old_conversation() -> None:
    """A half-open connection of a follower does not stand in the way of its next one."""
    async with talkers("a", "b") as (a, b):
        handshake = encode_ack(b.handshake())
        address = ReplicaAddress(HOST, HOST, a.port)
        async with (
            open_stream(address, REPLICA_FOLLOW_METHOD, None) as old,
            open_stream(address, REPLICA_FOLLOW_METHOD, None) as new,
        ):
            await old.write(handshake, 5)
            first = decode_update(await old.read(5) or b"")
            await new.write(handshake, 5)
            await new.read(5)
            await old.write(encode_ack(seq=1), 5)
            await new.write(encode_ack(seq=1), 5)
            with pytest.raises(ReplicaError, match="replaced by a newer call"):
                await drained(old)
        await until(lambda: not a.load_server.followers)

        assert (first.seq, first.full_begins, first.full_ends) == (1, True, True)


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
        await until(lambda: friend.state is ConnectionState.FOLLOWED)
        for link in (misnamed, stranger, plain):
            await link.tried.wait()

        assert {link.state for link in (misnamed, stranger, plain)} == {ConnectionState.BROKEN}
        await until(lambda: list(a.load_server.followers) == ["b"])


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
        await until(lambda: link.state is ConnectionState.FOLLOWED)

        assert before is ConnectionState.BROKEN


async def test_names_are_resolved_again_and_again() -> None:
    """New addresses are followed; one that is gone ends with its conversation, not before."""
    async with talkers("a", "b") as (a, b):
        directory = ReplicaDirectory([], b.follow_only)
        here = ReplicaAddress(HOST, HOST, a.port)
        directory.update({here}, keep=False)
        link = directory.connections[here]
        await until(lambda: link.state is ConnectionState.FOLLOWED)
        directory.update(set(), keep=False)
        still = link.state
        await a.shut()
        await until(lambda: link.state is ConnectionState.BROKEN)
        while here in directory.connections:
            directory.update(set(), keep=False)
            await asyncio.sleep(0.01)

        assert still is ConnectionState.FOLLOWED


async def test_a_name_that_is_not_known_says_so_and_is_asked_again() -> None:
    """A Service that is not there yet; replicas known before are kept meanwhile."""
    async with talkers("b") as (b,):
        directory = ReplicaDirectory([("no.such.name.invalid", 1), (HOST, b.port)], b.follow_only)
        task = asyncio.create_task(directory.run())
        await directory.all_tried()
        states = [link.state for link in directory.connections.values()]
        await ended([task])

        assert "no.such.name.invalid" in directory.problem
        assert (states, directory.connections) == ([ConnectionState.SELF], {})


async def test_localhost_has_its_addresses() -> None:
    """Every address of a name, each once."""
    found = await resolve("localhost", 9004)

    assert {one.ip for one in found} <= {"127.0.0.1", "::1"}
    assert {(one.host, one.port) for one in found} == {("localhost", 9004)}


def test_addresses_are_written_as_grpc_wants_them() -> None:
    """Brackets around IPv6."""
    assert str(ReplicaAddress("x", "::1", 9)) == "[::1]:9"
    assert str(ReplicaAddress("x", "10.0.0.1", 9)) == "10.0.0.1:9"
