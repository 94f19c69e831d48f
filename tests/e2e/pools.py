"""The pools of examples/, as they are there but for the model: nothing here reaches a hub."""

import asyncio
from typing import Any, Final

from tests.charts.generate import CHART
from tests.charts.helm import RELEASE, settings
from tests.cluster.certified import pickers
from tests.cluster.certified import picks as picked
from tests.cluster.pooled import CONFIG, MODEL, PICKERS, Served
from tests.cluster.space import Space
from tests.e2e.commands import Commands, patch
from tests.e2e.edge import CLUSTER_IP, attached, gateway_address

Json = dict[str, Any]
HOST: Final = "llm.example.com"
PREFIXES: Final = 6
EACH: Final = 4
"""Requests with the same beginning, after the first."""
EVENTS_SECONDS: Final = 1.0
ENDS: Final = 'kvist_epp_requests_ended_total{source="access-log"}'
WAIT: Final = ("--wait", "--timeout=180s")
QUICK: Final = settings(extraArgs=["--discovery-interval=2"])
OURS: Final[Json] = {
    "spec__model": {"source": MODEL, "shape": {"config": CONFIG}},
    "spec__picker": {"resources": PICKERS},
}


async def release(commands: Commands, system: Space, *words: str) -> None:
    """Installed, or upgraded with more values; its pod is ready."""
    where = (f"--namespace={system.name}", "--install", *WAIT, *QUICK)
    await commands.helm("upgrade", RELEASE, str(CHART), *where, *words)
    await system.rolled_out("kvist-operator")


async def end(commands: Commands, system: Space) -> None:
    """Uninstalled, if it was there."""
    await commands.helm("uninstall", RELEASE, f"--namespace={system.name}", "--ignore-not-found", "--wait")


async def minimal(commands: Commands, system: Space, room: Space) -> Served:
    """examples/01-minimal, ready behind its own Envoy."""
    await commands.apply("01-minimal", room.name, patch("InferencePool", **OURS))
    made = Served(commands.cluster, room, system, "qwen")
    await made.until_ready()
    return made


async def routed(commands: Commands, system: Space, room: Space, **more: Any) -> Served:
    """examples/04-httproute/envoy-gateway, ready behind a Gateway that took it; ``more``: of its pool."""
    patches = (
        patch("InferencePool", **OURS, **more),
        patch("EnvoyProxy", spec__provider=CLUSTER_IP, spec__concurrency=1),
    )
    await commands.apply("04-httproute/envoy-gateway", room.name, *patches)
    made = Served(commands.cluster, room, system, "routed", host=HOST)
    await made.until_ready()
    await attached(room, made.name)
    made.gateway = await gateway_address(room)
    return made


async def counted(pool: Served, series: str) -> int:
    """The sum of a metric of all pickers."""
    return sum([await picked(pool, pod, series) for pod in await pickers(pool)])


async def answers(pool: Served) -> bool:
    """Return whether a request is answered, which it is not before the gateway's Envoys have received the
    route."""
    try:
        await pool.ask("Is there an answer?")
    except (AssertionError, OSError):
        return False
    return True


async def status(pool: Served, more_bytes: int = 0) -> int:
    """Return the status of one request whose body has ``more_bytes`` of padding."""
    body = {
        "model": pool.name,
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 2,
        "metadata": {"padding": "x" * more_bytes},
    }
    async with (
        pool.cluster.http(force_close=True) as http,
        http.post(pool.url, json=body, headers=pool.headers) as response,
    ):
        await response.read()
        return response.status


async def cached(pool: Served) -> float:
    """The share of prompts that was in a cache, where another prompt had begun the same."""

    async def asked(prefix: int, number: int) -> Json:
        text = f"Chapter {prefix} is about a forest of {prefix} words. " * 40
        answer = await pool.ask(f"{text} What is question {number}?")
        usage: Json = answer["usage"]
        return usage

    await asyncio.gather(*(asked(prefix, 0) for prefix in range(PREFIXES)))
    await asyncio.sleep(EVENTS_SECONDS)
    later = [asked(prefix, number + 1) for number in range(EACH) for prefix in range(PREFIXES)]
    found = await asyncio.gather(*later)
    hits = sum(int(usage["prompt_tokens_details"]["cached_tokens"]) for usage in found)
    return hits / sum(int(usage["prompt_tokens"]) for usage in found)


async def rolled(pool: Served) -> None:
    """Every engine is another one, with the new argument."""
    before = {pod["metadata"]["uid"] for pod in await pool.engines()}
    await pool.patch(engine={"maxNumSeqs": 64})

    async def done() -> bool:
        found = {pod["metadata"]["uid"] for pod in await pool.engines()}
        return len(found) == len(before) and not found & before

    await pool.room.until(done, f"other engines of {pool.name}", seconds=240)
    await pool.until_ready(seconds=240)
