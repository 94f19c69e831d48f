"""The benchmarks' own clients: the one that keeps records, and the one that asks a picker directly."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.fakes.deferred import AwaitedResult

from kvist_epp.errors import Shed
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, PendingResult, PickRequest, PickResult
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.server import serve_http2
from kvist_epp.names import REQUEST_ID_HEADER, SESSION_HEADER
from kvist_sim.bench.harness.direct import (
    LONGEST_BODY,
    NO_ANSWER,
    PICKED,
    AccessLogWriter,
    Direct,
    PickAnswer,
    SteadyClient,
)
from kvist_sim.bench.harness.records import ATTEMPTS, UPSTREAM, Recorder, usage, with_route_headers
from kvist_sim.bench.harness.records import PICKED as PICKED_HEADER
from kvist_sim.envoy import Gateway, config
from kvist_sim.workloads import Arrival

SECONDS = 10
HEADERS = {":method": "POST", ":path": "/v1/completions", "x-tenant": "a"}
USAGE = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}
TOLD = {UPSTREAM: "10.0.0.1:8000", PICKED_HEADER: "10.0.0.1:8000,10.0.0.2:8000", ATTEMPTS: "2"}

# -- records


@asynccontextmanager
async def http(handler: Callable[[web.Request], object]) -> AsyncIterator[int]:
    """An HTTP server of one handler; its port."""
    application = web.Application()
    application.router.add_post("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _stream(request: web.Request, *, whole: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={**TOLD, "x-asked": request.headers["x-request-id"]})
    await response.prepare(request)
    await response.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    if not whole:
        assert request.transport is not None
        request.transport.abort()
        return response
    end = json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":"))
    await response.write(f"data: {end}\n\ndata: [DONE]\n\n".encode())
    return response


async def answer(request: web.Request) -> web.StreamResponse:
    """A whole stream; the body says otherwise: ``cut`` or ``refuse``."""
    body = await request.read()
    if body == b"refuse":
        return web.Response(status=503, text="no healthy upstream")
    return await _stream(request, whole=body != b"cut")


async def test_records_say_what_a_client_saw_and_which_way_it_went() -> None:
    """A whole answer, a refusal, a cut one: status, first byte, end, usage, engine and attempts of each."""
    async with http(answer) as port:
        recorder = Recorder("127.0.0.1", port)
        plan = [Arrival(0.0, 0, 0, body) for body in (b"whole", b"refuse", b"cut")]
        await asyncio.wait_for(recorder.run(plan), SECONDS)
        recorder.close()
    whole, refused, cut = recorder.records

    assert [(r.id, r.status, r.good) for r in recorder.records] == [
        ("r-0", 200, True),
        ("r-1", 503, False),
        ("r-2", 200, False),
    ]
    assert (whole.upstream, whole.attempts, whole.retried) == ("10.0.0.1:8000", 2, True)
    assert (whole.prompt, whole.cached) == (20, 16)
    assert whole.first is not None
    assert whole.began <= whole.first <= whole.ended
    assert "no healthy upstream" in refused.error
    assert (cut.whole, cut.upstream) == (False, "10.0.0.1:8000")
    assert recorder.running == 0


async def test_a_load_that_is_stopped_sends_nothing_more() -> None:
    """Requests in flight still get their answers."""
    async with http(answer) as port:
        recorder = Recorder("127.0.0.1", port)
        running = asyncio.create_task(recorder.run(Arrival(at, 0, 0, b"whole") for at in (0.0, 0.05, 3600.0)))
        while sum(record.good for record in recorder.records) < 2:
            await asyncio.sleep(0.01)
        recorder.stop()
        running.cancel()  # it sleeps until the third one is due
        await asyncio.wait((running,))
        recorder.close()

    assert [record.good for record in recorder.records] == [True, True]


def test_usage_is_read_from_the_end_of_a_stream() -> None:
    """Nothing said, or half of it: zeros."""
    assert usage(b'data: {"usage":{"prompt_tokens":7}}\n\ndata: [DONE]\n\n') == (7, 0)
    assert usage(b"data: [DONE]") == usage(b'..."usage":{"prompt_to') == (0, 0)


def test_envoy_is_configured_to_report() -> None:
    """The headers are added to whatever configuration there is, in front of nothing else."""
    plain = config(Gateway(endpoints=["127.0.0.1:1"], picker="127.0.0.1:2"))
    manager = with_route_headers(plain)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    added = manager["typed_config"]["route_config"]["response_headers_to_add"]

    assert {header["header"]["key"] for header in added} >= TOLD.keys()


# -- direct


@asynccontextmanager
async def picker(
    decide: Callable[[PickRequest], Decision], ended: list[AccessLogEntry], limits: Limits | None = None
) -> AsyncIterator[Direct]:
    """A picker's ext_proc port with a decision of one's own, and a connection to it."""
    server = await serve_http2(ext_proc_methods(decide, ended.extend, Health()), "127.0.0.1", 0, limits)
    try:
        async with await Direct.open("127.0.0.1", server.port) as direct:
            yield direct
    finally:
        await server.close()


async def asked(direct: Direct, *requests: tuple[str, bytes]) -> dict[str, PickAnswer]:
    """All at once; the answers by id."""
    answers: dict[str, PickAnswer] = {}
    whole = asyncio.Event()

    def done(answer: PickAnswer) -> None:
        answers[answer.id] = answer
        if len(answers) == len(requests):
            whole.set()

    for name, body in requests:
        direct.ask(name, HEADERS, body, done)
    await asyncio.wait_for(whole.wait(), SECONDS)
    return answers


async def test_the_direct_client_asks_as_envoy_does() -> None:
    """Method, path, headers and the whole body arrive; picks, session ids and refusals come back."""
    seen: list[PickRequest] = []

    def decide(ask: PickRequest) -> Decision:
        seen.append(ask)
        if ask.body == b"shed":
            raise Shed("too busy")
        return PickResult(("10.0.0.1:8000", "10.0.0.2:8000"), ((SESSION_HEADER, f"s-{len(ask.body)}"),))

    ended: list[AccessLogEntry] = []
    async with picker(decide, ended) as direct:
        answers = await asked(direct, ("a", b"x" * 50_000), ("b", b"shed"))
        direct.ended([answers["a"]])
        while not ended:
            await asyncio.sleep(0.01)

    assert (seen[0].method, seen[0].path, len(seen[0].body)) == ("POST", "/v1/completions", 50_000)
    assert seen[0].headers == {REQUEST_ID_HEADER: "a"}
    assert answers["a"] == PickAnswer("a", PICKED, "10.0.0.1:8000", "s-50000")
    assert answers["b"].status == 429
    assert (ended[0].session, ended[0].upstream, ended[0].status) == ("s-50000", "10.0.0.1:8000", 200)
    assert direct.waiting == 0


async def test_more_than_a_window_of_requests_passes() -> None:
    """Data beyond the connection's window is sent later, in order."""
    sizes: list[int] = []

    def decide(ask: PickRequest) -> Decision:
        sizes.append(len(ask.body))
        return PickResult(("10.0.0.1:8000",))

    async with picker(decide, [], Limits(connection_window=100_000)) as direct:
        answers = await asked(direct, *((str(number), b"x" * 40_000) for number in range(20)))

    assert len(answers) == 20
    assert sizes == [40_000] * 20


