"""Process that answers ``/metrics`` for engines of a given load, and nothing else.

``python -m kvist_sim.bench.queue.engines FILE PORT…``. The file has the number of running
requests that each engine reports; it is read again for each scrape.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

HOST: Final = "127.0.0.1"
_PAGE: Final = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="queue"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="queue"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="queue"}} 0.4
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="16384"}} 1.0
"""


class LoadedEngine(asyncio.Protocol):
    """One connection of a scraper."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, as ``asyncio.Protocol`` requires."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Answer each request once its head is there; requests have no bodies."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._transport.write(self._answer(head))

    def _answer(self, head: bytes) -> bytes:
        if not head.startswith(b"GET /metrics"):
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        page = _PAGE.format(running=float(self._file.read_text())).encode()
        kind = b"text/plain; version=0.0.4"
        return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
            kind,
            len(page),
            page,
        )


async def serve(file: Path, ports: Sequence[int]) -> None:
    """Listen on all ports until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: LoadedEngine(file), HOST, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
