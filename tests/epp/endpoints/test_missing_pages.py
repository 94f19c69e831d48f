"""Pages that an engine does not have, does not show, or shows to some clients only."""

import asyncio
import contextlib
import dataclasses

import pytest
from tests.epp.endpoints.scraped import Engine, Told, scraper

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import ScrapeState
from kvist_epp.engines.vllm.engine_metrics import EngineSample


async def test_an_api_key_on_models_does_not_matter(engine: Engine) -> None:
    """An engine that guards /v1 is ready, and its unknown models are reported as a problem."""
    engine.models_status = 401
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 1)
        state = scrapes.states["ns/a"]

        problem = (
            "GET /v1/models returned HTTP status 401: provide the engines' API key with --engine-key-file"
        )
        assert (state.ready, state.models_problem) == (True, problem)


async def test_a_list_of_models_that_cannot_be_read_is_requested_less_and_less_often(engine: Engine) -> None:
    """The pause between requests for models that an engine does not show doubles, and a list that it shows
    later is taken."""
    engine.models_status = 401
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 40)
        assert 1 < engine.asked.count("/v1/models") < 20

        engine.models_status = 200
        state = scrapes.states["ns/a"]
        await told.until(lambda: state.served.models == frozenset({"m"}))
        assert (state.models_problem, state.models_failures) == ("", 0)


@pytest.mark.parametrize(
    ("page", "status", "health", "problem"),
    [
        ("up 1\n", 200, 200, "its /metrics page is not vLLM's"),
        ("", 200, 404, "its /metrics page is not vLLM's"),
        (
            "# HELP vllm:num_requests_running Running\n",
            200,
            200,
            "its /metrics page has no value of vllm:num",
        ),
        ("<html>", 404, 404, "GET /metrics returned HTTP status 404"),
        ("", 502, 200, "GET /metrics returned HTTP status 502"),
        ("", 302, 401, "GET /metrics returned HTTP status 302"),
        ("denied", 403, 403, "GET /metrics returned HTTP status 403: provide the engines' API key with"),
        ("x" * 9_000_000, 200, 200, "the answer to GET /metrics is larger than 8388608 bytes"),
    ],
)
async def test_an_engine_without_metrics_is_ready(
    engine: Engine, caplog: pytest.LogCaptureFixture, page: str, status: int, health: int, problem: str
) -> None:
    """An engine that answers, but has no metrics of vLLM, is ready without a sample; the log says it once."""
    engine.page, engine.status, engine.health = page, status, health
    told, endpoint = Told(), await engine.start()
    others = [dataclasses.replace(endpoint, name=f"b{number}") for number in range(3)]
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint, *others)))
        await told.until(lambda: len(told.changes) == 4 and len(told.unmeasured) > 20)
        state = scrapes.states["ns/a"]

        assert {change for _, change in told.changes} == {ScrapeState.READY}
        assert (told.scrapes, state.problem) == (0, "")
        assert state.metrics_problem.startswith(problem)
        assert state.served.models == {"m"}
        assert state.sample == EngineSample()
        assert caplog.text.count("has no metrics of vLLM") == 1


@pytest.mark.parametrize(
    ("hangs", "status", "problem"),
    [
        ({"/metrics"}, 200, "GET /metrics: timed out"),
        ({"/health"}, 404, "GET /metrics returned HTTP status 404"),
    ],
)
async def test_a_page_that_hangs_is_a_missing_page(
    engine: Engine, hangs: set[str], status: int, problem: str
) -> None:
    """An engine is reachable as long as it answers one of its pages; metrics that hang are missing."""
    engine.hangs, engine.status = hangs, status
    told, endpoint = Told(), await engine.start()
    async with scraper(told, timeout=0.1) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.unmeasured) >= 3)
        state = scrapes.states["ns/a"]
        assert (told.changes, state.metrics_problem) == ([("ns/a", ScrapeState.READY)], problem)

        engine.hangs, engine.status = set(), 200
        await told.until(lambda: told.scrapes >= 1)
        assert (state.metrics_problem, state.sample.running) == ("", 2)


async def test_an_engine_that_answers_no_page_is_unreachable(engine: Engine) -> None:
    """An engine that accepts connections and answers neither its metrics nor its health gets no requests."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told, timeout=0.1) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 1)
        engine.hangs = {"/metrics", "/health"}
        await told.until(lambda: len(told.changes) == 2)
        assert told.changes[-1] == ("ns/a", ScrapeState.UNREACHABLE)
        assert scrapes.states["ns/a"].problem == "timed out"


async def test_metrics_may_come_and_go(engine: Engine) -> None:
    """A page that is missing now and then changes nothing; one that is gone for good, or comes back, does."""
    told, endpoint = Told(), await engine.start()
    async with scraper(told, failures=3) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 1)
        state = scrapes.states["ns/a"]
        engine.status = 500
        await told.until(lambda: bool(told.unmeasured))
        assert (state.pages_missed, state.sample.running, state.ready) == (3, 0, True)

        engine.status, seen = 200, told.scrapes
        await told.until(lambda: told.scrapes > seen)
        assert (state.metrics_problem, state.sample.running) == ("", 2)
        assert told.changes == [("ns/a", ScrapeState.READY)]


async def test_an_engine_that_dies_behind_a_proxy_is_unreachable(engine: Engine) -> None:
    """Server errors of ``/health`` make an engine without metrics unreachable, too."""
    engine.status = 404
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.changes) == 1)
        engine.health = 503
        await told.until(lambda: len(told.changes) == 2)
        engine.health = 200
        await told.until(lambda: len(told.changes) == 3)

        states = [change for _, change in told.changes]
        assert states == [ScrapeState.READY, ScrapeState.UNREACHABLE, ScrapeState.READY]


async def test_a_server_that_knows_its_clients_is_asked_by_the_full_client(engine: Engine) -> None:
    """A status that only the cheap connection gets, for want of a header, is not believed."""
    engine.wants_user_agent = True
    told, endpoint = Told(), await engine.start()
    async with scraper(told, models_interval=0.0) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 6)
        state = scrapes.states["ns/a"]
        assert (state.metrics_problem, state.models_problem, state.sample.running) == ("", "", 2)


async def test_an_engine_without_pages_is_asked_on_one_connection(engine: Engine) -> None:
    """Pages that are missing are requested on the connection of the last scrape, once a full client has not
    found them either."""
    engine.status = engine.models_status = 404
    told, endpoint = Told(), await engine.start()
    async with scraper(told) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.unmeasured) >= 3)
        engine.connections.clear()
        seen = len(told.unmeasured)
        await told.until(lambda: len(told.unmeasured) >= seen + 20)
        assert len(engine.connections) <= 2


async def test_models_that_time_out_on_the_cheap_connection_are_asked_by_the_full_client() -> None:
    """A list of models in a form that only a full client understands is read by the next request."""
    answers = {
        b"/metrics": b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nvllm:num_requests_running 2.0\n",
        b"/v1/models": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'1b\r\n{"data": [{"id": "late"}]} \r\n0\r\nX-Sum: 1\r\n\r\n',
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answers[head.split()[1]])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint, told = Endpoint("a", "ns", "127.0.0.1", server.sockets[0].getsockname()[1]), Told()
    async with scraper(told, timeout=0.1, models_interval=0.0) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: told.scrapes >= 4)
        state = scrapes.states["ns/a"]
        await told.until(lambda: not state.models_problem)
        assert state.served.models == {"late"}
    server.close()
    await server.wait_closed()
