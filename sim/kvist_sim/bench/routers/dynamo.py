"""Client of Dynamo's selection service, which does what a Dynamo frontend would do.

A Dynamo frontend renders and tokenises a request before it asks the service. Here this is done before the
load begins, since two cores cannot do it at the same time, and reported separately. The request goes straight
to the engine selected; the service is notified of its first token and of its end.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvist_epp.prompt.request import parse
from kvist_sim import launch, load
from kvist_sim.bench.routers.kinds import START_SECONDS, VERSIONS, EnginePool, Router, RunningRouter, python
from kvist_sim.engine.tokenizer import Prompts
from kvist_sim.ports import free_ports
from kvist_sim.processes import ChildFailedError

PACKAGE: Final = "ai-dynamo-runtime"
SCRIPT: Final = Path(__file__).with_name("dynamo_service.py")
"""Run by another interpreter, never imported."""
LINE_BYTES: Final = 1 << 24
MILLISECONDS: Final = 1e3


class Service:
    """A connection to ``dynamo_service``: one question at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._lock = asyncio.Lock()

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the service's answer. Raises ChildFailedError for an error or no answer."""
        async with self._lock:
            self._writer.write(json.dumps(question).encode() + b"\n")
            line = await self._reader.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has gone"}
        if "error" in answer:
            raise ChildFailedError(PACKAGE, str(answer["error"]), "")
        return answer

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class SelectingTarget(load.Target):
    """Posts to the engine that the service selects."""

    def __init__(self, service: Service, pool: EnginePool) -> None:
        super().__init__(launch.HOST, 0)
        self._service, self._served = service, pool.served
        self._prompts = Prompts(pool.model)
        self._engines = [load.Target(launch.HOST, engine.http) for engine in pool.engines]
        self._numbers = itertools.count()
        self._later: set[asyncio.Task[dict[str, Any]]] = set()
        self.picks: list[float] = []
        """Seconds that each selection took inside the service."""
        self.tokenised: list[float] = []
        """CPU seconds that rendering and tokenising took."""
        self._known: dict[bytes, list[int]] = {}

    async def post(self, body: bytes, on_data: Callable[[bytes], None]) -> int:
        """Select an engine, send the request, report its end. Raises OSError, HttpError, ChildFailedError."""
        name = str(next(self._numbers))
        wanted = {
            "model_name": self._served,
            "selection_id": name,
            "token_ids": self._known.get(body) or self.prepare(body),
        }
        found = await self._service.ask({"select": wanted})
        self.picks.append(found["seconds"])
        first = functools.partial(self._first, name, on_data, [])
        try:
            return await self._engines[int(found["worker"])].post(body, first)
        finally:
            self._tell({"free": name})

    def close(self) -> None:
        """Close the idle connections. Events that are not sent yet are dropped."""
        for engine in self._engines:
            engine.close()
        for task in self._later:
            task.cancel()

    def note(self) -> str:
        """Return the duration of a selection in words."""
        pick, words = (statistics.median(found) * MILLISECONDS for found in (self.picks, self.tokenised))
        return (
            f"{PACKAGE}: a selection takes {pick:.2f} ms (median). Not in the row: {words:.1f} ms of CPU a "
            "request to render\nand tokenise."
        )

    def prepare(self, body: bytes) -> list[int]:
        """Return the token ids of a body."""
        began = time.thread_time()
        [ids] = self._prompts.ids(parse(load.CHAT_PATH, body))
        self.tokenised.append(time.thread_time() - began)
        self._known[body] = ids
        return ids

    def _first(self, name: str, on_data: Callable[[bytes], None], seen: list[str], data: bytes) -> None:
        if not seen:
            seen.append(name)
            self._tell({"prefilled": name})
        on_data(data)

    def _tell(self, what: Mapping[str, Any]) -> None:
        task = asyncio.ensure_future(self._service.ask(what))
        self._later.add(task)
        task.add_done_callback(self._later.discard)


@contextlib.asynccontextmanager
async def selection(pool: EnginePool) -> AsyncIterator[RunningRouter]:
    """Start the service in a process of its own."""
    [port] = free_ports(1)
    child = pool.children.start(PACKAGE, [str(python(PACKAGE)), str(SCRIPT), str(port)])
    await pool.children.ready(child, functools.partial(_listens, port), START_SECONDS)
    reader, writer = await asyncio.open_connection(launch.HOST, port, limit=LINE_BYTES)
    service = Service(reader, writer)
    try:
        await _enrol(service, pool.engines, pool)
        target = SelectingTarget(service, pool)
        yield RunningRouter(target, {"picker": child}, target.note, target.prepare)
    finally:
        await service.close()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(launch.HOST, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _enrol(service: Service, engines: Sequence[launch.EnginePorts], pool: EnginePool) -> None:
    for number, engine in enumerate(engines):
        worker = {
            "worker_id": number,
            "model_name": pool.served,
            "endpoint": f"http://{engine.hostport}",
            "block_size": pool.block_size,
            "kv_events_endpoint": f"tcp://{launch.HOST}:{engine.events}",
            "replay_endpoint": f"tcp://{launch.HOST}:{engine.replay}",
        }
        await service.ask({"worker": worker})


DYNAMO: Final = Router(
    "dynamo", VERSIONS[PACKAGE], "engines' events, blocks to prefill and decode", selection
)
