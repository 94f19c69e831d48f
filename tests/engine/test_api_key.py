"""The API key of real vLLM, as the operator gives it to engines and the picker reads it."""

from pathlib import Path

import aiohttp
from tests.engine import tiny
from tests.engine.vllm import VllmEngine

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.prewarm.prewarm_client import PrewarmClient, PrewarmOutcome

BODY = {"model": "m", "prompt": "Hello", "max_tokens": 1}
EMBEDDING = {"model": "m", "input": "Hello"}
OPEN = ("/health", "/metrics", "/version", "/ping")


async def test_vllm_guards_v1_with_the_key_of_the_variable(tmp_path: Path) -> None:
    """With VLLM_API_KEY requests under /v1 are answered with 401 without the key or with another one, and
    with 200 with it; probes and metrics need none. Prewarming and the list of models work with the file."""
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    environment = {"VLLM_API_KEY": "s3cret"}
    model = tiny.build("chatml", tmp_path / "model")
    async with (
        VllmEngine(model, environment=environment) as engine,
        aiohttp.ClientSession() as client,
    ):

        async def status(path: str, body: object = None, token: str = "") -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            method = "POST" if body else "GET"
            async with client.request(method, f"{engine.url}{path}", json=body, headers=headers) as answer:
                return answer.status

        assert [await status("/v1/completions", BODY, token) for token in ("", "other", "s3cret")] == [
            401,
            401,
            200,
        ]
        assert [await status("/v1/models", None, token) for token in ("", "s3cret")] == [401, 200]
        assert await status("/v1/embeddings", EMBEDDING) == 401
        assert [await status(path) for path in OPEN] == [200] * len(OPEN)

        host, _, port = engine.hostport.rpartition(":")
        endpoint = Endpoint("e", "ns", host, int(port))
        async with Scraper(interval=float("inf"), key=EngineKey(str(key))) as scraper:
            scraper.follow(EndpointSet((endpoint,)))
            [state] = scraper.states.values()
            await scraper.scrape(state)
            assert (state.served.models, state.models_problem) == (frozenset({"m"}), "")
        for file, outcome in ((str(key), PrewarmOutcome.DONE), ("", PrewarmOutcome.DENIED)):
            async with PrewarmClient(key_file=file) as prewarming:
                assert await prewarming.send(endpoint, "id", b"Hello there", None) is outcome
