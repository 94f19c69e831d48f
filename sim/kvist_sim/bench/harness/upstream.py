"""Answer for twenty engines at almost no cost: one process, many ports, one answer to everything.

``python -m kvist_sim.bench.harness.upstream [--without-metrics] PORT…``. A benchmark of the picker must not
measure its engines.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, cast

HOST: Final = "127.0.0.1"
_ANSWER_BODY: Final = (
    b'{"id":"cmpl-0","object":"text_completion","created":0,"model":"kvist-bench","choices":[{"index":0,'
    b'"text":"ok","finish_reason":"length"}],"usage":{"prompt_tokens":10,"completion_tokens":1}}'
)
_METRICS_BODY: Final = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="kvist-bench"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="kvist-bench"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="kvist-bench"} 0.4
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="16384"} 1.0
"""


def answer(kind: bytes, body: bytes) -> bytes:
    """Return a whole answer with status 200."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body)) + body


ANSWER: Final = answer(b"application/json", _ANSWER_BODY)
METRICS: Final = answer(b"text/plain; version=0.0.4", _METRICS_BODY)


class Upstream(asyncio.Protocol):
    """One connection. Counts body bytes instead of keeping them, and answers when the last one has come.

    Chunked bodies too: Envoy takes the length away when the picker streams the body back.
    """

    __slots__ = ("_chunked", "_left", "_line", "_transport")

    def __init__(self) -> None:
        self._line = b""
        self._left = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is no subclass

    def on_body(self, data: bytes) -> None:
        """Take a part of a body, with the line ends of chunks; nothing is kept."""

    def respond(self) -> None:
        """Answer a request whose body has come."""
        self._transport.write(ANSWER)

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes."""
        while data:
            if self._left:
                data = self._skip(data)
            elif self._chunked:
                data = self._chunk(data)
            else:
                data = self._head(data)

    def _skip(self, data: bytes) -> bytes:
        """Body bytes, or a chunk with its line end; what follows."""
        taken = min(self._left, len(data))
        self._left -= taken
        self.on_body(data[:taken])
        if self._left == 0 and not self._chunked:
            self.respond()
        return data[taken:]

    def _chunk(self, data: bytes) -> bytes:
        """Read a chunk's first line; return the data after it. The last chunk is followed by an empty line,
        without trailers."""
        line, end, rest = (self._line + data).partition(b"\r\n")
        if not end or (line == b"0" and len(rest) < len(end)):
            self._line += data
            return b""
        self._line = b""
        if line == b"0":
            self._chunked = False
            self.respond()
            return rest[len(end) :]
        self._left = int(line, 16) + len(end)
        return rest

    def _head(self, data: bytes) -> bytes:
        """Read a request's head; return the data after it."""
        head, end, rest = (self._line + data).partition(b"\r\n\r\n")
        if not end:
            self._line += data
            return b""
        self._line = b""
        head = head.lower()
        self._chunked = b"\r\ntransfer-encoding: chunked" in head
        self._left = 0 if self._chunked else _length(head)
        if not self._left and not self._chunked:
            self._transport.write(self.page(head))
        return rest

    def page(self, head: bytes) -> bytes:
        """Return the answer to a request without a body, by its head in lower case."""
        return METRICS if METRICS_SHOWN and head.startswith(b"get /metrics") else ANSWER


def _length(head: bytes) -> int:
    """Value of Content-Length in a lower-case head; 0 without one."""
    _, _, rest = head.partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0] or 0)


async def serve(ports: Sequence[int]) -> None:
    """Listen on all ports until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Upstream, HOST, port)
    await asyncio.Event().wait()


WITHOUT_METRICS: Final = "--without-metrics"
METRICS_SHOWN: Final = WITHOUT_METRICS not in sys.argv

if __name__ == "__main__":
    import uvloop

    uvloop.run(serve([int(port) for port in sys.argv[1:] if port != WITHOUT_METRICS]))
