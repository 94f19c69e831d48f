"""KV events of a running engine over real ZMQ: what a router learns is what the engine holds."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from tests.sim.engines import Client, engine
from tests.sim.naive_pool import Subscriber

from kvist_epp.engines.vllm.kv_events import Batch, Cleared, Stored, decode
from kvist_sim.ports import free_ports

CHAT = "/v1/chat/completions"


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """Sockets that are closed whatever happens."""
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def ports(count: int = 2) -> list[int]:
    """Free ports for events and replay."""
    return free_ports(count)


def config(events: int, replay: int) -> tuple[str, ...]:
    """The flags of an engine that publishes there."""
    return (
        *("--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.topic", "kv@m"),
        *("--kv-events-config.endpoint", f"tcp://*:{events}"),
        *("--kv-events-config.replay_endpoint", f"tcp://*:{replay}"),
    )


async def replay(context: zmq.asyncio.Context, port: int, start: int = 0) -> list[tuple[int, Batch]]:
    """Every batch the engine still has, with its number."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
    found: list[tuple[int, Batch]] = []
    while True:
        _, topic, seq, payload = await dealer.recv_multipart()
        if seq == b"\xff" * 8:
            return found
        assert topic == b"kv@m"
        found.append((int.from_bytes(seq, "big"), decode(payload)))


async def busy(client: Client) -> None:
    """A mix that hits, evicts, shares and overlaps."""
    prompts = [f"Rivers change their beds slowly, number {number % 5}. " * 4 for number in range(24)]
    await asyncio.gather(*(client.complete(prompt, 1 + number) for number, prompt in enumerate(prompts)))


async def test_replayed_events_are_the_cache(context: zmq.asyncio.Context) -> None:
    """Folding all batches from number 0 gives exactly the pool's content, evictions included."""
    events, again = ports()
    async with engine(
        *config(events, again), "--num-gpu-blocks-override", "40", "--max-num-seqs", "4"
    ) as client:
        await busy(client)
        batches = await replay(context, again)
        pool = client.running.engines[0].scheduler.pool
        _, sources = await client.get("/kv_event_sources")
        subscriber = Subscriber()
        for _, batch in batches:
            subscriber.apply(batch.events)

        assert subscriber.content() == pool.cached()

    assert [number for number, _ in batches] == list(range(len(batches)))
    assert {batch.rank for _, batch in batches} == {0}
    assert sources["0"]["endpoint"] == f"tcp://*:{events}"
    assert (sources["0"]["publisher"], sources["0"]["topic"]) == ("zmq", "kv@m")


async def test_live_events_carry_the_session(context: zmq.asyncio.Context) -> None:
    """X-Session-ID is on every block a request stores; the first parent is where its hit ended."""
    events, again = ports()
    async with engine(*config(events, again)) as client:
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"kv@m")
        socket.connect(f"tcp://127.0.0.1:{events}")
        await asyncio.sleep(0)
        body = {"model": "m", "messages": [{"role": "user", "content": "moon " * 60}], "max_tokens": 1}
        while not await socket.poll(20):  # until the subscription has arrived
            await client.complete(f"warm up {asyncio.get_running_loop().time()} " * 9)
        await client.post(CHAT, body, x_session_id="r.1")
        body["messages"].append({"role": "user", "content": "moon " * 60})  # type: ignore[attr-defined]
        _, answer = await client.post(CHAT, body, x_session_id="r.2")
        stored: dict[str | None, list[Stored]] = {}
        while "r.2" not in stored:
            _, _, payload = await socket.recv_multipart()
            for event in decode(payload).events:
                assert isinstance(event, Stored)
                stored.setdefault(event.session, []).append(event)

    first, second = stored["r.1"][0], stored["r.2"][0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (first.parent, first.kind, first.group, first.block_size) == (None, "full_attention", 0, 16)
    assert second.parent == first.hashes[cached // 16 - 1]
    assert cached >= 64


async def test_salt_and_adapter_are_published(context: zmq.asyncio.Context) -> None:
    """The salt stands on the block that begins a prompt, the adapter on every block."""
    events, again = ports()
    lora = ("--enable-lora", "--lora-modules", "ad=/p/ad")
    async with engine(*config(events, again), *lora) as client:
        await client.complete("Rivers change their beds slowly. " * 4, 30, model="ad", cache_salt="s")
        found = [event for _, batch in await replay(context, again) for event in batch.events]

    stored = [event for event in found if isinstance(event, Stored)]
    assert len(stored) > 1
    assert {event.lora for event in stored} == {"ad"}
    assert [event.salt for event in stored] == ["s"] + [None] * (len(stored) - 1)


async def test_reset_is_announced_with_the_next_step(context: zmq.asyncio.Context) -> None:
    """/reset_prefix_cache forgets at once; AllBlocksCleared comes when the engine next works, as in vLLM."""
    events, again = ports()
    async with engine(*config(events, again), VLLM_SERVER_DEV_MODE="1") as client:
        await client.complete("Rivers change their beds slowly. " * 4)
        answer = await client.post("/reset_prefix_cache", {})
        before = await replay(context, again)
        await client.complete("moon " * 50)
        after = await replay(context, again, len(before))

    assert answer == (200, {"success": True})
    assert not any(isinstance(event, Cleared) for _, batch in before for event in batch.events)
    assert isinstance(after[0][1].events[0], Cleared)


async def test_ranks_publish_on_ports_of_their_own(context: zmq.asyncio.Context) -> None:
    """Rank r adds r to both ports and says its number in every batch."""
    events, again = ports()
    async with engine(*config(events, again), "--data-parallel-size", "2") as client:
        for rank in ("0", "1"):
            prompt = {"model": "m", "prompt": "moon " * 50, "max_tokens": 1}
            await client.post("/v1/completions", prompt, x_data_parallel_rank=rank)
        found = [[batch.rank for _, batch in await replay(context, again + rank)] for rank in (0, 1)]

    assert found == [[0], [1]]


async def test_full_report_repeats_what_was_hit(context: zmq.asyncio.Context) -> None:
    """kv_cache_report_mode full: blocks that were hit are announced again, though nothing was stored."""
    events, again = ports()
    async with engine(*config(events, again)) as client:
        await client.complete("moon " * 50, 1)
        before = await replay(context, again)
        await client.complete("moon " * 50, 1, vllm_xargs={"kv_cache_report_mode": "full"})
        after = await replay(context, again, len(before))

    stored = before[0][1].events[0]
    repeated = after[0][1].events[0]
    assert isinstance(stored, Stored)
    assert isinstance(repeated, Stored)
    assert repeated.hashes == stored.hashes[: len(repeated.hashes)]
    assert len(repeated.hashes) > 1
