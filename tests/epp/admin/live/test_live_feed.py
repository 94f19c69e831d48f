"""Snapshots and the stream of the live page: made once for all viewers, and bounded."""

import asyncio
import json
import logging
from typing import Any

import pytest
from tests.epp.admin.live.documents import AT, document
from tests.epp.admin.live.live_site import SECRET, next_event, site

from kvist_epp.admin.live import live_feed


async def test_a_viewer_gets_a_greeting_and_then_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first event names the process and the version of the page; the others are documents, or HTML."""
    monkeypatch.setattr(live_feed, "TICK_SECONDS", 0.05)
    async with site() as running:
        running.page.feed._tick = 0.05
        answer, events = await running.watch("?as=page")
        _, documents = await running.watch()
        hello, first, second = [await next_event(events) for _ in range(3)]
        plain = [await next_event(documents) for _ in range(2)]

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert (hello[0], json.loads(hello[1])["replica"], json.loads(hello[1])["started"]) == ("hello", "a", AT)
    assert (first[0], second[0]) == ("page", "page")
    assert "serving/qwen-1" in json.loads(first[1])["endpoints"]
    assert (plain[1][0], json.loads(plain[1][1])["hit_rate"]["true"]) == ("state", 0.78)


async def test_a_snapshot_is_made_once_for_all_viewers_and_not_at_all_without() -> None:
    """Ten viewers cost no more documents than one; when they have left the feed rests."""
    async with site() as running:
        running.page.feed._tick = 0.2
        viewers = [await running.watch("?as=page") for _ in range(10)]
        for _, events in viewers:
            while (await next_event(events))[0] != "page":
                pass
        made = running.state.made
        assert made <= 4
        for answer, _ in viewers:
            answer.close()
        while len(running.page.feed):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        rested = running.state.made
        await asyncio.sleep(0.5)

        assert running.state.made == rested


async def test_the_number_of_viewers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One viewer more is answered 503 with Retry-After; a place that becomes free is given again."""
    monkeypatch.setattr(live_feed, "MAX_VIEWERS", 2)
    async with site() as running:
        running.page.feed._tick = 0.05
        viewers = [await running.watch() for _ in range(2)]
        status, text, headers = await running.get("/live/events")
        viewers[0][0].close()
        while len(running.page.feed) == 2:
            await asyncio.sleep(0.05)
        again, _ = await running.watch()

    assert (status, headers["Retry-After"]) == (503, "5")
    assert "2 viewers" in text
    assert again.status == 200


async def test_a_viewer_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow viewer holds one message, never a backlog, and is dropped after a while; others go on."""
    monkeypatch.setattr(live_feed, "SLOW_SECONDS", 0.3)
    async with site() as running:
        running.page.feed._tick = 0.02
        big = {"x": "y" * 4_000_000}
        running.page._all._renderers = {"state": lambda _document: _encoded(big)}
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port, limit=1)
        writer.write(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not len(running.page.feed):
            await asyncio.sleep(0.01)
        good = await running.client.get(f"{running.url}/live/events")
        received = 0
        while len(running.page.feed) == 2:
            received += len(await good.content.readany())
        before = received
        while received < before + 3 * 4_000_000:
            received += len(await good.content.readany())
        good.close()
        writer.close()
    del reader


def _encoded(value: Any) -> Any:
    yield
    return json.dumps(value).encode()


async def test_closing_the_page_ends_the_streams_at_once() -> None:
    """A picker that shuts down does not wait for its viewers, and refuses new ones."""
    async with site() as running:
        _, events = await running.watch()
        await next_event(events)
        await asyncio.wait_for(running.page.close(), 2)
        while (await next_event(events))[0] != "end":
            pass
        status, _, _ = await running.get("/live/events")

    assert status == 503


async def test_a_viewer_that_is_cancelled_takes_nothing_from_the_others() -> None:
    """Requests that end while a snapshot is made leave it to those who wait for it."""
    async with site() as running:
        gate = asyncio.Event()

        async def make() -> tuple[dict[str, Any], float]:
            await gate.wait()
            return document(), 0.0

        running.page._all._make = make
        first = asyncio.create_task(running.page._all.current())
        second = asyncio.create_task(running.page._all.current())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))
        gate.set()
        found = await second

    assert first.cancelled()
    assert found.document["replica"] == "picker-a"


async def test_a_page_that_fails_ends_its_streams_and_says_where(caplog: pytest.LogCaptureFixture) -> None:
    """A bug is logged by type and place, without its text, and viewers connect again."""
    async with site() as running:
        running.page.feed._tick = 0.05

        async def fail() -> tuple[dict[str, Any], float]:
            raise ValueError(SECRET)

        running.page._all._make = fail
        with caplog.at_level(logging.ERROR):
            _, events = await running.watch()
            names = [(await next_event(events))[0] for _ in range(2)]

    assert names == ["hello", "end"]
    assert "the live page failed with ValueError at" in caplog.text
    assert SECRET not in caplog.text


async def test_samples_are_taken_whether_somebody_looks_or_not() -> None:
    """A viewer who comes has a history at once."""
    async with site() as running:
        task = asyncio.create_task(running.page.run())
        while not running.state.samples:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))

    assert running.state.made == 0


async def test_the_share_of_a_core_is_bounded() -> None:
    """A document that takes long is made less often; callers in between get the last one."""
    async with site() as running:
        made = 0

        async def slow() -> tuple[dict[str, Any], float]:
            nonlocal made
            made += 1
            return document(), 0.05

        running.page._all._make = slow
        for _ in range(20):
            await running.page._all.current(oldest=0.0)
            await asyncio.sleep(0.01)

    assert made == 1
