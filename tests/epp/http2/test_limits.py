"""Limits by their flags, and statistics of a port."""

import asyncio
import dataclasses
import logging
import socket
import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.http2.certificates import self_made, verifying
from tests.epp.http2.h2 import ECHO, Echo

from kvist_epp.errors import SettingsError
from kvist_epp.http2.limits import MAX_REASONS, OTHER, HandshakeFailures, Limits
from kvist_epp.http2.server import serve_http2
from kvist_epp.settings.settings import Settings


def test_the_flags_defaults_are_the_limits_defaults() -> None:
    """A server without settings is bounded as one with them, but for the size of messages."""
    default, flags = Limits(), Limits.of(Settings())
    differ = {
        f.name for f in dataclasses.fields(Limits) if getattr(default, f.name) != getattr(flags, f.name)
    }
    assert differ <= {"message_bytes", "stream_send_bytes", "connection_send_bytes"}


def test_a_flag_reaches_its_limit() -> None:
    """The connection applies the values of the command line; bursts are ten seconds' frames."""
    argv = ["--max-streams=7", "--stall-timeout=1m", "--max-pings-per-second=3", "--max-held-bytes=99999999"]
    limits = Limits.of(Settings.from_args(argv))
    assert (limits.streams, limits.stall_seconds, limits.held_bytes) == (7, 60.0, 99_999_999)
    assert (limits.pings.burst, limits.pings.per_second) == (30, 3.0)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-streams=0",
        "--max-streams=2147483648",
        "--max-connections=0",
        "--max-header-bytes=100",
        "--max-held-bytes=1000",
        "--handshake-timeout=0",
        "--stall-timeout=-1",
        "--stream-idle-timeout=0",
        "--idle-timeout=0",
        "--keepalive-time=0",
        "--keepalive-timeout=0",
        "--max-resets-per-second=0",
        "--max-control-frames-per-second=nan",
    ],
)
def test_a_limit_that_limits_nothing_is_refused(flag: str) -> None:
    """A bound of nothing, or of everything, is refused with the name of its flag."""
    with pytest.raises(SettingsError, match=flag.partition("=")[0]):
        Settings.from_args([flag])


HOST = "127.0.0.1"
WORDS = st.sampled_from(["http request", "no shared cipher", "unsupported protocol"])


@given(st.lists(st.tuples(WORDS, st.floats(0, 100))))
def test_all_are_counted_and_one_a_minute_is_logged(times: list[tuple[str, float]]) -> None:
    """The first failure of a reason is reported at once, the next one a minute later at the earliest.

    The report has the number of those between; counts and warnings together account for every handshake.
    """
    failures, now, told = HandshakeFailures(), 0.0, dict[str, float]()
    between = dict[str, int]()
    for reason, pause in times:
        now += pause
        warning = failures.add(reason, "10.0.0.1", now)
        due = reason not in told or now - told[reason] >= 60
        assert bool(warning) == due
        if due:
            told[reason], muted = now, between.pop(reason, 0)
            assert (f"as {muted} others" in warning) == (muted > 0)
            assert "10.0.0.1" in warning
            assert reason in warning
        else:
            between[reason] = between.get(reason, 0) + 1
    assert sum(failures.counts.values()) == len(times)


def test_reasons_are_bounded() -> None:
    """Peers cannot make series without end: from some number on all that is new is one reason."""
    failures = HandshakeFailures()
    for number in range(1000):
        failures.add(f"reason {number}", "somebody", 0.0)
    assert len(failures.counts) == MAX_REASONS + 1
    assert failures.counts[OTHER] == 1000 - MAX_REASONS


@pytest.mark.parametrize(
    ("kind", "words", "remedy"),
    [
        ("plaintext", "http request", "--secure-serving=false"),
        ("http2", "wrong version number", "--secure-serving=false"),
        ("distrust", "unknown ca", "/ca.crt"),
        ("silent distrust", "hung up", "perhaps the client does not trust"),
        ("alpn", "the client did not offer h2", "HTTP/2"),
    ],
)
async def test_the_log_says_who_failed_and_what_to_do(
    caplog: pytest.LogCaptureFixture, kind: str, words: str, remedy: str
) -> None:
    """Three peers that cannot be talked to: one warning with address and remedy, three counted."""
    caplog.set_level(logging.INFO)
    server = await serve_http2({ECHO: Echo}, HOST, 0, ssl=self_made().context)
    stats = server.stats
    try:
        for number in range(3):
            await _fails(kind, server.port)
            while sum(stats.handshake_failures.counts.values()) <= number:
                await asyncio.sleep(0.01)
    finally:
        await server.close()
    [(reason, count)] = stats.handshake_failures.counts.items()
    [line] = [record.getMessage() for record in caplog.records if "handshake" in record.getMessage()]
    assert (count, stats.connections_ended["tls"]) == (3, 0 if words == "hung up" else 3)
    assert words in reason
    assert all(word in line for word in (reason, remedy, HOST, str(server.port)))


def _says_why(port: int) -> None:
    """A client that does not trust the server, and tells it so."""
    with socket.create_connection((HOST, port), timeout=10) as plain, suppress(ssl.SSLError):
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")


async def _fails(kind: str, port: int) -> None:
    """One connection that comes to nothing."""
    if kind == "distrust":
        await asyncio.to_thread(_says_why, port)
        return
    context = (
        verifying(self_made().material.ca, "http/1.1") if kind == "alpn" else ssl.create_default_context()
    )
    tls = kind in ("silent distrust", "alpn")
    with suppress(ssl.SSLError, ConnectionError):
        reader, writer = await asyncio.open_connection(
            HOST, port, ssl=context if tls else None, server_hostname="localhost" if tls else None
        )
        writer.write(
            b"GET / HTTP/1.1\r\n\r\n" if kind == "plaintext" else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        )
        with suppress(ConnectionError):
            await reader.read()
            writer.close()
            await writer.wait_closed()
