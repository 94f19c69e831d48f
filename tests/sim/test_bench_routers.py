"""Tests of the bench of other projects' routers: its report, and the client of Dynamo's selection service."""

import asyncio
import contextlib
import dataclasses
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.routers.dynamo import SelectingTarget, Service
from kvist_sim.bench.routers.kinds import ROUTERS, VERSIONS, EnginePool, python
from kvist_sim.bench.routers.report import Absent, RouterFigures, RouterReport, document, table
from kvist_sim.demo.plan import DemoPlan
from kvist_sim.load import summarise
from kvist_sim.ports import free_ports
from kvist_sim.processes import ChildFailedError, Children

SUMMARY = dataclasses.replace(
    summarise([], begin=0.0, end=1.0), requests=100, ttft_p50=0.1, prompt_tokens=10, cached_tokens=9
)
OURS = RouterFigures("kvist", "", "events", SUMMARY, {"picker": 0.0002, "proxy": 0.0003}, 0.002)
OTHER = RouterFigures("other", "1.0", "nothing", SUMMARY, {"router": 0.0004}, 0.001, note="It does not look.")


def test_each_router_has_a_row_with_its_figures() -> None:
    """Times in milliseconds, shares in percent, CPU by part; notes and absences stand below."""
    out = io.StringIO()
    report = RouterReport(DemoPlan(), [OURS, OTHER, Absent("gone", "2.0", "no wheel")])
    Console(file=out, width=110).print(table(report))
    page = out.getvalue()
    assert "90.0%" in page
    assert "200 + 300" in page
    assert "It does not look." in page
    assert "gone 2.0 did not run: no wheel" in page


def test_the_document_is_json() -> None:
    """All of it, the absent ones too."""
    report = RouterReport(DemoPlan(), [OURS, Absent("gone", "2.0", "no wheel")])
    found = json.loads(json.dumps(document(report)))
    assert [router["name"] for router in found["routers"]] == ["kvist", "gone"]
    assert found["routers"][0]["cpu"] == {"picker": 0.0002, "proxy": 0.0003}


def test_only_our_own_failures_break_the_bench() -> None:
    """Requests of ours that fail, or a picker that does not run; others are shown as they are."""
    failed = dataclasses.replace(SUMMARY, errors=2)
    assert RouterReport(DemoPlan(), [OURS]).broken() == []
    assert (
        RouterReport(
            DemoPlan(), [dataclasses.replace(OTHER, summary=failed), Absent("gone", "", "why")]
        ).broken()
        == []
    )
    assert RouterReport(DemoPlan(), [dataclasses.replace(OURS, summary=failed)]).broken() == [
        "2 requests failed"
    ]
    assert RouterReport(DemoPlan(), [Absent("kvist", "", "no envoy")]).broken() == ["no envoy"]


def test_names_are_unique() -> None:
    """``--only`` means one router."""
    assert len({router.name for router in ROUTERS}) == len(ROUTERS)


def test_an_environment_that_is_complete_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is installed twice."""
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    home = tmp_path / "routers" / f"vllm-router-{VERSIONS['vllm-router']}"
    home.mkdir(parents=True)
    (home / "complete").touch()
    assert python("vllm-router") == home / "bin" / "python"


async def test_a_request_goes_where_the_service_says_and_its_end_is_reported(tmp_path: Path) -> None:
    """The engine selected answers; the service gets the prompt's tokens, the first token and the end."""
    heard: list[dict[str, object]] = []
    async with _service(heard) as service, _engines(2) as (ports, bodies):
        target = SelectingTarget(service, _pool(ports, tmp_path))
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        assert await target.post(body, lambda _: None) == 200
        while len(heard) < 3:
            await asyncio.sleep(0)
        target.close()
    assert bodies == [[], [body]]
    assert heard[0]["select"]["token_ids"]  # type: ignore[index]
    assert heard[1:] == [{"prefilled": "0"}, {"free": "0"}]
    assert "1000.00 ms (median)" in target.note()


async def test_a_service_that_refuses_is_a_failed_component() -> None:
    """The error of a service that refuses is reported."""
    async with _service([]) as service:
        with pytest.raises(ChildFailedError, match="no such thing"):
            await service.ask({"unheard of": 1})


@contextlib.asynccontextmanager
async def _service(heard: list[dict[str, object]]) -> AsyncIterator[Service]:
    """Start a service that selects worker 1 and remembers the questions."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            heard.append(json.loads(line))
            known = {"select", "prefilled", "free"} & set(heard[-1])
            answer = {"worker": 1, "seconds": 1.0} if known else {"error": "no such thing"}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    [port] = free_ports(1)
    async with await asyncio.start_server(serve, launch.HOST, port):
        service = Service(*await asyncio.open_connection(launch.HOST, port))
        try:
            yield service
        finally:
            await service.close()


@contextlib.asynccontextmanager
async def _engines(count: int) -> AsyncIterator[tuple[list[launch.EnginePorts], list[list[bytes]]]]:
    """Servers that say hello, and what they were asked."""
    bodies: list[list[bytes]] = [[] for _ in range(count)]
    ports = launch.engine_ports(count)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(count):

            async def answer(request: web.Request, number: int = number) -> web.Response:
                bodies[number].append(await request.read())
                return web.Response(text="hello")

            app = web.Application()
            app.router.add_post("/v1/chat/completions", answer)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, launch.HOST, ports[number].http).start()
        yield ports, bodies


def _pool(engines: list[launch.EnginePorts], folder: Path) -> EnginePool:
    return EnginePool(engines, str(model_files.folder()), "m", 16, Children(folder), folder)
