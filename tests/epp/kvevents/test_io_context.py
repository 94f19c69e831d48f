"""Tests of ZMQ sockets on the event loop."""

import asyncio

from kvist_epp.engines.vllm.kv_events import Batch, Cleared
from kvist_epp.kvevents.io_context import IoContext, SubscriberLimits
from kvist_sim.publisher import Publisher, PublisherConfig


async def test_a_socket_that_waits_for_its_turn_is_reported_once() -> None:
    """Unread messages do not wake the loop again and again; the next message after them does."""
    calls: list[int] = []
    engine = Publisher(PublisherConfig(endpoint="tcp://127.0.0.1:*"))
    io = IoContext(SubscriberLimits(), ipv6=False)
    socket = io.connect_subscriber(engine.endpoint, lambda: calls.append(1), lambda: None)
    try:
        async with asyncio.timeout(20):
            while not calls:
                engine.publish(Batch(ts=1.0, rank=0, events=[Cleared()]))
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            before = len(calls)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert len(calls) == before
            while socket.receive() is not None:
                pass
            engine.publish(Batch(ts=1.0, rank=0, events=[Cleared()]))
            while len(calls) == before:
                await asyncio.sleep(0.001)
    finally:
        socket.close()
        io.close()
        engine.close()
