"""Engines with the protocol of both legs and no KV cache, in the test's own process, behind a picker and
Envoy."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import kvist_sim.model
from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.launch import HOST, Picker, start_picker
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

MODEL = str(Path(kvist_sim.model.__file__).parent)
EAGER = (sys.executable, "-m", "kvist_sim.eager_picker")


@dataclass
class Engine:
    """One engine; ``prefill`` says how it treats leg 1."""

    port: int
    prefill: str = "ok"
    """``ok``, the status of an error, ``hang``, ``hold`` (until ``released``) or ``close``."""
    first: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of leg 1."""
    served: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of other requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Headers of all of them, in order; names in lower case."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the connection of a hanging leg 1 is closed."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    """Legs that are held now."""
    server: web.Server | None = None
    most_connections: int = 0
    """Most connections that were open when a request came."""

    @property
    def hostport(self) -> str:
        """Return its address."""
        return f"{HOST}:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = json.loads(data := await request.read())
        name = request.headers.get("x-session-id", "")
        if self.server is not None:
            self.most_connections = max(self.most_connections, len(self.server.connections))
        if ".pair." not in name:
            self.headers.append({key.lower(): value for key, value in request.headers.items()})
        asks = (body.get("kv_transfer_params") or {}).get("do_remote_decode") is True
        if ".pair." not in name:
            assert int(request.headers.get("content-length", len(data))) == len(data)
            (self.first if asks else self.served).append(body)
        if asks:
            return await self._first_leg(request, body, quiet=".pair." in name)
        if not body.get("stream"):
            return web.json_response({"object": "x", "choices": [{"text": "answer", "index": 0}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for word in ("an", "swer"):
            await response.write(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _first_leg(self, request: web.Request, body: dict[str, Any], *, quiet: bool) -> web.Response:
        if self.prefill.isdigit() and not quiet:
            return web.json_response({"error": "x"}, status=int(self.prefill))
        if self.prefill == "close" and not quiet and request.transport is not None:
            request.transport.abort()
        if self.prefill == "hang" and not quiet:
            try:
                await asyncio.sleep(3600)
            finally:
                self.left.set()
        if self.prefill == "hold" and not quiet:
            self.held += 1
            try:
                await self.released.wait()
            finally:
                self.held -= 1
        params = {"do_remote_prefill": True, "remote_engine_id": f"e{self.port}", "blocks": [[1, 2]]}
        ids = list(range(len(json.dumps(body)) // 4))
        return web.json_response({"choices": [{}], "prompt_token_ids": ids, "kv_transfer_params": params})


@dataclass
class Connected:
    """The running client, Envoy, picker and engines: the first computes prompts, the second answers."""

    client: aiohttp.ClientSession
    envoy: Envoy
    picker: Picker
    engines: Sequence[Engine]

    async def send(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, str]:
        """Status and text of one request through Envoy."""
        async with self.client.post(f"{self.envoy.url}{path}", json=body, headers=headers) as response:
            return response.status, await response.text()

    async def metric(self, name: str) -> float:
        """Return the sum of the picker's series that begin like this."""
        async with self.client.get(f"http://{HOST}:{self.picker.metrics_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric has at least this value; the test's time limit bounds it."""
        while await self.metric(name) < value:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def connected(folder: Path, mode: Mode, disaggregation: str = "on") -> AsyncIterator[Connected]:
    """All of it started and ready; the pair of engines is connected if the picker drives the legs."""
    async with AsyncExitStack() as stack:
        engines = [Engine(port) for port in free_ports(2)]
        for engine in engines:
            app = web.Application(client_max_size=8 << 20)
            app.router.add_get("/health", _healthy)
            app.router.add_post("/{path:.*}", engine.handle)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, HOST, engine.port).start()
            engine.server = runner.server
        rows = [
            {"name": role, "namespace": "t", "address": HOST, "port": engine.port, "kvEvents": None}
            | {"labels": {"kvist.dev/role": role}}
            for role, engine in zip(("prefill", "decode"), engines, strict=True)
        ]
        file = folder / "endpoints.json"
        file.write_text(json.dumps({"endpoints": rows}))
        children = await stack.enter_async_context(Children(folder))
        flags = ["--scrape-interval=0.5", "--log-format=json", "--kv-events=false"]
        arguments = [*flags, f"--disaggregation={disaggregation}"]
        picker = await start_picker(children, file, MODEL, arguments=arguments, program=EAGER)
        gateway = Gateway(
            endpoints=[engine.hostport for engine in engines],
            picker=picker.address,
            mode=mode,
            failure_mode_allow=False,
        )
        envoy = await stack.enter_async_context(Envoy(config(gateway)))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        running = Connected(client, envoy, picker, engines)
        await running.until('kvist_epp_endpoints{state="ready"}', 2)
        if disaggregation == "on":
            await running.until('kvist_epp_disaggregation_pairs{state="warm"}', 1)
        yield running


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()
