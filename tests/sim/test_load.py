"""The load generator, its workloads and its HTTP client against small servers."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_sim.http1 import Connection, HttpError, get, request_bytes
from kvist_sim.load import Outcome, Progress, Target, closed_loop, open_loop, percentile, summarise
from kvist_sim.workloads import Arrival, Shape, arrivals, warm_up

SMALL = Shape(groups=4, system_words=30, turns=3)
USAGE = {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
STREAM = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b"data: %s\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode(),
    b"data: [DONE]\n\n",
)
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """An HTTP server that gives each request body to ``handler``; yields its port."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await handler(await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def chunked(pieces: tuple[bytes, ...]) -> bytes:
    """A whole answer with a chunked body."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


async def stream(_: bytes, writer: asyncio.StreamWriter) -> None:
    """Answers as an engine does."""
    writer.write(chunked(STREAM))
    await writer.drain()


async def refuse(_: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer with status 503."""
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}")
    await writer.drain()


async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
    """Begins an answer and closes."""
    writer.write(chunked(STREAM)[:80])
    await writer.drain()
    writer.close()


async def hang(_: bytes, writer: asyncio.StreamWriter) -> None:
    """Answers the head and nothing more."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    await asyncio.Event().wait()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(1, 30))
def test_a_chunked_body_is_the_same_however_it_is_cut(pieces: list[bytes], step: int) -> None:
    """Chunk framing is removed whatever the sizes in which the bytes arrive."""

    async def run() -> bytes:
        connection, got = Connection(), bytearray()
        connection.connection_made(_Sink())
        pending = asyncio.ensure_future(connection.exchange(b"", got.extend))
        await asyncio.sleep(0)
        whole = chunked(tuple(pieces))
        for at in range(0, len(whole), step):
            connection.data_received(whole[at : at + step])
        assert (await pending).status == 200
        return bytes(got)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert loop.run_until_complete(run()) == b"".join(pieces)


class _Sink(asyncio.Transport):
    """A transport that takes everything."""

    def write(self, data: object) -> None:
        """Ignore the data."""

    def is_closing(self) -> bool:
        """Return False: it stays open."""
        return False


async def test_a_plain_body_is_read_whole_and_the_connection_used_again() -> None:
    """Keep-alive: two exchanges on one connection."""
    async with server(refuse) as port:
        connection = await Connection.open("127.0.0.1", port)
        request = request_bytes("POST", "/", "host", b"{}")
        answers = [(await connection.exchange(request)).status for _ in range(2)]
        connection.close()

    assert answers == [503, 503]


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    """Garbage ends the exchange with HttpError."""

    async def garbage(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"what?\r\n\r\n")

    async with server(garbage) as port:
        with pytest.raises(HttpError):
            await get("127.0.0.1", port, "/")


async def test_a_stream_gives_ttft_and_the_usage_of_its_last_chunk() -> None:
    """TTFT comes from the first data, token counts from the usage chunk."""
    async with server(stream) as port:
        target = Target("127.0.0.1", port)
        (outcome,) = await open_loop(target, [Arrival(0.0, 0, 0, b"{}")], seconds=1, drain_seconds=5)
        target.close()

    assert outcome.good
    assert outcome.ttft is not None
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (20, 16, 2)


@pytest.mark.parametrize(("handler", "error"), [(refuse, "HTTP 503"), (cut, "HttpError: connection lost")])
async def test_a_refused_or_cut_answer_is_an_error(handler: Handler, error: str) -> None:
    """An answer that is not a complete 200 counts as an error and names the cause."""
    async with server(handler) as port:
        target = Target("127.0.0.1", port)
        (outcome,) = await open_loop(target, [Arrival(0.0, 0, 0, b"{}")], seconds=1, drain_seconds=5)
        target.close()

    assert not outcome.good
    assert outcome.error.startswith(error)


async def test_a_missing_listener_is_an_error_not_a_crash() -> None:
    """A refused connection is one failed request."""
    async with server(stream) as port:
        pass
    (outcome,) = await open_loop(
        Target("127.0.0.1", port), [Arrival(0.0, 0, 0, b"{}")], seconds=1, drain_seconds=1
    )

    assert outcome.error.startswith("ConnectionRefusedError")


async def test_what_still_runs_after_the_drain_is_unfinished() -> None:
    """A hanging answer is given up, counted, and its waiting so far is in the percentiles."""
    async with server(hang) as port:
        target = Target("127.0.0.1", port)
        outcomes = await open_loop(target, [Arrival(0.0, 0, 0, b"{}")], seconds=0.1, drain_seconds=0.1)
        summary = summarise(outcomes, begin=0, end=1)

    assert (summary.unfinished, summary.errors) == (1, 0)
    assert summary.ttft_p50 >= 0.1


async def test_the_plan_ends_with_its_seconds() -> None:
    """Arrivals at or after the end are not sent."""
    async with server(stream) as port:
        target = Target("127.0.0.1", port)
        plan = (Arrival(at, 0, 0, b"{}") for at in (0.0, 0.01, 0.02, 7.0, 8.0))
        progress = Progress()
        await open_loop(target, plan, seconds=5, drain_seconds=5, progress=progress)
        target.close()

    assert (progress.sent, progress.running, len(progress.outcomes)) == (3, 0, 3)


async def test_a_closed_loop_keeps_to_its_concurrency() -> None:
    """Never more requests under way than clients, and all bodies sent."""
    running, most = 0, 0

    async def counted(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await stream(body, writer)
        running -= 1

    async with server(counted) as port:
        target = Target("127.0.0.1", port)
        outcomes = await closed_loop(target, iter([b"{}"] * 20), concurrency=3, seconds=20)
        target.close()

    assert (len(outcomes), all(o.good for o in outcomes), most <= 3) == (20, True, True)


def test_a_seed_decides_every_byte_and_every_moment() -> None:
    """Two policies can be given the very same traffic."""
    first, again, other = (
        list(itertools.islice(arrivals(SMALL, rate=5, seed=seed, model="m"), 50)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_chats_grow_by_their_own_history() -> None:
    """A later turn begins with all messages of an earlier turn of the same chat."""
    seen: set[str] = set()
    for arrival in itertools.islice(arrivals(SMALL, rate=5, seed=3, model="m"), 100):
        messages = json.loads(arrival.body)["messages"]
        assert len(messages) == 2 + 2 * arrival.turn
        assert arrival.turn == 0 or json.dumps(messages[:-2]) in seen
        seen.add(json.dumps(messages))


def test_groups_share_their_system_prompt_with_the_warm_up() -> None:
    """The warm-up sends each group's system prompt once, the traffic uses no other."""
    warmed = [json.loads(a.body)["messages"][0]["content"] for a in warm_up(SMALL, rate=4, seed=5, model="m")]
    used = {
        json.loads(a.body)["messages"][0]["content"]
        for a in itertools.islice(arrivals(SMALL, rate=4, seed=5, model="m"), 100)
    }
    assert len(set(warmed)) == SMALL.groups
    assert used == set(warmed)


def test_only_the_window_is_measured() -> None:
    """Requests begun before it count in nothing but the throughput, which is of the whole load."""
    outcomes = [
        Outcome(started=0.5, ttft=0.1, latency=1.0, status=200, completion_tokens=10, prompt_tokens=8),
        Outcome(started=2.0, ttft=0.3, latency=1.0, status=200, completion_tokens=10, prompt_tokens=8),
        Outcome(started=2.5, ttft=None, latency=9.0, status=0, finished=False),
        Outcome(started=2.6, ttft=None, latency=0.1, status=503, error="HTTP 503"),
    ]
    summary = summarise(outcomes, begin=1, end=5)

    assert (summary.requests, summary.errors, summary.unfinished) == (3, 1, 1)
    assert summary.output_tokens_per_second == 20 / 5
    assert (summary.ttft_p50, summary.ttft_p90, summary.prompt_tokens) == (0.3, 9.0, 8)


@given(st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_are_values_and_in_order(values: list[float]) -> None:
    """Nearest rank: always one of the values, never falling with the share."""
    found = [percentile(values, share) for share in (0.0, 0.5, 0.9, 1.0)]
    assert found == sorted(found)
    assert set(found) <= set(values)
    assert found[-1] == max(values)
