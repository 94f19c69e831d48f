"""Load servers and connections on real sockets: what they exchange, and every way a stream can end."""

import asyncio
from pathlib import Path

import pytest
from tests.epp.http2.certificates import Mounted, Pki
from tests.epp.replicas.socket_replicas import HOST, POD, ended, listen, running_replicas, until

from kvist_epp.errors import ReplicaError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.call import Call, Sink
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import REPLICA_FOLLOW_METHOD
from kvist_epp.replicas import load_server
from kvist_epp.replicas.load_server import MAX_CHANGES, MAX_ROWS
from kvist_epp.replicas.messages import decode_update, encode_ack
from kvist_epp.replicas.replica_connection import (
    ConnectionState,
    ReplicaAddress,
    ReplicaDirectory,
    RpcStream,
    open_stream,
    resolve,
)
from kvist_sim.relays import TcpRelay


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_a_follower_receives_open_requests_and_changes(transport: str) -> None:
    """On either server: more requests than one update takes, ends, and access-log entries."""
    async with running_replicas("a", "b", transport=transport) as (a, b):
        a.routed(*(f"a.{number}" for number in range(2 * MAX_ROWS + 1)))
        connection = b.follow(a.port)
        await until(lambda: len(b.remote_load) == 2 * MAX_ROWS + 1)
        entry = AccessLogEntry("b.7", "id", "10.0.0.1:8000", 200)
        a.remote_load.outbox("b").append(entry)
        for number in range(2 * MAX_ROWS):
            a.end(f"a.{number}")
        await until(lambda: len(b.remote_load) == 1)
        await until(lambda: b.log_entries)

        assert (connection.state, b.log_entries) == (ConnectionState.FOLLOWED, [entry])
        assert b.tracker.running(POD) == 1
        assert b.context.stats.message_bytes["received"] > 0
        assert a.load_server.lag() > 0


async def test_a_replica_that_dies_is_dialled_until_it_is_back() -> None:
    """A connection that breaks loses no request for good."""
    async with running_replicas("a", "b") as (a, b):
        a.routed("a.1")
        connection = b.follow(a.port)
        await until(lambda: len(b.remote_load) == 1)
        await a.close()
        await until(lambda: connection.state is ConnectionState.BROKEN)
        problem = connection.problem
        a.end("a.1")
        a.routed("a.2")
        await a.serve()
        await until(lambda: b.tracker.table.at("a.2", POD, remote=True))

        assert problem
        assert (len(b.remote_load), b.tracker.table.at("a.1", POD, remote=True), connection.problem) == (
            1,
            None,
            "",
        )
        assert b.context.stats.broken == 1


async def test_a_replica_finds_out_that_an_address_is_its_own() -> None:
    """Names resolve to all replicas, this one included, and no address shows which one it is."""
    async with running_replicas("a") as (a,):
        connection = a.follow(a.port)
        await until(lambda: connection.state is ConnectionState.SELF)

        assert (a.remote_load.replicas, a.load_server.followers) == ({}, {})


async def test_of_two_addresses_of_one_replica_one_is_followed() -> None:
    """An IPv4 and an IPv6 address, or a name given twice, lead to one stream; if it breaks the other takes
    over."""
    async with running_replicas("a", "b") as (a, b), TcpRelay(a.port) as relay:
        first = b.follow(relay.port)
        await until(lambda: first.state is ConnectionState.FOLLOWED)
        second = b.follow(a.port)
        a.remote_load.outbox("b").append(AccessLogEntry("b.7", "id", None, 200))
        await until(lambda: second.state is ConnectionState.DUPLICATE)
        await until(lambda: b.log_entries)
        followed = list(b.context.followed.values())

        assert (followed, len(a.load_server.followers), first.state) == ([first], 1, ConnectionState.FOLLOWED)


async def test_cancelled_connections_leave_nothing_behind() -> None:
    """If a connection is cancelled in the middle of a stream, the other side removes its follower."""
    async with running_replicas("a", "b") as (a, b):
        connection = b.follow(a.port)
        await until(lambda: connection.state is ConnectionState.FOLLOWED)
        await ended(b.tasks)
        await until(lambda: not a.load_server.followers)

        assert b.context.followed == {}


