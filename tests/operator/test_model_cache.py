"""Looking up facts of models in the background, once, and keeping them."""

import asyncio
import threading

import pytest
from tests.operator import pools

from kvist_operator.errors import ModelNotFound, OperatorError
from kvist_operator.reconcile.model_cache import ModelCache, ModelFacts, ModelQuery
from kvist_operator.spec.pool import Pool

POOL = pools.pool("hf://a/b")


class Hub:
    """A hub that answers when allowed, and counts lookups."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked = 0
        self.error: Exception | None = None

    def __call__(self, _wish: ModelQuery) -> ModelFacts:
        """Look up once."""
        self.asked += 1
        self.open.wait(30)
        if self.error:
            raise self.error
        return pools.known("Qwen/Qwen3-8B"), None


@pytest.fixture
def hub() -> Hub:
    """Return a hub that does not answer yet."""
    return Hub()


async def settled(library: ModelCache, pool: Pool) -> ModelFacts:
    """Ask until there is an answer."""
    while True:
        found = await library.of(pool)
        if found is not None:
            return found


async def test_a_slow_hub_delays_no_pool(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in progress gives None and calls back when it ends; pools of one model share it."""
    monkeypatch.setattr("kvist_operator.reconcile.model_cache.WAIT_SECONDS", 0.01)
    told = asyncio.Event()
    library = ModelCache(told.set, hub)
    assert [await library.of(POOL), await library.of(POOL)] == [None, None]
    assert not told.is_set()

    hub.open.set()
    await told.wait()
    facts, draft = await settled(library, POOL)
    assert (facts.source, draft) == ("catalogue: aiconfigurator-core 0.12.0", None)
    assert await library.of(POOL) == (facts, None)
    assert hub.asked == 1
    await library.close()


@pytest.mark.parametrize("error", [ModelNotFound("spec.model.source: nothing"), ValueError("broken client")])
async def test_a_refusal_is_an_error_that_is_kept_for_a_while(hub: Hub, error: Exception) -> None:
    """A failure is reported for every pool of the model and kept for a while; so is a client that breaks."""
    hub.error = error
    hub.open.set()
    library = ModelCache(lambda: None, hub)
    for _ in range(2):
        with pytest.raises(ModelNotFound, match=r"spec\.model\.source"):
            await settled(library, POOL)
    assert hub.asked == 1
    await library.close()


async def test_what_was_known_stands_when_the_hub_fails_later(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old facts are looked up again; a failure of that does not remove them."""
    monkeypatch.setattr("kvist_operator.reconcile.model_cache.VALID_SECONDS", 0.0)
    monkeypatch.setattr("kvist_operator.reconcile.model_cache.RETRY_SECONDS", 0.0)
    hub.open.set()
    library = ModelCache(lambda: None, hub)
    before = await settled(library, POOL)
    hub.error = ModelNotFound("gone")
    while hub.asked < 3:
        assert await library.of(POOL) == before
        await asyncio.sleep(0.01)
    await library.close()


async def test_it_ends_while_the_hub_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for a thread that waits for the hub."""
    monkeypatch.setattr("kvist_operator.reconcile.model_cache.WAIT_SECONDS", 0.01)
    library = ModelCache(lambda: None, hub)
    assert await library.of(POOL) is None
    await library.close()
    hub.open.set()
    assert issubclass(ModelNotFound, OperatorError)
