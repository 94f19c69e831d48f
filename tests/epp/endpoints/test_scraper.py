"""Scraping real HTTP servers that answer, send nonsense, hang and disappear."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_state import EngineState, ScrapeState
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.engines.vllm.engine_metrics import EngineSample

MODELS = {"data": [{"id": "m", "max_model_len": 100}, {"id": "lora", "parent": "m"}]}


class Engine:
    """Return a server with both pages; each answer can be changed."""

    def __init__(self) -> None:
        self.page = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        self.status = 200
        self.models_status = 200
        self.health = 200
        self.keys: set[str] = set()
        self.wants_user_agent = False
        self.models_may_be_sent = asyncio.Event()
        self.models_may_be_sent.set()
        self.connections: set[object] = set()
        self.asked: list[str] = []
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics), web.get("/v1/models", self.models)])
        app.add_routes([web.get("/health", self.healthy)])
        self.runner = web.AppRunner(app, access_log=None)

    def _note(self, request: web.Request) -> None:
        self.asked.append(request.path)
        self.connections.add(request.transport)
        if self.wants_user_agent and "User-Agent" not in request.headers:
            raise web.HTTPForbidden

    async def metrics(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(text=self.page, status=self.status)

    async def healthy(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(status=self.health)

    async def models(self, request: web.Request) -> web.Response:
        self._note(request)
        await self.models_may_be_sent.wait()
        if self.keys and request.headers.get("Authorization", "") not in {
            f"Bearer {key}" for key in self.keys
        }:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(MODELS, status=self.models_status)

    async def start(self) -> Endpoint:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return Endpoint("a", "ns", "127.0.0.1", self.runner.addresses[0][1])


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    await engine.runner.cleanup()


class Told:
    """Callbacks of the scraper, and a way to wait for them."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ScrapeState]] = []
        self.scrapes = 0
        self.unmeasured: list[str] = []
        self._news = asyncio.Condition()

    def changed(self, state: EngineState) -> None:
        self.changes.append((state.endpoint.key, state.state))
        self._wake()

    def missed(self, state: EngineState) -> None:
        self.unmeasured.append(state.endpoint.key)
        self._wake()

    def scraped(self, state: EngineState) -> None:
        self.scrapes += 1
        self._wake()

    def _wake(self) -> None:
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(condition)


def scraper(told: Told, **more: float | EngineKey) -> Scraper:
    options = {"interval": 0.01, "timeout": 5.0, **more}
    callbacks = {"on_scrape": told.scraped, "on_change": told.changed, "on_unmeasured": told.missed}
    return Scraper(**callbacks, **options)  # type: ignore[arg-type]


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


async def test_an_engine_that_hangs_times_out() -> None:
    """A connection that is accepted but never answered counts as a failure."""

    async def read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(read_only, "127.0.0.1", 0)
    endpoint = Endpoint("a", "ns", "127.0.0.1", server.sockets[0].getsockname()[1])
    told = Told()
    async with scraper(told, timeout=0.05) as scrapes:
        scrapes.follow(EndpointSet((endpoint,)))
        await told.until(lambda: len(told.changes) == 1)

        assert scrapes.states["ns/a"].problem == "timed out"
    server.close()
    await server.wait_closed()


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
