"""Dynamo's selection service behind a local socket: run by an interpreter that has ``ai-dynamo-runtime``.

Its own server listens on every address; this one listens on 127.0.0.1 alone. One JSON object a line in, one a
line out: ``{"worker": {…}}``, ``{"select": {…}}``, ``{"prefilled": id}``, ``{"free": id}``, as the methods of
``dynamo.llm.SelectionService`` take them. A selection's answer is the number of the worker, and the seconds
that it took.

Imports nothing of ours: that interpreter has none of it.
"""

import asyncio
import json
import sys
import time
from typing import Any

from dynamo.llm import SelectionService  # type: ignore[import-not-found]


async def main(port: int) -> None:
    """Serve until the process ends."""
    service = SelectionService()
    server = await asyncio.start_server(
        lambda reader, writer: serve(service, reader, writer), "127.0.0.1", port, limit=1 << 26
    )
    async with server:
        await server.serve_forever()


async def serve(service: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: questions in order."""
    async for line in reader:
        try:
            answer = await answered(service, json.loads(line))
        except Exception as error:  # noqa: BLE001  # whatever it says is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode() + b"\n")
    writer.close()


async def answered(service: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the service's answer."""
    if "select" in asked:
        began = time.perf_counter()
        found = await service.select_and_reserve(asked["select"])
        return {"worker": found["worker_id"], "seconds": time.perf_counter() - began}
    if "prefilled" in asked:
        await service.prefill_complete(asked["prefilled"])
    elif "free" in asked:
        await service.free_reservation(asked["free"])
    elif "worker" in asked:
        await service.upsert_worker(asked["worker"])
    return {}


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
