"""A hundred engines that answer scrapes as vLLM does, in this process: each with figures of its own."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from aiohttp import web

from kvist_sim.launch import HOST
from kvist_sim.ports import free_ports

BLOCKS: Final = 32_000
FULL: Final = 17
"""Number of the engine whose KV cache is full while requests wait."""
_PAGE: Final = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{blocks}"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} 900000.0
vllm:prefix_cache_hits_total{{engine="0"}} 700000.0
vllm:prompt_tokens_total{{engine="0"}} 900000.0
vllm:num_preemptions_total{{engine="0"}} 0.0
"""


@asynccontextmanager
async def many_engines(count: int, silent: Sequence[int]) -> AsyncIterator[dict[str, Any]]:
    """Yield the endpoints file of so many engines; those of the numbers ``silent`` do not listen."""
    ports = free_ports(count)
    async with AsyncExitStack() as stack:
        for number, port in enumerate(ports):
            if number not in silent:
                await _serve(number, port, stack)
        yield {
            "endpoints": [
                {"name": f"qwen-{number}", "namespace": "serving", "address": HOST, "port": port}
                for number, port in enumerate(ports)
            ]
        }


async def _serve(number: int, port: int, stack: AsyncExitStack) -> None:
    figures = {
        "running": 256 if number == FULL else number % 60,
        "waiting": 12 if number == FULL else 0,
        "usage": 0.99 if number == FULL else (number % 17) / 20,
        "blocks": BLOCKS,
    }

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=_PAGE.format(**figures))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "Qwen/Qwen3-32B", "max_model_len": 32768}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", models), web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, HOST, port).start()
