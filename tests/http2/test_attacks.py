"""Known attacks on HTTP/2 servers, on a real socket: each is cut off for its reason; others are served."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
from tests.epp.extproc import messages
from tests.epp.http2.h2 import data, frame, grpc_fields, message
from tests.http2.clients import python_client
from tests.http2.picker_port import PickerPort, opened

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.http2 import frames as f
from kvist_epp.names import HEALTH_LIST_METHOD, PROCESS_METHOD

SECONDS = 30


def head(path: str, *more: tuple[str, str]) -> bytes:
    """A header block without any HPACK state."""
    fields = [*grpc_fields(path), *more]
    return b"".join(f.literal(name.encode(), value.encode()) for name, value in fields)


REQUEST = head(PROCESS_METHOD)
LIST = head(HEALTH_LIST_METHOD)
CANCEL = f.CANCEL.to_bytes(4, "big")
NOTHING = b"\0\0\0\0\0"


def numbers() -> Iterator[int]:
    """Return the stream numbers."""
    return itertools.count(1, 2)


def opened_and(then: bytes, number: int) -> bytes:
    """A request, and what comes right behind it."""
    return frame(f.HEADERS, f.END_HEADERS, number, REQUEST) + then


def batches(steps: Iterator[bytes], count: int = 50) -> Iterator[bytes]:
    """Yield this number of steps at once."""
    while batch := list(itertools.islice(steps, count)):
        yield b"".join(batch)


def rapid_reset() -> Iterator[bytes]:
    """CVE-2023-44487: requests given up as soon as they are made."""
    for number in numbers():
        yield opened_and(frame(f.RST_STREAM, 0, number, CANCEL), number)


def made_you_reset() -> Iterator[bytes]:
    """CVE-2025-8671: requests the server must reset."""
    for number in numbers():
        yield opened_and(frame(f.WINDOW_UPDATE, 0, number, bytes(4)), number)


def continuation_flood() -> Iterator[bytes]:
    """CVE-2024-27316: a header block that never ends."""
    yield frame(f.HEADERS, 0, 1, REQUEST)
    yield from itertools.repeat(frame(f.CONTINUATION, 0, 1, f.literal(b"x", b"y")))


def settings_flood() -> Iterator[bytes]:
    """SETTINGS flood (CVE-2019-9515)."""
    yield from itertools.repeat(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1000}) * 10)


def ping_flood() -> Iterator[bytes]:
    """PING flood (CVE-2019-9512)."""
    yield from itertools.repeat(frame(f.PING, 0, 0, bytes(8)) * 100)


def priority_flood() -> Iterator[bytes]:
    """CVE-2019-9513: dependencies to shuffle."""
    yield from itertools.repeat(frame(f.PRIORITY, 0, 5, b"\0\0\0\x01\x10") * 100)


def empty_frames() -> Iterator[bytes]:
    """Flood of empty frames (CVE-2019-9518)."""
    yield frame(f.HEADERS, f.END_HEADERS, 1, REQUEST)
    yield from itertools.repeat(frame(f.DATA, 0, 1) * 100)


def data_dribble() -> Iterator[bytes]:
    """CVE-2019-9511: answers torn into bytes by many windows that open one at a time."""
    yield f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0})
    streams = range(1, 401, 2)
    for number in streams:
        yield frame(f.HEADERS, f.END_HEADERS, number, LIST) + frame(f.DATA, f.END_STREAM, number, NOTHING)
    for number in itertools.cycle(streams):
        yield f.window_update(number.to_bytes(4, "big"), 1)


def header_bomb() -> Iterator[bytes]:
    """CVE-2016-6581: a field of four kilobytes, repeated by a byte each."""
    big = b"\x40" + f._length(b"x") + f._length(b"v" * 3900)
    yield frame(f.HEADERS, f.END_HEADERS, 1, REQUEST + big)
    yield frame(f.HEADERS, f.END_HEADERS, 3, REQUEST + b"\xbe" * 9000)
    yield from itertools.repeat(b"")


ATTACKS: dict[Callable[[], Iterator[bytes]], str] = {
    rapid_reset: "resets",
    made_you_reset: "resets",
    continuation_flood: "header-bytes",
    settings_flood: "settings",
    ping_flood: "pings",
    priority_flood: "control-frames",
    empty_frames: "empty-frames",
    data_dribble: "control-frames",
    header_bomb: "header-bytes",
}


async def attack(port: PickerPort, steps: Iterator[bytes]) -> None:
    """Go on until the server hangs up, reading what it says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
    heard = asyncio.ensure_future(reader.read())
    writer.write(f.PREFACE + f.settings({}))
    try:
        for step in steps:
            writer.write(step)
            await writer.drain()
            if heard.done():
                break
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await heard


@pytest.mark.parametrize("steps", ATTACKS, ids=lambda steps: steps.__name__)
async def test_an_attack_is_cut_off(steps: Callable[[], Iterator[bytes]]) -> None:
    """The attacker's connection ends for the right reason, while another client is served all the time."""
    async with opened(None) as port, python_client(port.target, None) as honest:
        assault = asyncio.ensure_future(attack(port, batches(steps())))
        async with asyncio.timeout(SECONDS):
            while not assault.done():
                assert await honest.check("") == {"": "SERVING"}
            await assault
        ends = {reason: count for reason, count in port.server.stats.connections_ended.items() if count}
        assert ends == {ATTACKS[steps]: 1}
        assert await honest.check("") == {"": "SERVING"}


async def hoard(port: PickerPort, *, windows: bool) -> None:
    """Make the server hold as much as it will: bodies that never end, or answers behind a shut window."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
    heard = asyncio.ensure_future(reader.read())
    window = f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 0 if windows else f.DEFAULT_WINDOW})
    writer.write(f.PREFACE + window)
    opening = message(messages.request_headers(messages.config(pb.FULL_DUPLEX_STREAMED)))
    chunk = message(messages.request_body(bytes(60_000), end=False))
    ending = message(messages.request_body(b"", end=True))
    try:
        for number in range(1, 101, 2):
            writer.write(frame(f.HEADERS, f.END_HEADERS, number, REQUEST) + data(number, opening))
            writer.write(data(number, chunk) * 30 + (data(number, ending) if windows else b""))
            await writer.drain()
        await asyncio.sleep(0.2)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await heard


@pytest.mark.parametrize("windows", [False, True], ids=["endless bodies", "shut windows"])
async def test_what_hoarders_make_us_hold_is_bounded(windows: bool) -> None:
    """CVE-2019-9517 and slow bodies: four connections ask for 360 MB, 50 MB are held; others are served."""
    async with opened(None, held_bytes=50 << 20) as port, python_client(port.target, None) as honest:
        hoarding = [asyncio.ensure_future(hoard(port, windows=windows)) for _ in range(4)]
        most = 0
        async with asyncio.timeout(SECONDS):
            while not all(task.done() for task in hoarding):
                assert await honest.check("") == {"": "SERVING"}
                most = max(most, port.server.stats.held)
            await asyncio.gather(*hoarding)
        ended = port.server.stats.streams_ended
        assert ended["held-bytes"] + ended["unread"] > 0
        assert 25 << 20 < most < 100 << 20
        await port.server.close()
        assert port.server.stats.held == 0
