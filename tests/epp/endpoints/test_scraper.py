"""Scraping real HTTP servers that answer, send nonsense, hang and disappear."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.epp.endpoints.scraped import METRICS, MODELS, Engine, Told, scraper

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_state import EngineState, ScrapeState
from kvist_epp.endpoints.scraper import AT_ONCE
from kvist_epp.engines.vllm.engine_metrics import EngineSample


async def test_an_engine_that_answers_is_ready(engine: Engine) -> None:
    """The first answer makes an endpoint ready and fills in load and models; models are not requested each
    time."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        before = dict(scrapes.counts())
        await told.until(lambda: told.scrapes >= 3)
        state = scrapes.states["ns/a"]

        assert before == {"new": 1, "ready": 0, "unreachable": 0}
        assert (state.ready, state.problem, state.sample.running, state.sample.waiting) == (True, "", 2, 1)
        assert (state.served.models, scrapes.adapters()) == (frozenset({"m"}), frozenset({"lora"}))
        assert told.changes == [("ns/a", ScrapeState.READY)]
        assert engine.asked.count("/v1/models") == 1


async def test_an_engine_that_fails_three_times_is_unreachable_until_it_answers(engine: Engine) -> None:
    """Failures in a row make an engine unreachable with a reason; one answer restores it, and its models are
    requested again."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.changes) == 1)
        engine.status = engine.health = 503
        await told.until(lambda: len(told.changes) == 2)
        state = scrapes.states["ns/a"]

        assert (state.state, state.problem) == (
            ScrapeState.UNREACHABLE,
            "GET /health returned HTTP status 503",
        )
        assert scrapes.counts() == {"new": 0, "ready": 0, "unreachable": 1}

        engine.status = engine.health = 200
        await told.until(lambda: len(told.changes) == 3)

        assert [change for _, change in told.changes] == [
            ScrapeState.READY,
            ScrapeState.UNREACHABLE,
            ScrapeState.READY,
        ]
        assert engine.asked.count("/v1/models") == 2


async def test_an_engine_that_is_gone_is_unreachable_in_plain_words(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason of an engine that accepts no connections says so without a full client, and the engine is
    ready again once it listens."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.changes) == 1)
        with monkeypatch.context() as patched:
            patched.setattr(scrapes, "_ask_in_full", None)
            await engine.runner.cleanup()
            await told.until(lambda: len(told.changes) == 2)
            state = scrapes.states["ns/a"]
            failures = state.failures
            while state.failures < failures + 3:
                await asyncio.sleep(0.01)
            assert (state.state, state.problem) == (
                ScrapeState.UNREACHABLE,
                "cannot connect: Connection refused",
            )
        await engine.runner.setup()
        await web.TCPSite(engine.runner, "127.0.0.1", endpoint.port).start()
        await told.until(lambda: len(told.changes) == 3)
        assert state.state is ScrapeState.READY


async def test_a_scrape_that_is_cancelled_keeps_what_it_has_read(engine: Engine) -> None:
    """The sample of a scrape that ends while the models are awaited is there for the next one, whose page is
    the same."""
    engine.models_may_be_sent.clear()
    told, endpoint = Told(), await engine.start()
    refused = dataclasses.replace(endpoint, refusal="starting")
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((refused,)))
        while "/v1/models" not in engine.asked:
            await asyncio.sleep(0.01)
        scrapes.follow(EndpointSet((endpoint,)))
        engine.models_may_be_sent.set()
        await told.until(lambda: told.scrapes >= 1)
        assert scrapes.states["ns/a"].sample.running == 2


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """Accept connections and never answer; yield the port."""

    async def read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(read_only, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_an_engine_that_hangs_times_out() -> None:
    """A connection that is accepted but never answered counts as a failure."""
    told = Told()
    async with silent_server() as port, scraper(told, timeout=0.05) as scrapes:
        scrapes.follow(EndpointSet((Endpoint("a", "ns", "127.0.0.1", port),)))
        await told.until(lambda: len(told.changes) == 1)

        assert scrapes.states["ns/a"].problem == "timed out"


async def test_an_engine_that_refuses_no_connection_is_not_probed(engine: Engine) -> None:
    """An engine that answers, but is not ready, has one connection for all its pages."""
    told, endpoint = Told(), await engine.start()
    engine.status = engine.health = 503
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        while engine.asked.count("/metrics") < 8:
            await asyncio.sleep(0.01)
        assert len(engine.connections) == 1
        assert scrapes.states["ns/a"].state is ScrapeState.UNREACHABLE


async def test_an_engine_that_comes_back_is_ready_at_its_first_connection() -> None:
    """The first connection that an engine accepts again is asked for its pages, since the next may be
    refused."""
    told, accepted, ended = Told(), 0, asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        server.close()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = METRICS if b"GET /metrics" in head else json.dumps(MODELS).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()
        ended.set()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((Endpoint("a", "ns", "127.0.0.1", port),)))
        await told.until(lambda: len(told.changes) == 1)
        assert scrapes.states["ns/a"].refused
        server = await asyncio.start_server(once, "127.0.0.1", port)
        await told.until(lambda: told.scrapes > 3)
        assert (accepted, scrapes.states["ns/a"].refused) == (1, False)
    await ended.wait()
    await server.wait_closed()


async def test_engines_that_hang_do_not_delay_the_scrapes_of_others(engine: Engine) -> None:
    """An engine that answers is scraped on, however many others hold their connections without an answer."""
    told, endpoint = Told(), await engine.start()
    async with silent_server() as port, scraper(told, timeout=60.0) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.changes) == 1)
        silent = [Endpoint(f"silent-{number}", "ns", "127.0.0.1", port) for number in range(2 * AT_ONCE)]
        scrapes.follow(EndpointSet((endpoint, *silent)))
        while sum(state.asking for state in scrapes.states.values()) <= AT_ONCE:
            await asyncio.sleep(0.01)
        scraped = told.scrapes
        await told.until(lambda: told.scrapes > scraped + 10)


async def test_following_another_fleet(engine: Engine) -> None:
    """Removed endpoints are not scraped, unchanged ones keep their state, and changed engines start without
    state."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 1)
        state = scrapes.states["ns/a"]
        scrapes.follow(EndpointSet((endpoint, Endpoint("b", "ns", "127.0.0.1", 1))))

        assert scrapes.states["ns/a"] is state

        scrapes.follow(EndpointSet((Endpoint("a", "ns", "127.0.0.1", endpoint.port, uid="2"),)))

        assert (list(scrapes.states), scrapes.states["ns/a"].state) == (["ns/a"], ScrapeState.NEW)


