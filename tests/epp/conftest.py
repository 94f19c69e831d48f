"""Fixtures of the picker's tests."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.epp.parts import Clock
from tests.epp.queued_director import QueuedDirector


class RealClock(Clock):
    """The time of the event loop."""

    def __call__(self) -> float:
        return time.monotonic()


@pytest.fixture
async def pickers() -> AsyncIterator[Any]:
    """Make directors with a queue, and close them at the end."""
    made: list[QueuedDirector] = []

    def make_picker(
        count: int = 1, slots: int | None = 1, *, live: bool = False, **limits: Any
    ) -> QueuedDirector:
        made.append(QueuedDirector(count, slots, RealClock() if live else Clock(), **limits))
        return made[-1]

    yield make_picker
    for picker in made:
        picker.driver.close()
