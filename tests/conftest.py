"""For all tests: no loop is left behind by pytest itself, and examples have no deadline on shared cores."""

import asyncio
import os

import pytest
from hypothesis import settings

settings.register_profile("kvist", deadline=None, max_examples=int(os.environ.get("KVIST_EXAMPLES", "100")))
settings.load_profile("kvist")


def pytest_sessionstart(session: pytest.Session) -> None:
    """pytest-asyncio asks for the current loop and would make, and never close, one."""
    asyncio.set_event_loop(None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--last-failed`` runs single tests; those of a file may share one pool, in order."""
    said = "only the files in which a test failed the last time, whole"
    parser.addoption("--failed-files", action="store_true", help=said)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``--failed-files``, the rest is left out."""
    if not config.getoption("failed_files") or config.cache is None:
        return
    failed = {name.partition("::")[0] for name in config.cache.get("cache/lastfailed", {})}
    others = [item for item in items if item.nodeid.partition("::")[0] not in failed]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
