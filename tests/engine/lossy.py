"""A relay of KV events that drops messages when a test asks for it, because real networks do not do so on
demand."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio


class LossyRelay:
    """SUB to an engine, PUB to the picker; ``address`` is what the picker connects to."""

    def __init__(self, events: str) -> None:
        self._events = events
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        self.dropped = 0
        self._to_drop = 0

    def drop(self, messages: int) -> None:
        """Lose the next so many messages."""
        self._to_drop += messages

    async def __aenter__(self) -> Self:
        source, out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.connect(self._events)
        port = out.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._task = asyncio.create_task(self._relay(source, out))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)

    async def _relay(self, source: zmq.asyncio.Socket, out: zmq.asyncio.Socket) -> None:
        while True:
            frames = await source.recv_multipart()
            if self._to_drop:
                self._to_drop -= 1
                self.dropped += 1
                continue
            await out.send_multipart(frames)
