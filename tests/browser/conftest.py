"""One pool under load and one browser for the tests of a module, on one event loop."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser
from tests.browser.pool import Pool, busy_pool
from tests.browser.viewer import browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """A running Chromium."""
    async with browser() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Four engines, a picker and Envoy under the demo's traffic."""
    folder = tmp_path_factory.mktemp("pool")
    async with busy_pool(folder, arguments=("--gpu-hour-price=2.99",)) as running:
        yield running
