"""Answer for all engines of a pool with disaggregation at almost no cost: one process, many ports.

``python -m kvist_sim.bench.disaggregation.leg_engines SECONDS PORT…``. Leg 1 gets the answer of vLLM 0.32
with NixlConnector, after SECONDS: the description of the blocks, and the token ids if they are asked for.
All other requests get a short answer at once.
"""

import asyncio
import functools
import json
import random
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from kvist_sim.bench.harness.upstream import HOST, Upstream, answer

TAIL_BYTES: Final = 1024
"""End of a body that is kept: the picker adds its members there."""
ASKS_FOR_BLOCKS: Final = b'"do_remote_decode":true'
ASKS_FOR_IDS: Final = b'"return_token_ids":true'
BYTES_PER_TOKEN: Final = 4
"""Of English text, roughly, with the vocabulary of recent models …"""
VOCABULARY: Final = 128_000
"""… which has so many tokens."""
BLOCK_TOKENS: Final = 16


class LegEngine(Upstream):
    """One connection to one engine."""

    __slots__ = ("_engine", "_seconds", "_size", "_tail")

    def __init__(self, engine: str, seconds: float) -> None:
        """``engine``: its id. ``seconds``: how long leg 1 takes."""
        super().__init__()
        self._engine, self._seconds = engine, seconds
        self._size, self._tail = 0, b""

    def on_body(self, data: bytes) -> None:
        """Count the bytes, and keep the last ones."""
        self._size += len(data)
        whole = data if len(data) >= TAIL_BYTES else self._tail + data
        self._tail = whole[-TAIL_BYTES:]

    def respond(self) -> None:
        """Answer the request whose body has come."""
        size, tail = self._size, self._tail
        self._size, self._tail = 0, b""
        if ASKS_FOR_BLOCKS not in tail:
            super().respond()
            return
        found = first_leg(self._engine, size // BYTES_PER_TOKEN, ids=ASKS_FOR_IDS in tail)
        if self._seconds:
            asyncio.get_running_loop().call_later(self._seconds, self._transport.write, found)
        else:
            self._transport.write(found)


@functools.lru_cache(maxsize=1024)
def first_leg(engine: str, tokens: int, *, ids: bool) -> bytes:
    """Return the whole answer to a leg 1 of so many tokens; ``ids``: with those of the prompt."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 2 + tokens // BLOCK_TOKENS))],
        "remote_engine_id": engine,
        "remote_request_id": "cmpl-0f7b1c5e-0-810cbf3c",
        "remote_host": HOST,
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    body = {
        "id": "cmpl-0",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 1},
        "prompt_token_ids": _ids(tokens) if ids else None,
        "kv_transfer_params": params,
    }
    return answer(b"application/json", json.dumps(body, separators=(",", ":")).encode())


def _ids(count: int) -> list[int]:
    draw = random.Random(count).randrange
    return [draw(VOCABULARY) for _ in range(count)]


async def serve(seconds: float, ports: Sequence[int]) -> None:
    """Listen on all ports until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(functools.partial(LegEngine, f"engine-{port}", seconds), HOST, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