async def test_a_refusal_of_an_endpoint_comes_and_goes(engine: Engine) -> None:
    """A refused endpoint stays known; once it is accepted it is scraped at once."""
    told, endpoint = Told(), await engine.start()
    engine.status = engine.health = 503
    refused = dataclasses.replace(endpoint, refusal="not ready")
    async with scraper(told, interval=60.0) as scrapes:
        scrapes.follow(EndpointSet((refused,)))
        await told.until(lambda: len(told.changes) == 1)
        state = scrapes.states["ns/a"]

        assert (state.ready, state.status, scrapes.counts()["not ready"]) == (False, "not ready", 1)

        engine.status = engine.health = 200
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes == 1)

        assert scrapes.states["ns/a"] is state
        assert (state.ready, state.status) == (True, "ready")

        scrapes.follow(
            EndpointSet((dataclasses.replace(endpoint, labels={"v": "2"}, refusal="terminating"),))
        )

        assert (state.ready, state.status, state.failures) == (False, "terminating", 0)
        assert scrapes.counts() == {"new": 0, "ready": 0, "unreachable": 0, "terminating": 1}


async def test_without_scraping_all_are_ready() -> None:
    """An interval of 0 disables scraping."""
    told = Told()
    async with scraper(told, interval=0) as scrapes:
        scrapes.follow(EndpointSet((Endpoint("a", "ns", "127.0.0.1", 1),)))

        assert (told.changes, scrapes.states["ns/a"].ready) == ([("ns/a", ScrapeState.READY)], True)


@pytest.mark.parametrize(
    ("label", "guess", "running", "waiting", "usage", "expected"),
    [
        (None, None, 5, 0, 0.5, None),
        (None, 8, 5, 0, 0.5, 8),
        (None, 8, 12, 0, 0.5, 13),
        (None, 8, 12, 3, 0.5, 12),
        ("4", 8, 5, 0, 0.5, 4),
        ("64", 8, 20, 3, 0.99, 64),
        ("64", 8, 20, 0, 0.99, 64),
    ],
)
def test_slots(
    label: str | None, guess: int | None, running: int, waiting: int, usage: float, expected: int | None
) -> None:
    """The label gives the batch size, else the guess unless more sequences run; a full KV cache does not
    change it."""
    labels = {"kvist.dev/max-num-seqs": label} if label else {}
    state = EngineState(Endpoint("a", "ns", "10.0.0.1", 1, labels))
    state.sample = EngineSample(running=running, waiting=waiting, cache_usage=usage)
    state.batch.observe(running, waiting)

    assert state.slots(guess) == expected


@pytest.mark.parametrize(
    ("running", "waiting", "usage", "expected"),
    [(20, 3, 0.99, 20), (0, 1, 1.0, 1), (20, 0, 0.99, None), (20, 3, 0.9, None)],
)
def test_kv_full_at(running: int, waiting: int, usage: float, expected: int | None) -> None:
    """While requests wait and over 95 % of the KV cache is used, the running sequences are the capacity."""
    state = EngineState(Endpoint("a", "ns", "10.0.0.1", 1))
    state.sample = EngineSample(running=running, waiting=waiting, cache_usage=usage)
    assert state.kv_full_at == expected


def test_every_rank_has_its_own_batch() -> None:
    """With several data-parallel ranks behind one address, label and guess count for each rank."""
    labelled = Endpoint("a", "ns", "10.0.0.1", 1, {"kvist.dev/max-num-seqs": "8"}, ranks=4)

    assert EngineState(labelled).slots(256) == 32
    assert EngineState(Endpoint("a", "ns", "10.0.0.1", 1, ranks=4)).slots(256) == 1024


async def test_the_models_of_an_engine_that_requires_an_api_key(engine: Engine, tmp_path: Path) -> None:
    """The list of models is requested with the key of the file, as it is at that time; an engine that still
    has the key before is asked with that one; the metrics page is requested without a key."""
    engine.keys, file, told = {"one"}, tmp_path / "key", Told()
    endpoint = await engine.start()
    file.write_text("one\n")
    async with scraper(told, models_interval=0.0, key=EngineKey(str(file))) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        state = scrapes.states["ns/a"]
        await told.until(lambda: state.served.models == frozenset({"m"}))
        file.write_text("two")
        seen = told.scrapes
        await told.until(lambda: told.scrapes > seen + 3)
        assert state.models_problem == ""  # the engine has not restarted yet
        engine.keys = {"two"}
        seen = told.scrapes
        await told.until(lambda: told.scrapes > seen + 3)
        assert state.models_problem == ""
        engine.keys = {"three"}
        await told.until(lambda: "--engine-key-file" in state.models_problem)
        assert state.ready
        file.unlink()
        await told.until(lambda: "No such file" in state.models_problem)
