"""TLS handshakes that fail: counted by reason, and reported without flooding the log."""

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.http2.certificates import self_made, verifying
from tests.epp.http2.h2 import ECHO, Echo

from kvist_epp.http2.port_stats import MAX_REASONS, OTHER, HandshakeFailures
from kvist_epp.http2.server import serve_http2

HOST = "127.0.0.1"
WORDS = st.sampled_from(["http request", "no shared cipher", "unsupported protocol"])


@given(st.lists(st.tuples(WORDS, st.floats(0, 100))))
def test_all_are_counted_and_one_a_minute_is_told(times: list[tuple[str, float]]) -> None:
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
    server = await serve_http2({ECHO: Echo}, HOST, 0, ssl=self_made().server_context())
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
    context = verifying(self_made().ca_pem(), "http/1.1") if kind == "alpn" else ssl.create_default_context()
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
