"""For all tests: no loop is left behind by pytest itself, and examples have no deadline on shared cores."""

import asyncio

import pytest
from hypothesis import settings

settings.register_profile("kvist", deadline=None)
settings.load_profile("kvist")


def pytest_sessionstart(session: pytest.Session) -> None:
    """pytest-asyncio asks for the current loop and would make, and never close, one."""
    asyncio.set_event_loop(None)
