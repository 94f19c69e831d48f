"""Fixtures of the tests of endpoints."""

from collections.abc import AsyncIterator

import pytest
from tests.epp.endpoints.scraped import Engine


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """A server with all pages of an engine, not started yet."""
    engine = Engine()
    yield engine
    await engine.runner.cleanup()