async def test_a_follower_that_reads_nothing_costs_one_update_and_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a network that drops packets, picks continue, memory does not grow, and the call ends."""
    monkeypatch.setattr(load_server, "STALLED_SECONDS", 0.5)
    async with running_replicas("a", "b") as (a, b), TcpRelay(a.port) as relay:
        connection = b.follow(relay.port)
        await until(lambda: connection.state is ConnectionState.FOLLOWED)
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


async def test_a_follower_far_behind_receives_all_open_requests_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the changes that are kept, the list of open requests is sent instead of each change."""
    monkeypatch.setattr(load_server, "MAX_CHANGES", 50)
    async with running_replicas("a", "b") as (a, b), TcpRelay(a.port) as relay:
        connection = b.follow(relay.port)
        await until(lambda: connection.state is ConnectionState.FOLLOWED)
        await until(lambda: "b" in a.load_server.followers)
        relay.part()
        a.routed(*(f"a.{number}" for number in range(200)))
        await until(lambda: a.load_server.followers["b"].updates.in_flight)
        for number in range(190):
            a.end(f"a.{number}")
        await asyncio.sleep(0.1)
        relay.heal()
        await until(lambda: len(b.remote_load) == 10)

        assert connection.state is ConnectionState.FOLLOWED


async def test_silence_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open connections are given up after a bounded time."""
    monkeypatch.setattr("kvist_epp.replicas.replica_connection.SILENCE_SECONDS", 0.3)
    async with running_replicas("a", "b") as (a, b), TcpRelay(a.port) as relay:
        connection = b.follow(relay.port)
        await until(lambda: connection.state is ConnectionState.FOLLOWED)
        relay.part()
        await until(lambda: connection.state is ConnectionState.BROKEN)

        assert "no message for" in connection.problem or "could not be sent" in connection.problem


class OtherService:
    """A service of the right name that sends other messages."""

    def __init__(self, sink: Sink, messages: list[bytes]) -> None:
        self._sink = sink
        self._messages = messages

    def on_message(self, data: bytes) -> None:
        """Answer with the given messages."""
        for message in self._messages:
            self._sink.send(message)
        self._sink.close()

    def on_half_closed(self) -> None:
        """Ignore the end of the other side."""

    def on_cancelled(self) -> None:
        """Ignore the end of the call."""


@pytest.mark.parametrize("messages", [[], [b""], [b"\xff\xff"], [encode_ack(seq=3)]])
async def test_a_service_with_other_messages_is_not_a_replica(messages: list[bytes]) -> None:
    """Another service on the port, or another version, is tried again and never believed."""

    def start(sink: Sink) -> Call:
        return OtherService(sink, messages)

    server = await listen({REPLICA_FOLLOW_METHOD: start})
    async with running_replicas("b") as (b,):
        connection = b.follow(server.port)
        await until(lambda: connection.state is ConnectionState.BROKEN)

        assert connection.problem
        assert b.remote_load.replicas == {}
    await server.close()


async def test_a_port_without_the_service_is_not_a_replica() -> None:
    """If the address is an ext_proc port by mistake, the problem says what is missing."""
    server = await listen({})
    async with running_replicas("b") as (b,):
        connection = b.follow(server.port)
        await until(lambda: connection.state is ConnectionState.BROKEN)

        assert "unimplemented" in connection.problem or "--replica-port" in connection.problem
    await server.close()


async def drained(stream: RpcStream) -> None:
    """Read a stream to its end."""
    while await stream.read(5):
        pass


async def test_strangers_are_refused() -> None:
    """A call without a handshake, without protobuf, or with a false acknowledgement ends, and no other call
    does."""
    async with running_replicas("a") as (a,):
        address = ReplicaAddress(HOST, HOST, a.port)
        for messages in (
            [encode_ack(seq=1)],
            [b"\xff\xff"],
            [encode_ack(a.handshake()._replace(replica="x")), encode_ack(seq=9)],
        ):
            async with open_stream(address, REPLICA_FOLLOW_METHOD, None) as stream:
                for message in messages:
                    await stream.write(message, 5)
                with pytest.raises(ReplicaError, match="invalid argument"):
                    await drained(stream)
        assert a.load_server.followers == {}


async def test_a_newer_call_of_a_follower_replaces_the_old_one() -> None:
    """A half-open connection of a follower does not block its next one."""
    async with running_replicas("a", "b") as (a, b):
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
    """Return two certificates of one authority, and one of another."""
    good, bad = Pki("good"), Pki("bad")
    found = []
    for number, pki in enumerate((good, good, bad)):
        folder = Mounted(tmp_path / str(number))
        folder.write(*pki.pair("replicas.test"), ca=pki.pem)
        found.append(Certificates(cert_path=str(folder.path), client_ca_path=str(folder.path)))
    return found


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_mutual_tls_lets_in_one_authority_alone(transport: str, secured: list[Certificates]) -> None:
    """Both sides must show a certificate of the authority, and it must be valid for the name that was
    dialled."""
    names = ("a", "b", "c", "d")
    certificates = (*secured, None)
    async with running_replicas(*names, transport=transport, certificates=certificates) as (a, b, c, d):
        friend = b.follow(a.port, "replicas.test")
        misnamed = b.follow(a.port, "other.test")
        stranger, plain = c.follow(a.port, "replicas.test"), d.follow(a.port)
        await until(lambda: friend.state is ConnectionState.FOLLOWED)
        for connection in (misnamed, stranger, plain):
            await connection.tried.wait()

        assert {connection.state for connection in (misnamed, stranger, plain)} == {ConnectionState.BROKEN}
        await until(lambda: list(a.load_server.followers) == ["b"])


async def test_a_replaced_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    """A replica that was refused before gets in, and nothing is restarted."""
    old, new = Pki("old"), Pki("new")
    folders = [Mounted(tmp_path / name) for name in "ab"]
    folders[0].write(*new.pair("replicas.test"), ca=new.pem)
    folders[1].write(*old.pair("replicas.test"), ca=old.pem)
    found = [Certificates(cert_path=str(one.path), client_ca_path=str(one.path)) for one in folders]
    async with running_replicas("a", "b", certificates=found) as (a, b):
        connection = b.follow(a.port, "replicas.test")
        await connection.tried.wait()
        before = connection.state
        folders[1].write(*new.pair("replicas.test"), ca=new.pem)
        await found[1].check()
        await until(lambda: connection.state is ConnectionState.FOLLOWED)

        assert before is ConnectionState.BROKEN


async def test_names_are_resolved_again_and_again() -> None:
    """New addresses are followed; one that disappears ends with its stream, not before."""
    async with running_replicas("a", "b") as (a, b):
        directory = ReplicaDirectory([], b.follow_only)
        here = ReplicaAddress(HOST, HOST, a.port)
        directory.update({here}, keep=False)
        connection = directory.connections[here]
        await until(lambda: connection.state is ConnectionState.FOLLOWED)
        directory.update(set(), keep=False)
        still = connection.state
        await a.close()
        await until(lambda: connection.state is ConnectionState.BROKEN)
        while here in directory.connections:
            directory.update(set(), keep=False)
            await asyncio.sleep(0.01)

        assert still is ConnectionState.FOLLOWED


async def test_an_unknown_name_is_a_problem_and_is_resolved_again() -> None:
    """The Service may not exist yet; replicas known before are kept meanwhile."""
    async with running_replicas("b") as (b,):
        directory = ReplicaDirectory([("no.such.name.invalid", 1), (HOST, b.port)], b.follow_only)
        task = asyncio.create_task(directory.run())
        await directory.all_tried()
        states = [connection.state for connection in directory.connections.values()]
        await ended([task])

        assert "no.such.name.invalid" in directory.problem
        assert (states, directory.connections) == ([ConnectionState.SELF], {})


async def test_localhost_has_its_addresses() -> None:
    """All addresses of a name are found, each once."""
    found = await resolve("localhost", 9004)

    assert {one.ip for one in found} <= {"127.0.0.1", "::1"}
    assert {(one.host, one.port) for one in found} == {("localhost", 9004)}


def test_addresses_are_written_as_grpc_expects_them() -> None:
    """IPv6 addresses are in brackets."""
    assert str(ReplicaAddress("x", "::1", 9)) == "[::1]:9"
    assert str(ReplicaAddress("x", "10.0.0.1", 9)) == "10.0.0.1:9"