async def test_a_broken_connection_answers_every_request() -> None:
    """All waiting requests are answered when the picker is gone; a body that is too long is refused before it
    is sent."""

    def never(_: PickRequest) -> PendingResult:
        return AwaitedResult(asyncio.get_running_loop().create_future())

    server = await serve_http2(ext_proc_methods(never, lambda _: None, Health()), "127.0.0.1", 0)
    async with await Direct.open("127.0.0.1", server.port) as direct:
        answers: list[PickAnswer] = []
        direct.ask("a", HEADERS, b"{}", answers.append)
        with pytest.raises(ValueError, match="at most"):
            direct.ask("b", HEADERS, b"x" * (LONGEST_BODY + 1), answers.append)
        await server.close()
        while not direct.closed:
            await asyncio.sleep(0.01)

    assert answers == [PickAnswer("a", NO_ANSWER)]


async def test_the_asker_settles_every_pick() -> None:
    """Every pick is settled exactly once, and none is pending when the client returns."""
    picks = 0

    def decide(_: PickRequest) -> Decision:
        nonlocal picks
        picks += 1
        return PickResult(("10.0.0.1:8000",), ((SESSION_HEADER, f"s-{picks}"),))

    ended: list[AccessLogEntry] = []
    async with picker(decide, ended) as direct:
        client = SteadyClient([direct], 200)
        await asyncio.wait_for(client.run(0.3), SECONDS)
        while len(ended) < client.sent:
            await asyncio.sleep(0.01)

    assert client.sent == picks > 0
    assert client.statuses == {PICKED: picks}
    assert len({entry.session for entry in ended}) == len(ended) == picks


async def test_a_settler_waits_as_long_as_an_engine_would() -> None:
    """A log_writer reports picks that are old enough are settled, unless all are requested."""
    ended: list[AccessLogEntry] = []
    async with picker(lambda _: PickResult(("10.0.0.1:8000",)), ended) as direct:
        log_writer = AccessLogWriter(direct, seconds=3600)
        log_writer.picked(PickAnswer("a", PICKED, "10.0.0.1:8000", "s"))
        log_writer.settle()
        await asked(direct, ("b", b"{}"))
        early = len(ended)
        log_writer.settle(rest=True)
        while not ended:
            await asyncio.sleep(0.01)

    assert (early, len(ended)) == (0, 1)
